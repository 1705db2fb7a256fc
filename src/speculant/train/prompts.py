"""Prompts without a data set: a chat model continues its template's opening of a user turn.

The idea is Magpie's (Xu et al. 2024, arXiv 2406.08464): given only the tokens that open a user's
turn, a chat model writes a plausible user message. Such messages are short, so documents that the
target wrote itself, with a task about them, and second turns bring the later positions.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..sampling import SamplingParams
from ..target.base import Tokenizer

Message = dict[str, str]
MARK = "\u2063MARK\u2063"
"""Stands for the user's text while a template is taken apart; no template contains it."""

SHORTEST, LONGEST = 12, 1200  # characters of a synthesised request
REPEATS = 0.35  # share of a text's 4-grams that may be repeats before it counts as a loop

DOCUMENT_TASKS = (
    "Write a detailed article of several paragraphs about this: {seed}",
    "Write a long, factual report on the following topic: {seed}",
    "Write a short story of about 400 words. It is about: {seed}",
    "Write a documented Python module that deals with this: {seed}",
    "Write a page of a handbook that explains: {seed}",
)
FOLLOW_UPS = (
    "Summarize the following text in a few sentences.\n\n{text}",
    "Translate the following text into French.\n\n{text}",
    "Read the text and list its key points.\n\n{text}",
    "Write three questions about this text and answer each from it.\n\n{text}",
    "Rewrite the following text for a ten-year-old.\n\n{text}",
    "Extract the names, places and numbers of this text as JSON.\n\n{text}",
    "What is the main idea of the text below? Quote the sentence that shows it.\n\n{text}",
    "Correct the mistakes in this text and return it in full.\n\n{text}",
)
RELAYS = (
    ("Write a math word problem with numbers, without its solution, about: {seed}", "{text}"),
    ("Ask one short factual question about this topic: {seed}", "{text}"),
    ("Schreibe zwei deutsche Sätze zum Thema: {seed}", "Translate German to English: {text}"),
    ("Écris trois phrases en français sur: {seed}", "Translate French to English: {text}"),
    ("Write a newspaper report about: {seed}", "Summarize: {text}"),
    ("Write an encyclopedia entry about: {seed}",
     "{text}\nWhat does this mean, and why is it important?"),
    ("Write a list of facts with names, dates and numbers about: {seed}",
     "Extract every name, date and number from the following text.\n\n{text}"),
    ("Write a short Python function with a bug in it, about: {seed}",
     "Find the bug in this code and correct it.\n\n{text}"),
)  # fmt: skip
"""A request whose answer is the next user's message: problems, questions, texts to work on."""
COMPARISONS = (
    "Compare these two texts.\n\nText 1:\n{text}\n\nText 2:\n{other}",
    "Write one summary that covers both texts.\n\nFirst:\n{text}\n\nSecond:\n{other}",
    "Which facts appear in the first text but not in the second?\n\n1. {text}\n\n2. {other}",
)
SECOND_TURNS = (
    "Can you explain that in more detail?",
    "Give me an example.",
    "Make it shorter.",
    "Rewrite your answer as a list.",
    "What should I do next?",
    "Why is that so?",
    "Now write it as a dialogue between two people.",
    "Put the answer into JSON.",
)


@dataclass(frozen=True)
class Opening:
    """Token ids that open a user's turn, and what ends it."""

    ids: tuple[int, ...]
    params: SamplingParams


def opening(tokenizer: Tokenizer, begun: str = "", max_tokens: int = 160) -> Opening:
    """Take the chat template apart around the user's text, or behind what is `begun` of it.

    Raises ValueError for a model without a chat template.
    """
    if not tokenizer.has_chat_template:
        raise ValueError(
            "the target has no chat template, so it cannot write its own requests: pass "
            "--prompts FILE, texts that it then goes on with"
        )
    marked = tokenizer.chat([{"role": "user", "content": begun + MARK}])
    plain = tokenizer.chat([{"role": "user", "content": begun}])
    shared = 0
    while shared < min(len(marked), len(plain)) and marked[shared] == plain[shared]:
        shared += 1
    # the ids before the mark; the mark's own first token may differ from an empty text's
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, top_p=0.95)
    return Opening(tuple(marked[:shared]), params)


