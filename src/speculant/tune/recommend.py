"""From a workload to a recommendation: one dictionary, which the page prints and JSON carries."""

from __future__ import annotations

import math
from typing import Any

from ..cost import Machine, ModelShape
from . import configs, gates
from .candidates import Candidate, gather_candidates, target_machine, target_shape
from .checks import Finding, general_findings
from .evidence import Measurements, gather
from .figures import Ranked, numbers, shape_in_words
from .stacks import stack_facts
from .workload import Workload

PAYS = 1.03  # a predicted speed-up has to reach this to be worth turning on
OFF_CODES = ("no_rollback", "small_target", "ragged")
"""Refusals that leave nothing to recommend."""


def recommend(workload: Workload) -> dict[str, Any]:
    """The recommendation. Raises ValueError for what the workload leaves out or gets wrong."""
    measured = gather(workload)
    target, source = target_shape(workload, measured)
    machine = target_machine(workload, measured)
    findings = list(general_findings(workload, target, machine, measured.profile))
    candidates, more = gather_candidates(workload, target, machine, measured)
    findings += more
    limit, _ = gates.most_nodes(workload, target, machine, workload.traffic.usual_batch)
    ranked = rank(candidates, workload, limit)
    codes = {finding.code for finding in findings}
    blocked = [code for code in OFF_CODES if code in codes]
    calibrate = "calibrate" in codes
    best = ranked[0] if ranked and ranked[0].mean >= PAYS else None
    chosen = None if blocked or calibrate else best
    page = _head(workload, target, source, machine, measured)
    page["decision"] = "on" if chosen else "calibrate" if calibrate and not blocked else "off"
    page["family"] = chosen.candidate.family if chosen else "off"
    page["reason"] = _reason(chosen, ranked, findings, blocked, calibrate, workload)
    page["runner_up"] = _runner_up(chosen, ranked)
    page["candidates"] = [_row(r) for r in ranked]
    shown = chosen or (ranked[0] if ranked else None)
    if shown is not None:
        page |= numbers(shown, ranked, workload, target, machine, measured, limit)
    page["strategies"] = _strategies(candidates, workload)
    page["rollback"] = _rollback(workload)
    page["configuration"] = configs.configuration(workload, chosen, page)
    page["telemetry_plan"] = configs.telemetry_plan(workload, shown, page)
    page["calibration"] = configs.calibration(workload, shown)
    page["findings"] = [finding.as_dict() for finding in findings]
    return page


def rank(candidates: list[Candidate], workload: Workload, limit: int) -> list[Ranked]:
    """Candidates by their speed-up: the geometric mean over the batch sizes, the usual one first.

    Only batch sizes at which the family pays count as it; elsewhere it is switched off (1.0).
    """
    usual = workload.traffic.usual_batch
    sizes = [usual, *workload.traffic.batch_sizes]
    out = []
    for candidate in candidates:
        speeds = [max(1.0, candidate.best(b, limit).speedup) for b in sizes]
        mean = math.exp(sum(math.log(s) for s in speeds) / len(speeds))
        out.append(Ranked(candidate, candidate.best(usual, limit), mean))
    return sorted(out, key=lambda r: -r.mean)


def _head(
    workload: Workload, target: ModelShape, source: str, machine: Machine | None, m: Measurements
) -> dict[str, Any]:
    where = f"{machine.count}x {machine.name}" if machine else "as measured"
    if m.profile is not None:
        where = f"{m.profile.machine.name} (measured)"
    return {
        "target": workload.target.model or workload.target.config or target.name,
        "target_params_b": round(target.total_params / 1e9, 3),
        "target_active_params_b": round(target.active_params / 1e9, 3),
        "target_sizes_from": source,
        "hardware": where,
        "stack": f"{workload.stack.name} {workload.stack.version or ''}".strip(),
        "usual_batch": workload.traffic.usual_batch,
        "context": workload.traffic.context,
        "times_from": "profile" if m.profile is not None else "roofline",
    }


