"""From tallies to figures: medians over runs, against plain, by task, and what adapting is worth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .acceptance import RATES, RAW
from .contenders import PLAIN, family, is_adaptive
from .grid import Sample, Tally

WORST_TASK, MEAN_TASK = 0.97, 0.95
"""What adaptive depth is held to: of plain decoding on its worst task, and on average of the best
fixed setting."""


@dataclass(frozen=True)
class Figure:
    """A median over runs. spread: (largest - smallest) / median; None of one run."""

    median: float
    spread: float | None
    runs: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        """Of one value a run."""
        middle = statistics.median(values)
        wide = (max(values) - min(values)) / middle if len(values) > 1 and middle else None
        return Figure(middle, wide, tuple(values))


@dataclass(frozen=True)
class Agreement:
    """Greedy text beside plain decoding's: of how many prompts it is the same, and where the others
    part: index of the first token that differs, by prompt."""

    prompts: int
    same: int
    first_difference: dict[str, int]


@dataclass(frozen=True)
class Speed:
    """One contender at one temperature and batch size, with one kind of weights.

    against:     weights of the plain decoding that `ratio` compares with, run for run
    per_task:    tokens a second; ratio_per_task: against plain; at batch 1 only
    tokens:      counted in one run
    round_ms:    milliseconds of a round, by part; counters: raw counts and rates of all runs
    agreement:   at temperature 0
    """

    name: str
    weights: str
    temperature: float
    batch: int
    peer: bool
    tokens_per_s: Figure
    against: str
    ratio: Figure
    per_task: dict[str, Figure]
    ratio_per_task: dict[str, Figure]
    tokens: int
    round_ms: dict[str, float]
    loop_share: float | None
    counters: dict[str, Any]
    agreement: Agreement | None


@dataclass(frozen=True)
class Adapted:
    """How an adaptive contender stands. worst: the task on which it is slowest against plain.

    mean: over tasks, of its speed against that of `fixed`, the fastest setting of a fixed depth of
    the same draft, or plain decoding
    """

    name: str
    weights: str
    temperature: float
    worst_task: str
    worst: float
    fixed: str
    mean: float

    @property
    def line(self) -> str:
        """In words, with what it is held to."""
        met = [_met(self.worst >= WORST_TASK), _met(self.mean >= MEAN_TASK)]
        return (
            f"{self.name}, {self.weights}, temperature {self.temperature:g}: worst task "
            f"{self.worst_task} at {self.worst:.2f}x plain (wanted: {WORST_TASK}, {met[0]}); mean "
            f"over tasks {self.mean:.2f}x the best fixed setting, {self.fixed} "
            f"(wanted: {MEAN_TASK}, {met[1]})"
        )


def speeds(tallies: Sequence[Tally]) -> list[Speed]:
    """The figures of every contender; a peer that failed is left out."""
    plain = {
        (t.entry.weights, t.entry.temperature, t.entry.batch): t
        for t in tallies
        if t.entry.name == PLAIN
    }
    names = [weights for weights, _, _ in plain]
    out = []
    for tally in tallies:
        c = tally.entry
        if tally.failed or not tally.samples:
            continue
        against = same_weights(c.weights, names) if c.peer else c.weights
        out.append(_speed(tally, plain[against, c.temperature, c.batch]))
    return out


def same_weights(theirs: str, ours: Sequence[str]) -> str:
    """Which of our weights a peer's are: those of its name, a file's for a GGUF, else the first.

    Of a GGUF's, those that round activations to int8 as llama.cpp does, where they are measured.
    """
    if theirs in ours:
        return theirs
    files = [name for name in ("file-a8", "file") if name in ours] if "GGUF" in theirs else []
    return files[0] if files else ours[0]


def adapted(found: Sequence[Speed]) -> list[Adapted]:
    """A line for every adaptive contender at batch 1."""
    out = []
    for mine in found:
        if mine.batch != 1 or mine.peer or not is_adaptive(mine.name):
            continue
        place = (mine.weights, mine.temperature, 1)
        fixed = [
            s
            for s in found
            if (s.weights, s.temperature, s.batch) == place
            and (s.name == PLAIN or family(s.name) == family(mine.name))
            and not (s.peer or is_adaptive(s.name))
        ]
        best = max(fixed, key=lambda s: s.tokens_per_s.median)
        tasks = {task: figure.median for task, figure in mine.ratio_per_task.items()}
        worst = min(tasks, key=lambda task: tasks[task])
        mean = statistics.fmean(
            figure.median / best.per_task[task].median for task, figure in mine.per_task.items()
        )
        out.append(Adapted(mine.name, *place[:2], worst, tasks[worst], best.name, mean))
    return out


def _speed(tally: Tally, plain: Tally) -> Speed:
    c = tally.entry
    mine, base = rates(tally.samples), rates(plain.samples)
    tasks = list(dict.fromkeys(s.task for s in tally.samples if s.task))
    by_task = {task: rates(tally.samples, task) for task in tasks}
    ratios = {task: _ratios(by_task[task], rates(plain.samples, task)) for task in tasks}
    counted = tally.counters if tally.counters.target_forwards else None
    return Speed(
        name=c.name,
        weights=c.weights,
        temperature=c.temperature,
        batch=c.batch,
        peer=c.peer,
        tokens_per_s=Figure.of(mine),
        against=plain.entry.weights,
        ratio=Figure.of(_ratios(mine, base)),
        per_task={task: Figure.of(values) for task, values in by_task.items()},
        ratio_per_task={task: Figure.of(values) for task, values in ratios.items()},
        tokens=sum(s.tokens for s in tally.samples if s.run == tally.samples[0].run),
        round_ms=tally.spent.per_round() if tally.spent.rounds else {},
        loop_share=tally.spent.loop_share if tally.spent.rounds else None,
        counters={} if counted is None else {n: getattr(counted, n) for n in (*RAW, *RATES)},
        agreement=agreement(tally, plain) if c.temperature == 0 else None,
    )


def rates(samples: Sequence[Sample], task: str | None = None) -> list[float]:
    """Tokens a second of each run, of one task or of all: a ratio of sums."""
    out = []
    for run in dict.fromkeys(s.run for s in samples):
        mine = [s for s in samples if s.run == run and task in (None, s.task)]
        ms = sum(s.decode_ms for s in mine)
        out.append(1e3 * sum(s.tokens for s in mine) / ms if ms else 0.0)
    return out


def agreement(tally: Tally, plain: Tally) -> Agreement:
    """Where the first run's texts part from plain decoding's."""
    apart = {}
    for (question, turn), tokens in tally.texts.items():
        wanted = plain.texts[question, turn]
        index = first_difference(tokens, wanted)
        if index is not None:
            apart[f"{question}/{turn + 1}"] = index
    return Agreement(len(tally.texts), len(tally.texts) - len(apart), apart)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; where one ends earlier, its length; None when equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def best_ours(found: Sequence[Speed], fits: Callable[[Speed], bool] = lambda s: True) -> Speed:
    """Our fastest contender at batch 1 and temperature 0, of those that fit."""
    mine = [s for s in found if not s.peer and (s.batch, s.temperature) == (1, 0.0) and fits(s)]
    return max(mine, key=lambda s: s.tokens_per_s.median)


def _ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Run for run, so that a slow run is slow in both."""
    return [a / b if b else 0.0 for a, b in zip(mine, base, strict=True)]


def _met(yes: bool) -> str:
    return "met" if yes else "not met"
