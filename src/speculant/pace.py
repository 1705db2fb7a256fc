"""What rounds of a pair cost on this machine: measured once, for `adaptive.Adaptive`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from .adaptive import Adaptive, ByConfidence, ByLoad, Costs
from .control import ByPart, Control
from .drafts.base import Draft, InParts
from .engine import Engine
from .sampling import SamplingParams
from .target.base import Target

CONTEXT = 192
"""Cached tokens behind a timed forward: a chat's."""
REPEATS, WARM_UP = 12, 2
BUSY = 0.7
"""Load above which somebody else is at work; starting adds some 0.1 of ours."""
ROUNDS, TRIES = 6, 3
"""Rounds of drafting that are timed at each depth, and how often: the fastest try counts."""


def measure_costs(
    target: Target, draft: Draft, num_draft_tokens: int | None = None, batch: int = 1
) -> Costs:
    """Time rounds of `batch` rows at the depths that a draft can draft: the target's forward and it.

    num_draft_tokens: deepest; None: the draft's own. A chain may go 0 to that deep, and so may a tree
    that chooses its nodes by their worth, whose `rows` are a chain's; other trees are drafted whole or
    not at all. Takes some forty forwards; at batch sizes above 1, where a forward's time grows evenly
    with its rows, only the shallowest, a middle and the deepest are timed.
    """
    most = draft.info.depth if num_draft_tokens is None else num_draft_tokens
    if most < 1:
        raise ValueError(f"draft {draft.info.name} drafts nothing: there is nothing to adapt")
    priced, largest = draft.info.priced, 1 + draft.info.max_nodes
    tree = draft.info.max_nodes > draft.info.depth and not priced
    depths = (0, most) if tree else tuple(range(most + 1))
    window = draft.info.max_window
    rows = tuple(1 + window + (draft.info.max_nodes if tree and d else d) for d in depths)
    if priced:
        timed = {largest, *(1 << i for i in range(largest.bit_length()))}
        timed = timed if batch == 1 else {1, (1 + largest) // 2, largest}
    else:
        timed = {1, *rows} if batch == 1 else {rows[0], rows[len(rows) // 2], rows[-1]}
    forward = rising(forward_times(target, sorted(timed), batch=batch))
    nothing = _draft_ms(target, draft, 0, batch)
    deep = (most,) if tree or most == 1 else (1, most)
    ends = [_draft_ms(target, draft, d, batch) for d in deep]
    if tree or most == 1:
        drafted: tuple[float, ...] = (nothing, ends[0])
    else:  # a step costs the same at every depth
        step = (ends[1] - ends[0]) / (most - 1)
        drafted = (nothing, *(max(0.0, ends[0] + step * (d - 1)) for d in depths[1:]))
    return Costs(depths, rows, forward, drafted)


def rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The nearest times that never fall as rows are added (isotonic regression, by pooling neighbours).

    Where memory is the bound, one row takes as long as four, and what a measurement makes of that
    decides whether drafting seems to pay.
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for _, ms in points:
        mean, count = ms, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    times = [mean for mean, count in pools for _ in range(count)]
    return tuple((rows, ms) for (rows, _), ms in zip(points, times, strict=True))


def by_load(target: Target, draft: Draft, num_draft_tokens: int | None, max_rows: int) -> ByLoad:
    """Measure a draft's costs at 1, 2, 4, ... and `max_rows` rows. Takes seconds for a small model.

    num_draft_tokens: deepest; None: the draft's own. Where even a very good draft does not pay,
    larger batches are not measured: it pays there even less.
    """
    tables: dict[int, Costs] = {}
    for size in sizes(max_rows):
        tables[size] = measure_costs(target, draft, num_draft_tokens, size)
        if not Adaptive(tables[size]).promising:
            break
    kind = ByConfidence if draft.info.priced else Adaptive
    return ByLoad(tables, draft.info.samples, kind)


def adapt(
    target: Target, draft: Draft, num_draft_tokens: int | None = None, max_rows: int = 1
) -> Control:
    """A control that drafts as deep as pays, for up to `max_rows` rows: see `by_load`.

    Of a draft in parts each goes by its own costs. The draft is told, and so are its copies.
    """
    if not isinstance(draft, InParts):
        return by_load(target, draft, num_draft_tokens, max_rows)
    most = draft.info.depth if num_draft_tokens is None else num_draft_tokens
    parts = [by_load(target, p, min(most, p.info.depth), max_rows) for p in draft.parts]
    for part in parts:  # beside a part that samples, a copied chain's depth tells in the text too
        part.samples = any(p.info.samples for p in draft.parts)
    control = ByPart(most, parts)
    draft.depths[:] = [control]
    return control


def sizes(most: int) -> Iterator[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


class ForwardTimer:
    """Times forwards of `rows` tokens in each of `batch` rows of the cache, one pass at a time.

    A pass times every shape once, so that a machine that slows down slows all of them; passes may be
    spread over other work. context: cached tokens behind each forward.
    """

    def __init__(
        self, target: Target, rows: Sequence[int], context: int, batches: Sequence[int] = (1,)
    ) -> None:
        self.target, self.context = target, context
        self.cache = target.new_cache(max(batches), context + max(rows))
        for slot in range(max(batches)):
            self.cache.advance(slot, context)
        self.times: dict[tuple[int, int], list[float]] = {(b, r): [] for b in batches for r in rows}

    def run(self, passes: int = 1) -> None:
        """Time every shape so often."""
        for _ in range(passes):
            for (batch, rows), seen in self.times.items():
                tokens = torch.full((batch, rows), 5)
                positions = self.context + torch.arange(rows).expand(batch, -1)
                where = self.cache.rows(range(batch), rows)
                began = time.perf_counter()
                self.target.forward(tokens, positions, None, where)
                if self.target.info.device.type == "cuda":  # not measured here: no CUDA machine
                    torch.cuda.synchronize()
                seen.append(1e3 * (time.perf_counter() - began))

    def medians(self) -> dict[tuple[int, int], tuple[float, float]]:
        """(batch, rows) -> median milliseconds and their spread (largest less smallest); the first
        passes warm up and do not count."""
        return {
            shape: (statistics.median(seen[WARM_UP:]), max(seen[WARM_UP:]) - min(seen[WARM_UP:]))
            for shape, seen in self.times.items()
        }


def forward_times(
    target: Target,
    rows: Sequence[int],
    context: int = CONTEXT,
    repeats: int = REPEATS,
    batch: int = 1,
) -> tuple[tuple[int, float], ...]:
    """(rows, ms) of a forward of so many tokens behind cached ones in each row of a batch: the mean of
    the faster half, since what disturbs a measurement only ever adds."""
    context = min(context, target.info.context_length - max(rows) - 1)
    timer = ForwardTimer(target, rows, context, (batch,))
    timer.run(WARM_UP + repeats)
    return tuple(
        (k, statistics.mean(sorted(seen[WARM_UP:])[: (repeats + 1) // 2]))
        for (_, k), seen in timer.times.items()
    )


def pick_threads(target: Target) -> tuple[int, dict[int, float]] | None:
    """How many threads to compute with on a machine that others use too; None: torch's own number.

    torch's threads spin while they wait for each other. With another process on one of their cores
    every step of a forward waits for the thread that was put off, so that fewer threads can be many
    times faster. Where the load says that cores are taken, forwards of one row are timed with all
    threads, one less, half of them and one, in turn; more threads win where they are as fast.

    Returns the number, and the milliseconds of each that was tried.
    """
    most = torch.get_num_threads()
    if most == 1 or target.info.device.type != "cpu" or not _others_run():
        return None
    counts = sorted({most, most - 1, max(1, most // 2), 1}, reverse=True)
    timers = {n: ForwardTimer(target, (1,), 0) for n in counts}
    try:
        for _ in range(WARM_UP + 2):
            for n, timer in timers.items():
                torch.set_num_threads(n)
                timer.run()
    finally:
        torch.set_num_threads(most)
    found = {n: timer.medians()[1, 1][0] for n, timer in timers.items()}
    best = min(found.values())
    return next(n for n, ms in found.items() if ms <= 1.1 * best), found


def _others_run() -> bool:
    """True when the machine's load of the last minute is more than our own start explains."""
    try:
        return os.getloadavg()[0] > BUSY
    except (AttributeError, OSError):  # not on this system
        return False


def _draft_ms(target: Target, draft: Draft, depth: int, batch: int) -> float:
    """Milliseconds that a round at a depth takes beside the target's forward."""
    prompt = [5 + i % 7 for i in range(min(48, target.info.context_length // 2))]
    params = SamplingParams(
        max_tokens=ROUNDS * (depth + 1) + 2, temperature=0.0, ignore_eos=True, seed=0
    )
    capacity = min(target.info.context_length, len(prompt) + params.max_tokens + 1)
    engine = Engine(target, draft, max_rows=batch, capacity=capacity, num_draft_tokens=depth)
    tries = [engine.complete([prompt] * batch, [params] * batch)[0].metrics for _ in range(TRIES)]
    return min((m.decode_ms - m.forward_ms) / max(1, m.target_forwards) for m in tries)