def _reason(
    chosen: Ranked | None,
    ranked: list[Ranked],
    findings: list[Finding],
    blocked: list[str],
    calibrate: bool,
    workload: Workload,
) -> str:
    if blocked:
        return next(f.text for f in findings if f.code == blocked[0])
    if calibrate:
        return next(f.text for f in findings if f.code == "calibrate")
    if not ranked:
        return (
            f"{workload.stack.name} has no draft family that this workload can use: no head, no "
            "training budget, no look-up"
        )
    batch = workload.traffic.usual_batch
    if chosen is None:
        best = ranked[0]
        return (
            f"the best family, {best.candidate.family}, reaches {best.best.speedup:.2f}x at batch "
            f"{batch} and {best.mean:.2f}x on average: drafting costs what it saves"
        )
    best = chosen
    form = shape_in_words(best.best)
    train = "; its head has to be trained first" if best.candidate.train else ""
    return (
        f"fastest of {len(ranked)} families: {best.best.speedup:.2f}x at batch {batch} with {form} "
        f"({best.best.expected_tokens:.2f} tokens a forward), from {best.candidate.evidence.source}"
        f"{train}"
    )


def _runner_up(chosen: Ranked | None, ranked: list[Ranked]) -> dict[str, Any] | None:
    others = [r for r in ranked if r is not chosen]
    if not others:
        return None
    other = others[0]
    first = ranked[0]
    if other is first:
        return {
            "family": other.candidate.family,
            "speedup": round(other.best.speedup, 3),
            "reason": "the fastest family, if it were on",
        }
    return {
        "family": other.candidate.family,
        "speedup": round(other.best.speedup, 3),
        "reason": (
            f"{other.best.expected_tokens:.2f} tokens a forward against "
            f"{first.best.expected_tokens:.2f}, round {other.best.round_ms:.3g} ms against "
            f"{first.best.round_ms:.3g} ms"
        ),
    }


def _row(ranked: Ranked) -> dict[str, Any]:
    c, e = ranked.candidate, ranked.best
    return {
        "family": c.family,
        "head": c.head.model if c.head else None,
        "needs_training": c.train,
        "acceptance_from": c.evidence.source,
        "measured": c.evidence.measured,
        "num_draft_tokens": e.work.depth,
        "nodes": e.work.nodes,
        "expected_tokens": round(e.expected_tokens, 3),
        "round_ms": round(e.round_ms, 4),
        "token_ms": round(e.token_ms, 4),
        "speedup": round(e.speedup, 3),
        "mean_speedup": round(ranked.mean, 3),
    }


def _strategies(candidates: list[Candidate], workload: Workload) -> list[dict[str, Any]]:
    """Every measured setting of the profile with its predicted speed, for comparison."""
    batch = workload.traffic.usual_batch
    out = []
    for c in candidates:
        for entry, e in zip(c.fixed, c.measured(batch), strict=True):
            out.append(
                {
                    "family": c.family,
                    "num_draft_tokens": entry.num_draft_tokens,
                    "nodes": entry.nodes,
                    "task": entry.task,
                    "temperature": entry.temperature,
                    "batch": batch,
                    "predicted_tokens_per_s": round(1e3 * batch / e.token_ms, 2),
                    "predicted_speedup": round(e.speedup, 4),
                }
            )
    return out


def _rollback(workload: Workload) -> dict[str, Any]:
    facts = stack_facts(workload.stack.name)
    batch, most = workload.traffic.usual_batch, facts["max_ragged"]
    return {
        "mechanism": facts["rollback"],
        "ragged": facts["ragged"],
        "ragged_at_this_batch": most is None or batch <= most,
        "per_request_off": facts["per_request_off"],
        "dynamic_length": facts["dynamic_length"],
        "source": facts["source"],
    }
