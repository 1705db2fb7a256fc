"""What one round gave one row, and the log-probabilities that go with its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .proposal import deepest


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token and of the likeliest ones, from the target's raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Drafted:
    """One row's proposal in a round, and what was committed of it.

    tokens, parents: the nodes, -1 for the root above them; path: the accepted ones, root first
    budget: how deep the draft was asked to go; 0 when it was not asked
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    budget: int

    @property
    def depth(self) -> int:
        """The deepest node, 1 below the root; 0 of an empty proposal."""
        return deepest(self.parents)


@dataclass(frozen=True)
class Step:
    """What one round committed for one row.

    origins: per token, how it came to be: accepted, recovered, bonus, or plain (nothing drafted)
    error:   why the row cannot go on, naming the position; the other rows are not touched by it
    """

    tokens: list[int]
    origins: list[str]
    logprobs: list[TokenLogprob] | None
    error: str | None = None
    drafted: Drafted | None = None


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Raw log-probabilities of committed tokens; token i was drawn after logits[i], [kept, V].

    count: how many of the likeliest tokens to report beside each
    """
    out = []
    for logps, token in zip(logits.log_softmax(dim=-1), tokens, strict=True):
        values, ids = logps.topk(min(count, len(logps)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        out.append(TokenLogprob(token, float(logps[token]), top))
    return out
