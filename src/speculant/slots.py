"""Slots of the cache: which are free, and which tokens a free one still holds for reuse."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARED = 16
"""Tokens that must be shared before a held slot is chosen for its content: fewer save nothing."""


@dataclass(frozen=True)
class Held:
    """What a free slot still holds: the tokens in its cache row, and the lane that put them there.

    lane: None where that lane's draft knows nothing of them
    """

    tokens: tuple[int, ...]
    lane: int | None


@dataclass(frozen=True)
class Taken:
    """A slot for a request. shared: its first tokens that are the request's too; held: by whom."""

    slot: int
    shared: int = 0
    held: Held | None = None


class Slots:
    """Hands out slots: one that holds the longest shared prefix, else an empty one (the lowest,
    so that neighbours make one view), else the one that has been held longest."""

    def __init__(self, count: int) -> None:
        self._empty = list(range(count))
        self._held: dict[int, Held] = {}  # oldest first

    def __bool__(self) -> bool:
        """True while a slot is free."""
        return bool(self._empty or self._held)

    def __len__(self) -> int:
        """Free slots."""
        return len(self._empty) + len(self._held)

    def take(self, tokens: Sequence[int]) -> Taken:
        """A free slot for a prompt. There must be one."""
        shared = {slot: _shared(held.tokens, tokens) for slot, held in self._held.items()}
        best = max(shared, key=lambda slot: shared[slot], default=None)
        if best is not None and shared[best] >= LEAST_SHARED:
            return Taken(best, shared[best], self._held.pop(best))
        if self._empty:
            return Taken(heapq.heappop(self._empty))
        oldest = next(iter(self._held))
        return Taken(oldest, 0, self._held.pop(oldest))

    def hold(self, slot: int, tokens: Sequence[int], lane: int | None) -> None:
        """A request left; its row keeps these tokens until the slot is needed."""
        self._held[slot] = Held(tuple(tokens), lane)

    def give(self, slot: int) -> None:
        """A request left, and nothing of it stays."""
        heapq.heappush(self._empty, slot)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
