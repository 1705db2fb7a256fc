"""The measured runs: every contender on the same questions, one group of them at a time.

Contenders alternate within a group, in an order that turns from group to group and from run to run,
so that a machine that slows down, or a place in the order, meets all of them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..metrics import Counters
from .asked import Asked
from .contenders import PLAIN, Contender, Entry, Outcome, Spent, parse_contender

T = TypeVar("T")
Groups = Mapping[int, Sequence[Sequence[Asked]]]
"""Batch size -> the groups of prompts that are answered together."""


@dataclass(frozen=True)
class Plan:
    """What is compared.

    drafts:       as `parse_contender` reads them; plain decoding is always there
    temperatures: of the target; batches: prompts answered together
    weights:      what the target's matrices are rounded to, see `load_target`; "" is its dtype
    limit:        questions, spread evenly over the categories; None: one a category
    peers:        names, () for none; None: all that are found
    """

    drafts: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    weights: tuple[str, ...] = ("",)
    max_tokens: int = 96
    runs: int = 3
    limit: int | None = None
    peers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("drafts", "temperatures", "batches", "weights"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"--{name} names nothing")
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} names one thing twice")
        for spec in self.drafts:
            parse_contender(spec)
            if spec == PLAIN:
                raise ValueError("--drafts: plain decoding is always compared, leave it out")
        if any(batch < 1 for batch in self.batches):
            raise ValueError("--batches: each must be at least 1")
        if not all(math.isfinite(t) and t >= 0 for t in self.temperatures):
            raise ValueError("--temperature: each must be a number from 0, which is greedy")
        for name, value, least in (("runs", self.runs, 1), ("max-tokens", self.max_tokens, 2)):
            if value < least:
                raise ValueError(f"--{name} is {value}: it must be at least {least}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit is {self.limit}: it must be at least 1")


@dataclass(frozen=True)
class Sample:
    """One group in one run. task: its question's category; "" of a group of several questions."""

    run: int
    task: str
    tokens: int
    decode_ms: float


@dataclass
class Tally:
    """All that one contender did in the measured runs.

    texts: prompt -> tokens appended in the first run
    failed: why it was given up; empty where it was not
    """

    entry: Entry
    samples: list[Sample] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    counters: Counters = field(default_factory=Counters)
    texts: dict[tuple[int | str, int], tuple[int, ...]] = field(default_factory=dict)
    failed: str = ""

    def add(self, run: int, group: Sequence[Asked], outcome: Outcome) -> None:
        """A group that was answered in a run."""
        task = group[0].question.category if self.entry.batch == 1 else ""
        self.samples.append(Sample(run, task, outcome.counted, outcome.decode_ms))
        for asked, tokens in zip(group, outcome.tokens, strict=True):
            self.texts.setdefault(asked.key, tokens)
        if outcome.spent is not None:
            self.spent.add(outcome.spent)
        if outcome.counters is not None:
            self.counters.merge(outcome.counters)


def run_grid(
    contenders: Sequence[Contender],
    groups: Groups,
    runs: int,
    between: Callable[[int, int], None] = lambda done, total: None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Tally]:
    """Let every contender answer all groups of its batch size, `runs` times, after a warm-up.

    between: called after every group with how many of how many are done
    A peer that fails is given up, and its tally says why; an error of our own goes up.
    """
    racing = [(contender, Tally(contender.entry)) for contender in contenders]
    for batch, mine in groups.items():  # the first group of each batch size warms up
        for contender, tally in racing:
            if tally.entry.batch == batch:
                progress(f"warming up: {tally.entry.label}")
                _answer(contender, tally, mine[0])
    steps = [(run, *step) for run in range(1, runs + 1) for step in mixed(groups)]
    began = time.perf_counter()
    for done, (run, batch, index, group) in enumerate(steps):
        left = (time.perf_counter() - began) * (len(steps) - done) / max(1, done)
        ahead = f", about {math.ceil(left / 60)} min left" if done else ""
        here = [pair for pair in racing if pair[1].entry.batch == batch]
        for contender, tally in rotated(here, run + index):
            progress(f"step {done + 1}/{len(steps)}{ahead}: {tally.entry.label}")
            outcome = _answer(contender, tally, group)
            if outcome is not None:
                tally.add(run, group, outcome)
        between(done + 1, len(steps))
    return [tally for _, tally in racing]


def mixed(groups: Groups) -> Iterator[tuple[int, int, Sequence[Asked]]]:
    """(batch, its how-manieth group, the group) of one run, the batch sizes evenly mixed."""
    places = [
        ((index + 0.5) / len(mine), batch, index)
        for batch, mine in groups.items()
        for index in range(len(mine))
    ]
    for _, batch, index in sorted(places):
        yield batch, index, groups[batch][index]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, beginning with number `by`."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


def _answer(contender: Contender, tally: Tally, group: Sequence[Asked]) -> Outcome | None:
    """What the contender answers; None from a peer that failed."""
    if tally.failed:
        return None
    try:
        return contender.run(group)
    except Exception as error:  # a peer is somebody else's program: it may raise anything
        if not tally.entry.peer:
            raise
        tally.failed = " ".join(str(error).split()) or type(error).__name__
        return None
