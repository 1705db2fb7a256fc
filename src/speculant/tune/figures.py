"""The figures of the family shown: draft length, tables, range and latency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..cost import Estimate, Machine, Measured, ModelShape, best_of, break_even, stops_paying
from . import gates
from .candidates import Candidate
from .evidence import Measurements
from .facts import data
from .stacks import dynamic_length
from .workload import Workload

PROFILE_ERROR = 0.05  # of a prediction from a profile, beside its acceptance


@dataclass(frozen=True)
class Ranked:
    """A candidate with its best setting at the usual batch and its mean over all batch sizes."""

    candidate: Candidate
    best: Estimate
    mean: float


def shape_in_words(e: Estimate) -> str:
    """What a round drafts, for a sentence."""
    if e.work.nodes == 0:
        return "nothing drafted at that batch, something at other ones"
    if e.work.extra_rows:
        return f"a window of {e.work.extra_rows} rows and {e.work.nodes} n-gram rows"
    if e.work.tree:
        return f"a tree of {e.work.nodes} nodes, {e.work.depth} deep"
    return f"{e.work.depth} drafted tokens"


def numbers(
    shown: Ranked,
    ranked: list[Ranked],
    workload: Workload,
    target: ModelShape,
    machine: Machine | None,
    measured: Measurements,
    limit: int,
) -> dict[str, Any]:
    """Everything that depends on the family shown: N, trees, gates, tables, range, latency."""
    candidate, batch = shown.candidate, workload.traffic.usual_batch
    chain = candidate.chain(batch)
    best = best_of(chain)
    table = gates.batch_table(candidate, max(workload.traffic.batch_sizes))
    others = [r.candidate for r in ranked if r is not shown and not r.candidate.train]
    work = next((e.work for e in chain if e.work.depth == max(best.work.depth, 1)), None)
    stop = None
    if candidate.chains:
        parts = (candidate.times, candidate.family, list(candidate.evidence.rates))
        stop = stops_paying(*parts, candidate.limit)
    return {
        "num_draft_tokens": best.work.depth,
        "arithmetic": [_arithmetic(e) for e in chain if _near(e, best)],
        "acceptance_per_position": [round(r, 4) for r in candidate.evidence.rates[:8]],
        "break_even_acceptance": _rounded(
            break_even(candidate.times, work, batch) if work else None
        ),
        "stops_paying_at_batch": stop,
        "trees": gates.tree_table(workload, candidate, target, machine),
        "temperature_gate": gates.temperature_gate(candidate, others, workload, measured, limit),
        "num_speculative_tokens_per_batch_size": table,
        "rechecks": gates.rechecks(candidate, table),
        "dynamic_length": dynamic_length(workload.stack.name, workload.stack.version),
        "expected_speedup": _range(shown, workload, limit),
        "latency": _latency(shown.best, workload),
    }


def _near(e: Estimate, best: Estimate) -> bool:
    return e.work.nodes == 0 or abs(e.work.depth - best.work.depth) <= 2


def _arithmetic(e: Estimate) -> dict[str, Any]:
    return {
        "num_draft_tokens": e.work.depth,
        "expected_tokens": round(e.expected_tokens, 3),
        "round_ms": round(e.round_ms, 4),
        "token_ms": round(e.token_ms, 4),
        "speedup": round(e.speedup, 3),
    }


def _range(shown: Ranked, workload: Workload, limit: int) -> dict[str, Any]:
    """The speed-up with low and high acceptance, widened by the error of the times."""
    c, batch = shown.candidate, workload.traffic.usual_batch
    from_profile = isinstance(c.times, Measured)
    error = (
        PROFILE_ERROR if from_profile else data("constants")["held_out"]["all"]["median_abs_error"]
    )
    ends = []
    for rates in (c.evidence.low, c.evidence.high):
        other = replace(c, evidence=replace(c.evidence, rates=rates))
        ends.append(max(1.0, other.best(batch, limit).speedup))
    doubts = [
        f"acceptance: {c.evidence.source}"
        + ("" if c.evidence.measured else " (quartiles over published rows)"),
        f"times: {'the profile' if from_profile else 'a roofline with fitted constants'}, "
        f"{error:.0%} either way"
        + ("" if from_profile else " (median error on held-out published rows)"),
    ]
    if not c.evidence.measured:
        doubts.append("your prompts, template and head are not those of the papers")
    point = shown.best.speedup
    return {
        "low": round(min(point, ends[0]) * (1 - error), 3),
        "point": round(point, 3),
        "high": round(max(point, ends[1]) * (1 + error), 3),
        "uncertainty": doubts,
    }


def _latency(best: Estimate, workload: Workload) -> dict[str, Any]:
    t = workload.traffic
    return {
        "plain_ms": round(best.plain_ms, 4),
        "token_ms": round(best.token_ms, 4),
        "worst_ms": round(best.round_ms, 4),  # a request none of whose drafts are accepted
        "p50_target_ms": t.p50_ms,
        "p50_met": None if t.p50_ms is None else best.token_ms <= t.p50_ms,
        "p99_target_ms": t.p99_ms,
        "p99_met": None if t.p99_ms is None else best.round_ms <= t.p99_ms,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
