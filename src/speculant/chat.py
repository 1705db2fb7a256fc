"""Text on a terminal: streaming, the colours of `--show-draft`, and the chat loop."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from .drafts.base import Draft
from .engine import stream
from .metrics import Counters
from .request import Piece, RequestError
from .sampling import SamplingParams
from .target.base import Target
from .text import TextStream

COLOURS = {"accepted": "green", "recovered": "red", "bonus": "cyan", "plain": "default"}


def print_pieces(
    target: Target, params: SamplingParams, pieces: Iterable[Piece], show_draft: bool
) -> str:
    """Print text as it comes; the whole text. With show_draft, tokens coloured by origin."""
    if show_draft:
        return _print_coloured(target, params, pieces)
    text = ""
    for piece in pieces:
        text += piece.text
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    return text


def _print_coloured(target: Target, params: SamplingParams, pieces: Iterable[Piece]) -> str:
    """Print every token in the colour of its origin, then what the colours mean; the whole text."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console(highlight=False, soft_wrap=True)

    def show(words: str, origin: str) -> None:  # rich's Text would turn tabs into spaces
        segment = Segment(words, Style.parse(COLOURS[origin]))
        console.print(Segments([segment]), end="")

    eos = frozenset() if params.ignore_eos else target.tokenizer.eos_ids
    shown = TextStream(target.tokenizer.decode, params, eos | {*params.stop_token_ids}, sys.maxsize)
    text, done, origin = "", 0, "plain"
    for piece in pieces:
        text += piece.text
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            shown.push([token])
            words = shown.release()
            done += len(words)
            show(words, origin)
    show(text[done:], origin)  # what the token limit let go: half a stop string or character
    console.print()
    for name in COLOURS:
        show(f"{name} ", name)
    return text


def converse(
    target: Target,
    draft: Draft,
    params: SamplingParams,
    system: str | None,
    num_draft_tokens: int | None,
    show_draft: bool,
) -> None:
    """Read user turns until end of input or /exit."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
    if not target.tokenizer.has_chat_template:
        raise RequestError(
            f"{target.info.name} has no chat template: use `speculant generate --raw`"
        )
    opening: list[dict[str, str]] = []
    if system is not None:
        opening = [{"role": "system", "content": system}]
    history, totals = list(opening), Counters()
    print(
        f"{target.info.name} with {draft.info.name}. /reset forgets, /stats counts, /exit leaves."
    )
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        if said == "/exit":
            return
        if said == "/reset":
            history = list(opening)
            print("forgotten")
        elif said == "/stats":
            print(stats_line(totals))
        elif said.startswith("/"):
            print(f"unknown command {said}: /reset, /stats or /exit")
        elif said:
            answer = _answer(
                target,
                draft,
                [*history, {"role": "user", "content": said}],
                params,
                num_draft_tokens,
                show_draft,
                totals,
            )
            if answer is not None:
                history += [
                    {"role": "user", "content": said},
                    {"role": "assistant", "content": answer},
                ]


def _answer(
    target: Target,
    draft: Draft,
    messages: list[dict[str, str]],
    params: SamplingParams,
    num_draft_tokens: int | None,
    show_draft: bool,
    totals: Counters,
) -> str | None:
    """Stream one answer; None, with a line to the user, when the conversation no longer fits."""
    counters = Counters()
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "counters": counters}
    try:
        pieces = stream(target, draft, messages, params, **options)
        text = print_pieces(target, params, pieces, show_draft)
    except RequestError as error:
        print(f"{error}, or /reset")
        return None
    print()
    totals.merge(counters)
    return text


def stats_line(counters: Counters) -> str:
    """One line of what speculation did."""
    return (
        f"{counters.num_emitted_tokens} tokens in {counters.target_forwards} target forwards "
        f"({counters.tokens_per_forward:.2f} a forward), {counters.tokens_per_s:.1f} tokens/s, "
        f"{counters.num_accepted_tokens} of {counters.num_draft_tokens} drafted tokens accepted "
        f"({counters.draft_acceptance_rate:.0%})"
    )
