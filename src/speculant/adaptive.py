"""Controls that draft as much as pays: `--adaptive`.

`Adaptive` weighs, for every request, what a round of each depth costs against what it will commit,
from the acceptance that the request has shown so far; drafting nothing is one of the choices. Its
costs are measured once and then stay, and a decision reads the request's own history alone, so that a
request's output depends on nothing else in the batch. `ByLoad` goes by the costs of as many rows as a
round has, since what pays alone may cost in a batch, and lets requests start from what others have
shown; not where a text would depend on it. `ByConfidence` is for trees that a draft chooses node by
node: it says what a node must be worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .control import Asked
from .cost.formulas import expected_tokens
from .cost.latency import interpolate
from .prices import Prices
from .track import Track

CROWD_HALF_LIFE = 1024.0
"""Rounds after which what all requests have shown counts half."""
FIRST_WAIT, LAST_WAIT, TRIAL_ROUNDS = 16, 256, 3
GUESS = (1.0, 4.0, 2.0)
"""A tree that has shown nothing yet: tokens accepted, nodes and levels drafted, PRIOR_ROUNDS times."""
GAIN, GAIN_TOGETHER = 1.05, 1.12
"""What drafting must promise over plain decoding, of one row and of several: rates are estimates, the
best is chosen, and where few rows of a batch draft, they pay for a draft's passes alone."""
HOPE, WORTH = 0.9, 1.3
"""A trial must promise something: at conditional acceptance HOPE, WORTH times plain decoding."""


@dataclass(frozen=True)
class Costs:
    """What rounds cost, in milliseconds, as measured once (`pace.measure_costs`).

    depths:      depths that may be drafted, ascending, 0 among them
    rows:        rows of the target's forward at each of them, the root included
    forward_ms:  (rows, ms) of the target's forward
    draft_ms:    what else a round takes at each depth: drafting, keeping the draft up to date, sampling
    """

    depths: tuple[int, ...]
    rows: tuple[int, ...]
    forward_ms: tuple[tuple[int, float], ...]
    draft_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.depths or self.depths[0] != 0 or list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"depths are {self.depths}: they ascend from 0")
        if not len(self.depths) == len(self.rows) == len(self.draft_ms) or not self.forward_ms:
            raise ValueError("depths, rows and draft_ms go together, and a forward has a time")

    def round_ms(self) -> list[float]:
        """A round at each of `depths`."""
        return [
            interpolate(self.forward_ms, rows) + draft
            for rows, draft in zip(self.rows, self.draft_ms, strict=True)
        ]


@dataclass(frozen=True)
class Adaptive:
    """The depth that commits most tokens a millisecond, 0 among them.

    prior: conditional acceptance of a draft that has shown nothing yet: about that of the heads and
           of n-gram on chats with a small model; one too high drafts on where nothing is accepted
    crowd: what other requests have shown, from which a request starts; None: nothing
    gain:  how many times plain decoding's speed drafting must promise

    Where nothing pays the request goes on plainly, and a draft is tried again for TRIAL_ROUNDS
    rounds after FIRST_WAIT of them, then after twice as many, LAST_WAIT at most: trials that fail
    cost ever less. Where even a very good draft would not pay, nothing is drafted.
    """

    costs: Costs
    prior: float = 0.45
    crowd: Track | None = None
    gain: float = GAIN

    def __post_init__(self) -> None:
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior is {self.prior}: it is a share")

    @property
    def drafts(self) -> bool:
        """See `Control`."""
        return self.promising

    def sleeps(self, asked: Asked, rows: int) -> bool:
        """Where even a very good draft would not pay."""
        return not self.promising

    def enter(self, rows: Sequence[Asked], beside: int = 0) -> None:
        """The costs are those of one batch size, whatever comes."""

    def budget(self, remaining: int, track: Track) -> int:
        """See `Control`. Call it once a round: it keeps the track's count of plain rounds."""
        room = max(0, remaining - 1)
        if track.trial:
            track.trial -= 1
            return min(room, self._trial_depth())
        best = self._best(track) if self.promising else 0
        if best:
            track.quiet = track.wait = 0
            return min(room, best)
        track.quiet += 1
        track.wait = track.wait or FIRST_WAIT
        if track.quiet > track.wait and self.promising:
            track.quiet, track.wait = 0, min(LAST_WAIT, 2 * track.wait)
            track.trial = TRIAL_ROUNDS - 1
            return min(room, self._trial_depth())
        return 0

    def prices(self, track: Track) -> Prices | None:
        """The depth is all that is chosen."""
        return None

    def learn(self, track: Track, depth: int, accepted: int, nodes: int) -> None:
        """See `Control`."""
        track.observe(depth, accepted, nodes)
        if self.crowd is not None:
            self.crowd.observe(depth, accepted, nodes)

    def _best(self, track: Track) -> int:
        most = self.costs.depths[-1]
        prior = self.prior if self.crowd is None else self.crowd.rates(most, self.prior)
        speeds = self._speeds(track.rates(most, prior))
        best = max(speeds)
        return self.costs.depths[speeds.index(best)] if best > self.gain * speeds[0] else 0

    @cached_property
    def promising(self) -> bool:
        """Whether a draft that is accepted with probability HOPE a position would pay."""
        speeds = self._speeds([HOPE] * self.costs.depths[-1])
        return max(speeds) >= WORTH * speeds[0]

    def _speeds(self, rates: Sequence[float]) -> list[float]:
        """Tokens a millisecond at each of the costs' depths, of positions accepted at these rates."""
        cumulative, reach = [], 1.0
        for rate in rates:
            reach *= rate
            cumulative.append(reach)
        return [
            (expected_tokens(cumulative, depth) if depth else 1.0) / ms
            for depth, ms in zip(self.costs.depths, self.costs.round_ms(), strict=True)
        ]

    def _trial_depth(self) -> int:
        """The shallowest draft there is."""
        return next((d for d in self.costs.depths if d), 0)


