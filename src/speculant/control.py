"""How much to draft now. Decided before anything is sampled (design, law 3).

`Fixed` always drafts the same depth. `Adaptive` weighs, for every request, what a round of each depth
costs against what it will commit, from the acceptance that the request has shown so far; drafting
nothing is one of the choices. Its costs are measured once and then stay, and a decision reads the
request's own history alone, so that a request's output depends on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .cost.formulas import expected_tokens
from .cost.latency import interpolate


@dataclass
class Track:
    """What one request has shown: rounds that reached a depth, and those that accepted it.

    Both fade by half every HALF_LIFE rounds, since a text changes. quiet: rounds since it last
    drafted; wait: so many until it is tried again; trial: rounds of a trial that are left
    """

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    quiet: int = 0
    wait: int = 0
    trial: int = 0

    def observe(self, depth: int, accepted: int) -> None:
        """A round drafted `depth` deep and `accepted` tokens of it were committed."""
        if not 0 <= accepted <= depth:
            raise ValueError(f"{accepted} accepted of {depth} drafted")
        if depth == 0:
            return
        missing = depth - len(self.reached)
        self.reached += [0.0] * missing
        self.accepted += [0.0] * missing
        fade = 0.5 ** (1 / HALF_LIFE)
        for i in range(len(self.reached)):
            self.reached[i] = fade * self.reached[i] + (i <= accepted and i < depth)
            self.accepted[i] = fade * self.accepted[i] + (i < accepted)

    def rates(self, depth: int, prior: float) -> list[float]:
        """Conditional acceptance of each position up to `depth`.

        A position starts from the one before it (the first from `prior`), worth PRIOR_ROUNDS rounds.
        """
        out: list[float] = []
        for i in range(depth):
            before = out[-1] if out else prior
            reached = self.reached[i] if i < len(self.reached) else 0.0
            accepted = self.accepted[i] if i < len(self.accepted) else 0.0
            out.append((PRIOR_ROUNDS * before + accepted) / (PRIOR_ROUNDS + reached))
        return out


HALF_LIFE = 32.0
PRIOR_ROUNDS = 4.0
FIRST_WAIT, LAST_WAIT, TRIAL_ROUNDS = 16, 256, 3


class Control(Protocol):
    """Decides the depth of a round."""

    def budget(self, remaining: int, track: Track) -> int:
        """Depth to draft when `remaining` tokens may still be committed."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same depth, as far as the request has room for it."""

    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}: it must be at least 0")

    def budget(self, remaining: int, track: Track | None = None) -> int:
        """Depth to draft when `remaining` tokens may still be committed.

        A round commits one token more than it accepts, hence the one that is kept back.
        """
        return max(0, min(self.num_draft_tokens, remaining - 1))


@dataclass(frozen=True)
class Costs:
    """What rounds cost, in milliseconds, as measured once (`pace.measure_costs`).

    depths:      depths that may be drafted, ascending, 0 among them
    rows:        rows of the target's forward at each of them, the root included
    forward_ms:  (rows, ms) of the target's forward
    draft_ms:    of drafting at each depth, what keeping the draft up to date takes included
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

    prior: conditional acceptance of a draft that has shown nothing yet

    Where nothing pays the request goes on plainly, and a draft is tried again for TRIAL_ROUNDS
    rounds after FIRST_WAIT of them, then after twice as many, LAST_WAIT at most: trials that fail
    cost ever less.
    """

    costs: Costs
    prior: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior is {self.prior}: it is a share")

    def budget(self, remaining: int, track: Track) -> int:
        """See `Control`. Call it once a round: it keeps the track's count of plain rounds."""
        room = max(0, remaining - 1)
        if track.trial:
            track.trial -= 1
            return min(room, self._trial_depth())
        best = self._best(track)
        if best:
            track.quiet = track.wait = 0
            return min(room, best)
        track.quiet += 1
        track.wait = track.wait or FIRST_WAIT
        if track.quiet > track.wait:
            track.quiet, track.wait = 0, min(LAST_WAIT, 2 * track.wait)
            track.trial = TRIAL_ROUNDS - 1
            return min(room, self._trial_depth())
        return 0

    def _best(self, track: Track) -> int:
        rates = track.rates(self.costs.depths[-1], self.prior)
        cumulative, reach = [], 1.0
        for rate in rates:
            reach *= rate
            cumulative.append(reach)
        best, speed = 0, 0.0
        for depth, ms in zip(self.costs.depths, self.costs.round_ms(), strict=True):
            tokens = expected_tokens(cumulative, depth) if depth else 1.0
            if tokens / ms > speed:
                best, speed = depth, tokens / ms
        return best

    def _trial_depth(self) -> int:
        """The shallowest draft there is."""
        return next((d for d in self.costs.depths if d), 0)
