"""One request: its prompt, what it streams, and what it leaves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .metrics import Counters
from .sampling import SamplingParams
from .step import Drafted, TokenLogprob
from .target.base import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A user message (or plain text for a model without a chat template), token ids, or messages."""


T = TypeVar("T")


class RequestError(ValueError):
    """A request that cannot be served; the message is one line for the user."""


@dataclass(frozen=True)
class Piece:
    """What one step added to one request. `text` may lag behind `token_ids`."""

    request: int
    text: str
    token_ids: list[int]
    origins: list[str]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    error: str | None = None
    drafted: Drafted | None = None


@dataclass
class Completion:
    """A finished request.

    text ends before a stop string and leaves out special tokens; token_ids holds every committed
    token, EOS or the one that completed a stop string included.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    seed: int = 0
    metrics: Counters = field(default_factory=Counters)

    def add(self, piece: Piece) -> None:
        """Append what a step gave."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.origins += piece.origins
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        self.finish_reason = piece.finish_reason or ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: text, token_ids, finish_reason, usage, metrics and, where asked, logprobs."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "metrics": self.metrics.as_dict(),
        }
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in self.logprobs
            ]
        return out


def prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a string is a user message where the model has a chat template."""
    tokenizer = target.tokenizer
    if hasattr(prompt, "tolist"):  # a tensor or an array of ids
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty: give at least one character")
        if tokenizer.has_chat_template:
            return tokenizer.chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token or message")
    if isinstance(prompt[0], Mapping):
        if not tokenizer.has_chat_template:
            raise RequestError(f"{target.info.name} has no chat template: pass text or token ids")
        return tokenizer.chat([dict(message) for message in prompt])  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def check_request(
    ids: Sequence[int],
    params: SamplingParams,
    stop_ids: Iterable[int],
    vocab: int,
    capacity: int,
) -> None:
    """Raise RequestError for token ids outside the vocabulary, a prompt that leaves no room in the
    context of `capacity` tokens, and when nothing could be sampled."""
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    for name, tokens in (("prompt", ids), ("logit_bias", params.logit_bias)):
        wrong = [t for t in tokens if not 0 <= t < vocab]
        if wrong:
            raise RequestError(f"{name}: token id {wrong[0]} is outside 0..{vocab - 1}")
    forbidden = {token for token, value in params.logit_bias.items() if value == -math.inf}
    if params.min_tokens:
        forbidden |= {token for token in stop_ids if token < vocab}
    if len(forbidden) >= vocab:
        raise RequestError("logit_bias and min_tokens forbid every token of the vocabulary")
    if len(ids) >= capacity:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context holds {capacity}: shorten the prompt"
        )


class FairQueue(Generic[T]):
    """Items of many groups: one from each group in turn, first come first served within it.

    A group that queues many items at once does not keep a later group's single item waiting.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, deque[T]] = {}  # the next to be served first

    def __len__(self) -> int:
        return sum(len(items) for items in self._groups.values())

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._groups.values() for item in items)

    def push(self, group: Hashable, item: T) -> None:
        """Add an item behind its group's others."""
        self._groups.setdefault(group, deque()).append(item)

    def pop(self) -> T:
        """The next item; its group goes to the back."""
        group = next(iter(self._groups))
        items = self._groups.pop(group)
        item = items.popleft()
        if items:
            self._groups[group] = items
        return item

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Remove items."""
        for group, items in list(self._groups.items()):
            kept = deque(item for item in items if not unwanted(item))
            if kept:
                self._groups[group] = kept
            else:
                del self._groups[group]