@dataclass(frozen=True)
class ByConfidence(Adaptive):
    """For a tree whose nodes the draft chooses by its confidence (`DraftInfo.priced`).

    This control says whether to draft, by what rounds have committed and cost so far, and at which
    price: a node is worth verifying, and a further pass of the draft worth running, where it adds more
    tokens than the same time commits otherwise. costs: `rows` and `draft_ms` are those of chains.
    """

    def prices(self, track: Track) -> Prices | None:
        """See `Control`."""
        return Prices(max(self._plain, self._rate(track)), self._nodes_ms, self._step_ms)

    def _best(self, track: Track) -> int:
        return self.costs.depths[-1] if self._rate(track) > self.gain * self._plain else 0

    def _trial_depth(self) -> int:
        """As deep as it likes: the prices keep it from what does not pay."""
        return self.costs.depths[-1]

    def _rate(self, track: Track) -> float:
        """Tokens a millisecond of rounds like those that were drafted."""
        start = GUESS if self.crowd is None else self.crowd.means(GUESS)
        gained, nodes, levels = track.means(start)
        forward = interpolate(self.costs.forward_ms, 1 + nodes)
        passes = tuple(zip(self.costs.depths, self.costs.draft_ms, strict=True))
        return (1 + gained) / (forward + interpolate(passes, max(1.0, levels)))

    @cached_property
    def _plain(self) -> float:
        """Tokens a millisecond of plain decoding, beside a draft that is kept up to date."""
        return 1 / self.costs.round_ms()[0]

    @cached_property
    def _nodes_ms(self) -> tuple[float, ...]:
        """See `Prices`: what was measured, from below, by times that never rise more slowly."""
        first, last = self.costs.rows[0], max(rows for rows, _ in self.costs.forward_ms)
        start = interpolate(self.costs.forward_ms, first)
        times = [
            interpolate(self.costs.forward_ms, rows) - start for rows in range(first, last + 1)
        ]
        corners = [0]
        while corners[-1] < last - first:  # the flattest way on
            at = corners[-1]
            ways = [(times[n] - times[at]) / (n - at) for n in range(at + 1, len(times))]
            corners.append(at + 1 + ways.index(min(ways)))
        points = [(n, times[n]) for n in corners]
        return tuple(max(0.0, interpolate(points, n)) for n in range(1, len(times)))

    @cached_property
    def _step_ms(self) -> float:
        """Of one more pass of the draft."""
        first, last = (
            self.costs.draft_ms[min(1, len(self.costs.depths) - 1)],
            self.costs.draft_ms[-1],
        )
        return max(0.0, last - first) / max(1, self.costs.depths[-1] - 1)


class ByLoad:
    """An adaptive control, by the costs of the batch at hand.

    tables:  rows at once -> costs of such rounds; 1 among them
    samples: the draft samples chains, so that a sampled row's text depends on its depths
    kind:    what chooses by each table

    A round with a sampled row of such a draft goes by the costs of one row, whatever its size, and by
    what that request has shown alone: what it says must not depend on what runs beside it (design, law
    10). No other text depends on the depth, and such requests start from what others have shown.
    """

    def __init__(
        self, tables: Mapping[int, Costs], samples: bool, kind: type[Adaptive] = Adaptive
    ) -> None:
        if 1 not in tables:
            raise ValueError("there must be costs of one row")
        self.tables, self.samples = tables, samples
        crowd = Track(half_life=CROWD_HALF_LIFE)
        self._choices = {
            rows: kind(costs, crowd=crowd, gain=GAIN if rows == 1 else GAIN_TOGETHER)
            for rows, costs in tables.items()
        }
        self._alone = kind(tables[1])
        self._now = self._alone

    @property
    def drafts(self) -> bool:
        """See `Control`."""
        return self._now.drafts

    def sleeps(self, asked: Asked, rows: int) -> bool:
        """See `Control`."""
        return self._chosen([asked], rows).sleeps(asked, rows)

    def enter(self, rows: Sequence[Asked], beside: int = 0) -> None:
        """The next round has these rows. The batch size that was measured nearest to theirs counts."""
        self._now = self._chosen(rows, len(rows) + beside)

    def _chosen(self, asked: Sequence[Asked], rows: int) -> Adaptive:
        own = self.samples and not all(params.greedy for params in asked)
        count = min(self._choices, key=lambda size: abs(size - rows))
        return self._alone if own else self._choices[count]

    def budget(self, remaining: int, track: Track) -> int:
        """See `Control`."""
        return self._now.budget(remaining, track)

    def prices(self, track: Track) -> Prices | None:
        """See `Control`."""
        return self._now.prices(track)

    def learn(self, track: Track, depth: int, accepted: int, nodes: int) -> None:
        """See `Control`."""
        self._now.learn(track, depth, accepted, nodes)
