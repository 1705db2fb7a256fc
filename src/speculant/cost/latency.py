"""Time of a plain step and of a round, from a roofline or from a profile, and what follows.

Both sources answer the same two questions, `plain_ms(batch)` and `round_ms(batch, work)`; the
functions below them turn times and acceptance into a speed-up, the best draft length, the
break-even acceptance and the batch size at which speculation stops paying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .families import DraftPlan, plan, round_ms
from .formulas import TOLERANCE, Acceptance, alpha_of, expected_tokens
from .machine import Engine, Machine, ModelShape, forward_ms
from .profile import Accepted, DraftProfile, Profile


class Times(Protocol):
    """Where times come from."""

    def plain_ms(self, batch: int) -> float:
        """One token for each of `batch` sequences, without a draft."""

    def round_ms(self, batch: int, work: DraftPlan) -> float:
        """One round of each of `batch` sequences."""

    def idle_ms(self, batch: int, work: DraftPlan) -> float:
        """A round whose draft found nothing: a window, if it has one, rides all the same."""


@dataclass(frozen=True)
class Roofline:
    """Times from sizes and vendor figures. context: cached tokens behind a sequence, on average."""

    target: ModelShape
    machine: Machine
    engine: Engine
    draft: ModelShape | None
    context: int

    def plain_ms(self, batch: int) -> float:
        """See `Times`."""
        return forward_ms(self.target, self.machine, self.engine, batch, 1, self.context)

    def round_ms(self, batch: int, work: DraftPlan) -> float:
        """See `Times`."""
        parts = (work, self.machine, self.engine, batch, self.context)
        return round_ms(self.target, self.draft, *parts)

    def idle_ms(self, batch: int, work: DraftPlan) -> float:
        """See `Times`."""
        rows = 1 + work.extra_rows
        return forward_ms(self.target, self.machine, self.engine, batch, rows, self.context)


@dataclass(frozen=True)
class Measured:
    """Times from a profile, interpolated between what was measured.

    draft: whose costs are used; None for plain decoding only
    """

    profile: Profile
    draft: DraftProfile | None = None

    def forward_ms(self, batch: int, rows: int) -> float:
        """t(batch, rows): linear in rows, then in batch.

        With one measured batch size, a forward of b x r tokens is taken to cost what r' = b x r
        rows of one sequence cost.
        """
        table: dict[int, list[tuple[float, float]]] = {}
        for entry in self.profile.forward_ms:
            table.setdefault(entry.batch, []).append((entry.rows, entry.median_ms))
        if len(table) == 1:
            ((measured, points),) = table.items()
            return interpolate(points, batch * rows / measured)
        return interpolate([(b, interpolate(p, rows)) for b, p in table.items()], batch)

    def plain_ms(self, batch: int) -> float:
        """See `Times`."""
        return self.forward_ms(batch, 1) + self.profile.plain_overhead_ms

    def round_ms(self, batch: int, work: DraftPlan) -> float:
        """See `Times`."""
        if self.draft is None or work.nodes == 0:
            return self.plain_ms(batch)
        return self._with_draft(self.draft, batch, work, work.nodes)

    def idle_ms(self, batch: int, work: DraftPlan) -> float:
        """See `Times`. The profile's drafting cost is a mean over all rounds, so these pay it too."""
        if self.draft is None or work.nodes == 0:
            return self.plain_ms(batch)
        return self._with_draft(self.draft, batch, work, 0)

    def _with_draft(self, draft: DraftProfile, batch: int, work: DraftPlan, nodes: int) -> float:
        """A round that verifies `nodes` drafted tokens, the profile's own window beside them."""
        spent = self.forward_ms(batch, 1 + nodes + draft.window_rows) + draft.overhead_ms
        return spent + self.propose_ms(batch, work)

    def propose_ms(self, batch: int, work: DraftPlan) -> float:
        """Drafting cost, interpolated between the depths measured of the same form (chain, tree).

        Of two trees of one depth the one nearer in nodes counts.
        """
        assert self.draft is not None
        alike = [p for p in self.draft.propose_ms if (p.nodes > p.num_draft_tokens) == work.tree]
        nearest: dict[int, dict[int, tuple[int, float]]] = {}
        for entry in alike or self.draft.propose_ms:
            depths = nearest.setdefault(entry.batch, {})
            candidate = (abs(entry.nodes - work.nodes), entry.median_ms)
            known = depths.get(entry.num_draft_tokens, candidate)
            depths[entry.num_draft_tokens] = min(known, candidate)
        points = [
            (b, interpolate([(d, ms) for d, (_, ms) in depths.items()], work.depth))
            for b, depths in nearest.items()
        ]
        return interpolate(points, batch)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points; the end segments go on outside, never below 0; one point is flat."""
    ordered = sorted(points)
    if len(ordered) == 1:
        return ordered[0][1]
    at = 1
    while at < len(ordered) - 1 and x > ordered[at][0]:
        at += 1
    (x0, y0), (x1, y1) = ordered[at - 1], ordered[at]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


@dataclass(frozen=True)
class Estimate:
    """One setting at one batch size. Times in milliseconds.

    expected_tokens: committed per round;  token_ms: per sequence and committed token
    """

    work: DraftPlan
    batch: int
    expected_tokens: float
    round_ms: float
    plain_ms: float
    token_ms: float
    speedup: float


def estimate(
    times: Times, work: DraftPlan, tokens: float, batch: int, drafted_share: float = 1.0
) -> Estimate:
    """Speed of a round that commits `tokens` on average.

    drafted_share: rounds that draft at all; the others commit one token each.
    """
    plain = times.plain_ms(batch)
    idle = times.idle_ms(batch, work) if drafted_share < 1 else 0.0
    spent = drafted_share * times.round_ms(batch, work) + (1 - drafted_share) * idle
    committed = drafted_share * tokens + (1 - drafted_share)
    per_token = spent / committed
    return Estimate(work, batch, committed, spent, plain, per_token, plain / per_token)


def as_measured(times: Times, family: str, entry: Accepted, batch: int) -> Estimate:
    """Speed of a setting as a profile has it: its acceptance, and the rows that it really drafted.

    A look-up often finds fewer tokens than it may draft, and fewer branches.
    """
    asked = plan(family, entry.num_draft_tokens, entry.nodes)
    work = asked
    if entry.mean_draft_tokens is not None:
        rows = max(1, round(entry.mean_draft_tokens))
        if asked.tree:  # a tree stays one, however few of its nodes were drafted
            work = replace(asked, nodes=max(asked.depth + 1, rows))
        else:
            work = replace(asked, depth=rows, nodes=rows)
    found = estimate(times, work, entry.mean_acceptance_length, batch, entry.drafted_share)
    return replace(found, work=asked)


def best_chain(
    times: Times, family: str, acceptance: Acceptance, batch: int, max_draft: int
) -> list[Estimate]:
    """Every chain length 0..max_draft at a batch size, in order; see `best_of`."""
    return [
        estimate(
            times, plan(family, n) if n else plan("off"), expected_tokens(acceptance, n), batch
        )
        for n in range(max_draft + 1)
    ]


def best_of(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest; the earlier (shorter) of two equal ones."""
    best = estimates[0]
    for other in estimates[1:]:
        if other.token_ms < best.token_ms - TOLERANCE:
            best = other
    return best


def break_even_tokens(times: Times, work: DraftPlan, batch: int) -> float:
    """Tokens a round has to commit to cost what plain decoding costs."""
    return times.round_ms(batch, work) / times.plain_ms(batch)


def break_even(times: Times, work: DraftPlan, batch: int) -> float | None:
    """The constant alpha at which a chain pays for itself; None when even alpha = 1 does not."""
    if work.depth < 1:
        raise ValueError("a chain of at least one drafted token has a break-even")
    needed = break_even_tokens(times, work, batch)
    if needed > work.depth + 1:
        return None
    return alpha_of(max(needed, 1.0), work.depth)


def stops_paying(
    times: Times, family: str, acceptance: Acceptance, max_draft: int, max_batch: int = 1024
) -> int | None:
    """The smallest batch at which no chain length pays (searched by doubling, then halving).

    None when speculation still pays at max_batch. 1 means it never pays.
    """

    def pays(batch: int) -> bool:
        return best_of(best_chain(times, family, acceptance, batch, max_draft)).work.nodes > 0

    if not pays(1):
        return 1
    low, high = 1, 2
    while high <= max_batch and pays(high):
        low, high = high, high * 2
    if high > max_batch:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