def usable(text: str, longest: int = LONGEST) -> bool:
    """True for a request worth answering: of fair length, printable, no repetition loop."""
    text = text.strip()
    if not SHORTEST <= len(text) <= longest or "\ufffd" in text or "<|" in text:
        return False
    return any(c.isalpha() for c in text) and not looping(text)


def looping(text: str) -> bool:
    """True when many of the text's 4-grams of words repeat earlier ones."""
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(grams) > 8 and 1 - len(set(grams)) / len(grams) > REPEATS


def before_loop(tokens: Sequence[int], gram: int = 6, window: int = 48) -> int:
    """Tokens of an answer before it falls into a loop; all of them when it does not.

    A loop begins where, of the next `window` tokens, REPEATS * 2 end a gram that was there before.
    """
    seen: set[tuple[int, ...]] = set()
    repeats = []  # whether the gram that ends here is an old one
    for end in range(len(tokens)):
        mine = tuple(tokens[max(0, end + 1 - gram) : end + 1])
        repeats.append(len(mine) == gram and mine in seen)
        seen.add(mine)
    count = sum(repeats[:window])
    for start in range(len(tokens) - window + 1):
        if start:
            count += repeats[start + window - 1] - repeats[start - 1]
        if repeats[start] and count >= 2 * REPEATS * window:
            return start - gram + 1
    return len(tokens)


def key(text: str) -> str:
    """What two requests share when they are the same but for case, space and punctuation."""
    return re.sub(r"[^\w]+", " ", text.lower()).strip()


class Unique:
    """Lets every request through once."""

    def __init__(self, seen: Iterable[str] = ()) -> None:
        self._seen = {key(text) for text in seen}

    def __call__(self, text: str) -> bool:
        mine = key(text)
        if mine in self._seen:
            return False
        self._seen.add(mine)
        return True


def document_request(seed_text: str, rng: random.Random) -> str:
    """A request that makes the target write a long text."""
    return rng.choice(DOCUMENT_TASKS).format(seed=seed_text.strip())


def follow_up(document: str, rng: random.Random) -> str:
    """A task about a document the target wrote."""
    return rng.choice(FOLLOW_UPS).format(text=document.strip())


def relay(seed_text: str, rng: random.Random) -> tuple[str, str]:
    """A request, and what a user says to the target who was given its answer as {text}."""
    first, second = rng.choice(RELAYS)
    return first.format(seed=seed_text.strip()), second


def comparison(document: str, other: str, rng: random.Random) -> str:
    """A task about two documents the target wrote."""
    return rng.choice(COMPARISONS).format(text=document.strip(), other=other.strip())


def second_turn(rng: random.Random) -> str:
    """What a user may say after an answer."""
    return rng.choice(SECOND_TURNS)


def read_prompts(path: Path) -> Iterator[list[Message]]:
    """Conversations of a file, each ending with a user's turn or with the answers given.

    JSONL with `prompt`, `messages` ({role, content}) or ShareGPT's `conversations` ({from, value});
    any other file is text, one prompt a line. A broken line raises ValueError naming it.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix not in (".jsonl", ".json"):
            yield [{"role": "user", "content": line.strip()}]
            continue
        try:
            yield _messages(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number}: not a prompt ({type(error).__name__}: {error}): "
                "give prompt, messages or conversations"
            ) from None


def _messages(record: dict[str, Any]) -> list[Message]:
    """One record's conversation."""
    if "prompt" in record:
        return [{"role": "user", "content": _text(record["prompt"])}]
    if "messages" in record:
        return [{"role": m["role"], "content": _text(m["content"])} for m in record["messages"]]
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    roles["system"] = "system"
    turns: Sequence[dict[str, str]] = record["conversations"]
    return [{"role": roles[t["from"]], "content": _text(t["value"])} for t in turns]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text is empty or no string")
    return value
