"""OpenAI's answers: whole ones and chunks, for chat and for completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import Counters
from ..request import Piece
from ..sampling import SamplingParams
from ..step import Drafted, TokenLogprob
from ..text import TextStream
from .ticket import Choice, Ticket

Bytes = Callable[[int], bytes]
"""Token id -> the bytes that it stands for."""


@dataclass(frozen=True)
class Head:
    """What every chunk of one answer begins with."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices. kind: what follows "chat.completion" or "text_completion"."""
        name = f"chat.completion{kind}" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass
class Answer:
    """One answer as it grows. bytes_of: see `Bytes`; decode: token ids -> text."""

    choice: Choice
    chat: bool
    bytes_of: Bytes
    decode: Callable[[Sequence[int]], str]
    eos_ids: frozenset[int]
    text: str = ""
    logprobs: list[dict[str, Any]] | None = None
    _origins: Origins = field(init=False)

    def __post_init__(self) -> None:
        self._origins = Origins(self.decode)

    def add(self, piece: Piece) -> list[dict[str, Any]] | None:
        """Take a round's piece; its log-probabilities, where asked for."""
        self.text += piece.text
        if piece.logprobs is None:
            return None
        # EOS is no part of the text, so it is none of the log-probabilities
        ended = piece.finish_reason == "stop" and piece.token_ids[-1] in self.eos_ids
        shown = piece.logprobs[:-1] if ended else piece.logprobs
        entries = [self._entry(logprob) for logprob in shown]
        self.logprobs = (self.logprobs or []) + entries
        return entries

    def tokens(self, piece: Piece) -> list[dict[str, Any]]:
        """The piece's text by token, with each token's origin; see `Origins`."""
        return self._origins.take(piece)

    def whole(self) -> dict[str, Any]:
        """The entry in `choices` of a whole answer."""
        out: dict[str, Any] = {"index": self.choice.index}
        if self.chat:
            out["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            out["text"] = self.text
        out["logprobs"] = self.shown(self.logprobs, 0)
        out["finish_reason"] = self.choice.finish_reason
        return out

    def shown(self, entries: list[dict[str, Any]] | None, offset: int) -> dict[str, Any] | None:
        """Log-probabilities as the endpoint gives them. offset: characters before the first."""
        if entries is None:
            return None
        if self.chat:
            return {"content": entries, "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._named(token, value) for token, value in logprob.top]
        return {**self._named(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        # JSON has no -inf; OpenAI's own stand-in for "very unlikely"
        return {
            "token": raw.decode(errors="replace"), "logprob": max(value, -9999.0), "bytes": list(raw),
        }  # fmt: skip


class Origins:
    """Splits the text of pieces by token. Joined, the parts are exactly the pieces' text.

    Text may lag behind tokens (half characters, the start of a stop string): a token is told with
    the first part of its text, what comes of it later is told again, marked `continues`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        free = SamplingParams(max_tokens=2**31)
        self._stream = TextStream(decode, free, (), free.max_tokens)
        self._held: list[dict[str, Any]] = []

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The tokens whose text, or what can be shown of it, is in this piece."""
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._stream.push([token])
            text = self._stream.release()
            self._held.append({"id": token, "origin": origin, "text": text})
        out: list[dict[str, Any]] = []
        rest = piece.text
        while self._held and (rest or not self._held[0]["text"] or piece.finish_reason):
            entry = self._held.pop(0)
            shown, later = entry["text"][: len(rest)], entry["text"][len(rest) :]
            rest = rest[len(shown) :]
            out.append({**entry, "text": shown})
            if later and not piece.finish_reason:
                self._held.insert(0, {**entry, "text": later, "continues": True})
                break
        if rest and out:  # half a character at the very end is shown as it is
            out[-1]["text"] += rest
        return out


def usage(ticket: Ticket) -> dict[str, Any]:
    """OpenAI's counts of tokens, over all answers; a prompt counts once however many answers."""
    prompts = {id(choice.ids): choice for choice in ticket.choices}
    prompt = sum(len(choice.ids) for choice in prompts.values())
    output = sum(choice.emitted for choice in ticket.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.reused for c in prompts.values())},
    }


def speculative_decoding(counters: Counters) -> dict[str, Any]:
    """vLLM's names of one request's counts. acceptance_histogram[i]: rounds that accepted i."""
    return {
        "num_spec_steps": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_draft_tokens": counters.num_accepted_tokens,
        "mean_acceptance_length": round(counters.mean_acceptance_length, 4),
        "draft_acceptance_rate": round(counters.draft_acceptance_rate, 4),
        "acceptance_histogram": list(counters.accepted_length_histogram),
        "acceptance_per_position": [round(x, 4) for x in counters.acceptance_per_position],
        "target_forwards": counters.target_forwards,
        "tokens_per_forward": round(counters.tokens_per_forward, 4),
    }


def metrics(ticket: Ticket) -> dict[str, Any]:
    """The response field `metrics`: what speculation did, and how long things took."""
    first = ticket.choices[0]
    drafts = sorted({choice.served_by for choice in ticket.choices})
    return {
        "speculative_decoding": speculative_decoding(ticket.counters)
        | {"depth_histogram": ticket.depth_histogram, "draft": ",".join(drafts)},
        "timing": timing(first),
    }


def timing(choice: Choice) -> dict[str, float | None]:
    """Milliseconds of one answer from its arrival, and tokens a second of its rounds alone."""
    times = choice.times

    def ms(moment: float | None) -> float | None:
        return None if moment is None else round(1e3 * (moment - times.arrived), 3)

    return {
        "queue_ms": ms(times.admitted),
        "time_to_first_token_ms": ms(times.first_token),
        "total_ms": ms(times.ended),
        "tokens_per_s": round(choice.counters.tokens_per_s, 3),
    }


def round_info(drafted: Drafted | None, bytes_of: Bytes) -> dict[str, Any] | None:
    """A round's proposal for a stream that asked: nodes, their parents (-1: the root), the path."""
    if drafted is None:
        return None
    return {
        "budget": drafted.budget,
        "tokens": drafted.tokens,
        "texts": [bytes_of(token).decode(errors="replace") for token in drafted.tokens],
        "parents": drafted.parents,
        "accepted": drafted.path,
    }
