"""One HTTP request on its way through the engine: its answers, and what comes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..constraint import Constraint
from ..metrics import Counters
from ..request import Piece
from ..sampling import SamplingParams
from .errors import ApiError


@dataclass
class Times:
    """Moments of one answer, in seconds of a monotonic clock."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


@dataclass
class Choice:
    """One answer that is asked for.

    draft:            the name of the lane asked for; served_by: of the one that took it
    num_draft_tokens: at most so many tokens deep; None: as the draft does
    reused:           prompt tokens that were in the cache already
    depths:           rounds by how deep the draft was asked to go
    """

    index: int
    ids: Sequence[int]
    params: SamplingParams
    draft: str
    num_draft_tokens: int | None
    constraint: Constraint | None
    counters: Counters = field(default_factory=Counters)
    number: int | None = None
    served_by: str = ""
    reused: int = 0
    emitted: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    times: Times = field(default_factory=lambda: Times(0.0))
    finish_reason: str | None = None


@dataclass(frozen=True)
class Event:
    """What happened to one answer: a round's piece, or the error that ends it."""

    choice: Choice
    piece: Piece | None = None
    error: ApiError | None = None


@dataclass
class Ticket:
    """The answers of one HTTP request.

    group:    whose turn for admission it takes
    deadline: of the worker's clock, after which it fails
    task:     label for the metrics
    events:   None says that the client is gone
    """

    choices: list[Choice]
    group: Hashable
    task: str = ""
    deadline: float = 0.0
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)

    @property
    def running(self) -> bool:
        """True when an answer has had a slot."""
        return any(choice.times.admitted is not None for choice in self.choices)

    @property
    def counters(self) -> Counters:
        """The counts of all answers together."""
        total = Counters()
        for choice in self.choices:
            total.merge(choice.counters)
        return total

    @property
    def depth_histogram(self) -> list[int]:
        """Rounds of all answers in which the draft was asked to go 0, 1, 2, ... deep."""
        total = sum((choice.depths for choice in self.choices), Counter[int]())
        return [total[depth] for depth in range(max(total, default=-1) + 1)]
