"""Watches a draft, and says when it only costs time: NaN, or next to nothing accepted.

Verification keeps the output right whatever a draft does, so a broken one shows in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..drafts.base import Draft
from ..step import Drafted

WINDOW = 512
"""Drafting rounds over which acceptance is judged."""
LEAST_ACCEPTED = 0.02
"""Accepted tokens a round below which a draft pays nowhere: a round costs more than 2 % extra."""
MOST_SILENT = 128
"""Rounds in a row in which a model that always drafts drafted nothing: its state holds NaN."""
FIRST_PAUSE_S = 300.0
LONGEST_PAUSE_S = 4 * 3600.0
REASONS = {
    "nan": "it drafts nothing, as with NaN in its weights",
    "acceptance": "next to nothing of what it drafts is accepted",
    "error": "it failed",
}
"""Why a draft is off, in words."""


@dataclass
class Health:
    """State of one lane's draft.

    always: it is a model, which drafts in every round within its context of `limit` tokens
    """

    name: str
    always: bool
    limit: int
    clock: Callable[[], float]
    reason: str | None = None  # why it is off
    off_until: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    rounds: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    silent: int = field(default=0, init=False)

    def observe(self, drafted: Drafted, length: int) -> str | None:
        """One row's round, at `length` tokens. The reason when the draft is to be switched off."""
        if self.reason or drafted.budget == 0:
            return None
        if not drafted.tokens:
            self.silent += self.always and length + 1 < self.limit
            return "nan" if self.silent >= MOST_SILENT else None
        self.silent = 0
        self.rounds += 1
        self.accepted += len(drafted.path)
        if self.rounds < WINDOW:
            return None
        low = self.accepted < LEAST_ACCEPTED * self.rounds
        self.rounds = self.accepted = 0
        return "acceptance" if low else None

    def switch_off(self, reason: str) -> None:
        """For good, but for low acceptance for a while: it may be the requests'. Twice as long
        each time, so that it does not flicker."""
        self.reason = reason
        if reason == "acceptance":
            self.off_until = self.clock() + self.pause_s
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def usable(self) -> bool:
        """True when the draft may serve a request now; ends a pause that is over."""
        if self.reason == "acceptance" and self.clock() >= self.off_until:
            self.reason = None
        return self.reason is None


def health_of(name: str, draft: Draft, capacity: int, clock: Callable[[], float]) -> Health:
    """The watch over a draft."""
    always = bool(draft.info.taps) or draft.info.name == "vanilla"
    limit = min(capacity, int(getattr(draft, "limit", capacity) or capacity))
    return Health(name, always, limit, clock)
