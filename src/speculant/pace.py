"""What rounds of a pair cost on this machine: measured once, for `control.Adaptive`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from .control import Costs
from .drafts.base import Draft
from .engine import Engine
from .sampling import SamplingParams
from .target.base import Target

CONTEXT = 192
"""Cached tokens behind a timed forward: a chat's."""
REPEATS, WARM_UP = 5, 2
ROUNDS = 6
"""Rounds of drafting that are timed at each depth."""


def measure_costs(target: Target, draft: Draft, num_draft_tokens: int | None = None) -> Costs:
    """Time the target's forward and the draft at the depths that it can draft, batch 1.

    num_draft_tokens: deepest; None: the draft's own. A chain may go 0 to that deep, a tree is drafted
    whole or not at all. Takes some forty forwards.
    """
    most = draft.info.depth if num_draft_tokens is None else num_draft_tokens
    if most < 1:
        raise ValueError(f"draft {draft.info.name} drafts nothing: there is nothing to adapt")
    tree = draft.info.max_nodes > draft.info.depth
    depths = (0, most) if tree else tuple(range(most + 1))
    window = draft.info.max_window
    rows = tuple(1 + window + (draft.info.max_nodes if tree and d else d) for d in depths)
    forward = forward_times(target, sorted({1, *rows}))
    nothing = _draft_ms(target, draft, 0)
    ends = [_draft_ms(target, draft, d) for d in ((most,) if tree or most == 1 else (1, most))]
    if tree or most == 1:
        drafted: tuple[float, ...] = (nothing, ends[0])
    else:  # a step costs the same at every depth
        step = (ends[1] - ends[0]) / (most - 1)
        drafted = (nothing, *(max(0.0, ends[0] + step * (d - 1)) for d in depths[1:]))
    return Costs(depths, rows, forward, drafted)


def forward_times(target: Target, rows: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """(rows, ms) of a forward of so many tokens behind CONTEXT cached ones, medians."""
    context = min(CONTEXT, target.info.context_length - max(rows) - 1)
    cache = target.new_cache(1, context + max(rows))
    cache.advance(0, context)
    times: dict[int, list[float]] = {k: [] for k in rows}
    for _ in range(WARM_UP + REPEATS):
        for k, seen in times.items():
            tokens, positions = torch.full((1, k), 5), context + torch.arange(k)[None]
            began = time.perf_counter()
            target.forward(tokens, positions, None, cache.rows([0], k))
            seen.append(1e3 * (time.perf_counter() - began))
    return tuple((k, statistics.median(seen[WARM_UP:])) for k, seen in times.items())


def _draft_ms(target: Target, draft: Draft, depth: int) -> float:
    """Milliseconds a round that a draft takes at a depth, keeping itself up to date included."""
    prompt = [5 + i % 7 for i in range(min(48, target.info.context_length // 2))]
    params = SamplingParams(
        max_tokens=ROUNDS * (depth + 1) + 2, temperature=0.0, ignore_eos=True, seed=0
    )
    capacity = min(target.info.context_length, len(prompt) + params.max_tokens + 1)
    engine = Engine(target, draft, capacity=capacity, num_draft_tokens=depth)
    done = engine.complete([prompt], [params])[0].metrics
    return done.draft_ms / max(1, done.target_forwards)
