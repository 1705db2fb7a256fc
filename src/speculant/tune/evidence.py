"""Acceptance of each draft family on a workload: measured where it was, published otherwise.

Order: rows of the workload file, then counters of the server, then the profile, then published
acceptance. The tasks and temperatures of the workload are mixed with their shares: acceptance
per position is an average over rounds, so it adds up linearly.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cost import FAMILIES, alpha_of, position_rates, read_profile
from ..cost.profile import Accepted, DraftProfile, Profile
from ..cost.trees import alpha_of_tree
from .acceptance import prior
from .facts import data, rank_decay
from .telemetry import Counted, read_meta_info, read_prometheus, summed
from .workload import Workload, read_text

DEPTH = 16  # positions that are considered
ROUNDS = 200.0  # assumed behind a rate that says nothing about it


@dataclass(frozen=True)
class Point:
    """Chain acceptance per position on one task ("" for any) at one temperature."""

    task: str
    temperature: float
    rates: tuple[float, ...]
    rounds: float = ROUNDS
    drafted_share: float = 1.0


@dataclass(frozen=True)
class Evidence:
    """Acceptance of a family on the workload's mix.

    rates, low, high: unconditional, positions 1..DEPTH; a chain's first choices
    source:           in words, for the page
    measured:         whether it was measured on this target
    drafted_share:    rounds that find anything to draft
    """

    family: str
    rates: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    source: str
    measured: bool
    drafted_share: float = 1.0


@dataclass(frozen=True)
class Mixed:
    """Rates on one task at one temperature, with their bounds."""

    rates: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    drafted_share: float = 1.0

    def by(self, which: str) -> tuple[float, ...]:
        """The rates or a bound, by name."""
        return {"rates": self.rates, "low": self.low, "high": self.high}[which]


@dataclass(frozen=True)
class Measurements:
    """Everything measured that the workload file points to."""

    points: Mapping[str, tuple[Point, ...]]
    sources: Mapping[str, str]
    profile: Profile | None = None

    def draft(self, family: str) -> DraftProfile | None:
        """The profile's entry for a family, the first one."""
        drafts = self.profile.drafts if self.profile else ()
        return next((d for d in drafts if d.family == family), None)


def gather(workload: Workload) -> Measurements:
    """Read every file of the telemetry section. Raises ValueError in one line."""
    t = workload.telemetry
    points: dict[str, list[Point]] = {}
    sources: dict[str, str] = {}
    profile = None
    if t.profile is not None:
        path = Path(workload.folder, t.profile)
        read_text(path)  # the same one line for a missing file as elsewhere
        profile = read_profile(path)
        for draft in profile.drafts:
            chains = [a for a in draft.acceptance if a.nodes == a.num_draft_tokens]
            rows = chains or list(draft.acceptance)
            points.setdefault(draft.family, []).extend(_from_profile(draft.family, a) for a in rows)
            sources[draft.family] = f"the profile ({t.profile})"
    for name, reader in (("vllm_metrics", "prometheus"), ("sglang_meta_info", "meta")):
        given = getattr(t, name)
        if given is None:
            continue
        text = read_text(Path(workload.folder, given))
        counts = read_prometheus(text, given) if reader == "prometheus" else [
            read_meta_info(text, given)
        ]  # fmt: skip
        for family, made in _from_counts(workload, counts, given).items():
            points[family] = made
            sources[family] = f"the server's counters ({given})"
    for row in t.acceptance:
        rates = _chain(row.family, tuple(row.acceptance_per_position), row.nodes)
        point = Point(row.task or "", row.temperature, rates)
        if sources.get(row.family) != "the workload file":
            points[row.family] = []
            sources[row.family] = "the workload file"
        points[row.family].append(point)
    frozen = {family: tuple(found) for family, found in points.items() if found}
    return Measurements(frozen, sources, profile)


def _from_profile(family: str, accepted: Accepted) -> Point:
    rates = accepted.acceptance_per_position or (
        (alpha_of(accepted.mean_acceptance_length, accepted.num_draft_tokens),)
    )
    nodes = accepted.nodes if accepted.nodes > accepted.num_draft_tokens else None
    task = "" if accepted.task == "all" else accepted.task
    return Point(
        task, accepted.temperature, _chain(family, rates, nodes), accepted.rounds or ROUNDS,
        accepted.drafted_share,
    )  # fmt: skip


def _from_counts(
    workload: Workload, counts: Sequence[Counted], name: str
) -> dict[str, list[Point]]:
    """Counters as points; those without a draft label are of `telemetry.draft`."""
    t = workload.telemetry
    known = [count for count in counts if count.draft in FAMILIES]
    if not known:
        if t.draft is None:
            raise ValueError(f"{name}: say in telemetry.draft which draft was running")
        known = [summed(counts)]
    made: dict[str, list[Point]] = {}
    for count in known:
        family = count.draft if count.draft in FAMILIES else str(t.draft)
        if count.accepted_per_pos:
            rates: tuple[float, ...] = tuple(count.per_position)
        elif t.num_draft_tokens is None:
            raise ValueError(f"{name} has no positions: give telemetry.num_draft_tokens")
        else:
            most = t.num_draft_tokens
            rates = tuple(
                position_rates(alpha_of(min(count.mean_acceptance_length, most + 1), most), most)
            )
        task = count.task if count.task in workload.tasks else ""
        point = Point(task, t.temperature, _chain(family, rates, t.nodes), count.num_drafts)
        made.setdefault(family, []).append(point)
    return made


