"""How much to draft now. Decided before anything is sampled (design, law 3).

`Fixed` always drafts the same depth; `adaptive` has the controls that choose it. `ByPart` is for a
draft in parts, each with a control of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .prices import Prices
from .track import Track


class Asked(Protocol):
    """What a control may know of how a row was asked for: `SamplingParams`."""

    @property
    def greedy(self) -> bool:
        """At temperature 0."""
        ...


class Control(Protocol):
    """Decides the depth of a round."""

    @property
    def drafts(self) -> bool:
        """Whether any row of the round at hand could be asked to draft."""
        ...

    def sleeps(self, asked: Asked, rows: int) -> bool:
        """Whether a request that begins as one of so many rows had better never draft: then its draft
        need not be kept up to date either, and it is plain decoding, no slower."""
        ...

    def enter(self, rows: Sequence[Asked], beside: int = 0) -> None:
        """The next round has these rows: what they were asked with, in any order.

        beside: further rows of the same forward, that sleep
        """
        ...

    def budget(self, remaining: int, track: Track) -> int:
        """Depth to draft when `remaining` tokens may still be committed."""
        ...

    def prices(self, track: Track) -> Prices | None:
        """What a node must be worth, for a draft that asks for it; None: nothing."""
        ...

    def learn(self, track: Track, depth: int, accepted: int, nodes: int) -> None:
        """A round that was asked to draft is over: see `Track.observe`."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same depth, as far as the request has room for it."""

    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}: it must be at least 0")

    @property
    def drafts(self) -> bool:
        """See `Control`."""
        return self.num_draft_tokens > 0

    def sleeps(self, asked: Asked, rows: int) -> bool:
        """Whoever fixed the depth wants it."""
        return False

    def enter(self, rows: Sequence[Asked], beside: int = 0) -> None:
        """Whatever the rows, the depth is the same."""

    def budget(self, remaining: int, track: Track | None = None) -> int:
        """Depth to draft when `remaining` tokens may still be committed.

        A round commits one token more than it accepts, hence the one that is kept back.
        """
        return max(0, min(self.num_draft_tokens, remaining - 1))

    def prices(self, track: Track | None = None) -> Prices | None:
        """Every node is drafted."""
        return None

    def learn(self, track: Track, depth: int, accepted: int, nodes: int) -> None:
        """Whatever was accepted, the depth is the same."""


class ByPart:
    """A `Control` of a draft in parts (`drafts.hybrid`), and the `Depths` that the draft asks: each
    part by its own costs and by what it has shown itself.

    depth: the deepest that any part goes; parts: the control of each
    """

    def __init__(self, depth: int, parts: Sequence[Control]) -> None:
        self.whole, self.parts = Fixed(depth), tuple(parts)

    @property
    def drafts(self) -> bool:
        """See `Control`."""
        return any(part.drafts for part in self.parts)

    def sleeps(self, asked: Asked, rows: int) -> bool:
        """Where every part does."""
        return all(part.sleeps(asked, rows) for part in self.parts)

    def enter(self, rows: Sequence[Asked], beside: int = 0) -> None:
        """See `Control`."""
        for part in self.parts:
            part.enter(rows, beside)

    def budget(self, remaining: int, track: Track) -> int:
        """As deep as any part may go; the draft asks for the part that it takes."""
        return self.whole.budget(remaining)

    def prices(self, track: Track) -> Prices | None:
        """The draft asks for those of the part that it takes."""
        return None

    def learn(self, track: Track, depth: int, accepted: int, nodes: int) -> None:
        """The draft tells the part that drafted."""

    def begin(self) -> tuple[Track, ...]:
        """See `drafts.base.Depths`."""
        return tuple(Track() for _ in self.parts)

    def ask(self, record: Sequence[Track], part: int, most: int) -> int:
        """See `drafts.base.Depths`."""
        return min(most, self.parts[part].budget(most + 1, record[part]))

    def worth(self, record: Sequence[Track], part: int) -> Prices | None:
        """See `drafts.base.Depths`."""
        return self.parts[part].prices(record[part])

    def tell(
        self, record: Sequence[Track], part: int, depth: int, accepted: int, nodes: int
    ) -> None:
        """See `drafts.base.Depths`."""
        self.parts[part].learn(record[part], depth, accepted, nodes)