def _chain(family: str, rates: tuple[float, ...], nodes: int | None) -> tuple[float, ...]:
    """Acceptance of the first choices: a tree's acceptance per depth is higher, and turned back."""
    depth = len(rates)
    if nodes is None or nodes <= depth or FAMILIES[family].free:
        return tuple(position_rates(rates, DEPTH))
    branch = max(4, FAMILIES[family].branch)
    alpha = alpha_of_tree(1 + sum(rates), nodes, depth, branch, rank_decay())
    return tuple(position_rates(alpha, DEPTH))


def evidence_for(family: str, workload: Workload, measured: Measurements) -> Evidence | None:
    """The family's acceptance on the workload's tasks and temperatures; None if nothing is known."""
    temperatures = workload.temperatures
    return evidence_at(family, workload, measured, temperatures)


def evidence_at(
    family: str, workload: Workload, measured: Measurements, temperatures: Mapping[float, float]
) -> Evidence | None:
    """As `evidence_for`, at other temperatures (a mapping to their shares)."""
    points = measured.points.get(family, ())
    parts: list[tuple[float, Mixed]] = []
    for task, share in workload.tasks.items():
        for temperature, weight in temperatures.items():
            if points:
                found = _measured_at(family, points, task, temperature)
            else:
                guess = _published_at(family, task, temperature)
                if guess is None:
                    return None
                found = guess
            parts.append((share * weight, found))
    rates, low, high = (
        tuple(sum(weight * one.by(which)[i] for weight, one in parts) for i in range(DEPTH))
        for which in ("rates", "low", "high")
    )
    drafted = sum(weight * one.drafted_share for weight, one in parts)
    source = measured.sources[family] if points else _published_source(family, workload)
    return Evidence(family, rates, low, high, source, bool(points), drafted)


def _measured_at(family: str, points: Sequence[Point], task: str, temperature: float) -> Mixed:
    """Rates with two standard errors, between the measured temperatures."""
    mine = [p for p in points if p.task == task] or [p for p in points if not p.task]
    mine = mine or list(points)
    heats = sorted({p.temperature for p in mine})
    near = min(heats, key=lambda heat: (abs(heat - temperature), heat))
    base = _average([p for p in mine if p.temperature == near])
    rounds = sum(p.rounds for p in mine if p.temperature == near)
    share = statistics.fmean(p.drafted_share for p in mine if p.temperature == near)
    if len(heats) > 1:
        other = min(
            (h for h in heats if h != near), key=lambda heat: (abs(heat - temperature), heat)
        )
        far = _average([p for p in mine if p.temperature == other])
        slope = (temperature - near) / (other - near)
        base = tuple(a + slope * (b - a) for a, b in zip(base, far, strict=True))
    elif temperature != near:
        factor = 1 + _heat_slope(family) * (temperature - near)
        base = tuple(rate * factor ** (i + 1) for i, rate in enumerate(base))
    base = _sane(base)
    error = tuple(2 * (rate * (1 - rate) / rounds) ** 0.5 for rate in base)
    low = _sane(tuple(r - e for r, e in zip(base, error, strict=True)))
    high = _sane(tuple(r + e for r, e in zip(base, error, strict=True)))
    return Mixed(base, low, high, share)


def _published_at(family: str, task: str, temperature: float) -> Mixed | None:
    """Published alphas at temperatures 0 and 1, and the line through them."""
    cold, hot = prior(family, task, 0.0), prior(family, task, 1.0)
    if cold is None or hot is None:
        return None
    if hot == cold:  # none published at temperature 1: the drop that other families show
        cooled = 1 + _heat_slope(family) * temperature
        values = [a * cooled for a in (cold.alpha, cold.low, cold.high)]
    else:
        pairs = ((cold.alpha, hot.alpha), (cold.low, hot.low), (cold.high, hot.high))
        values = [a + (min(a, b) - a) * temperature for a, b in pairs]
    factor = _against_eagle3(family, task, cold.alpha)
    rates = [tuple(position_rates(min(1.0, max(0.0, v * factor)), DEPTH)) for v in values]
    return Mixed(rates[0], rates[1], rates[2])


def _against_eagle3(family: str, task: str, alpha: float) -> float:
    """What keeps an older head below EAGLE-3 as far as where both were measured on one target.

    The families' published rows are of different targets: EAGLE-1 and Medusa mostly of Vicuna.
    """
    ratio = data("acceptance").get("against_eagle3", {}).get(family)
    other = prior("eagle3", task, 0.0)
    if ratio is None or other is None:
        return 1.0
    return min(1.0, float(ratio) * other.alpha / alpha)


def _heat_slope(family: str) -> float:
    """Relative change of alpha per unit of temperature: the family's own, or the median of all."""
    changes: dict[str, float] = {}
    for name in data("acceptance")["families"]:
        cold, hot = prior(name, "all", 0.0), prior(name, "all", 1.0)
        if cold is not None and hot is not None and cold != hot:
            changes[name] = hot.alpha / cold.alpha - 1
    usual = statistics.median(changes.values()) if changes else 0.0
    return min(0.0, changes.get(family, usual))


def _average(points: Sequence[Point]) -> tuple[float, ...]:
    total = sum(p.rounds for p in points)
    return tuple(sum(p.rates[i] * p.rounds for p in points) / total for i in range(DEPTH))


def _sane(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Rates within 0..1 that do not rise with depth."""
    out: list[float] = []
    for rate in rates:
        out.append(max(0.0, min(rate, out[-1] if out else 1.0)))
    return tuple(out)


def _published_source(family: str, workload: Workload) -> str:
    rows = [prior(family, task, 0.0) for task in workload.tasks]
    exact = [p for p in rows if p is not None and p.exact]
    count = sum(p.rows for p in rows if p is not None)
    where = "on these tasks" if len(exact) == len(rows) else "partly on other tasks"
    return f"published measurements of {family} {where} ({count} rows), not this target"
