"""A draft that can fail without its requests: what it raises is noted, and it drafts nothing more.

A failure ends neither the round it comes in nor the engine's thread: the round commits the target's
own tokens, and the worker then takes the draft out of use. The distribution stays the target's, with
one reservation (design, law 3): a draft that fails *because of* the token it just drew takes that
draw out of the round. It does so once, since it never draws again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeVar

from torch import Tensor

from ..drafts.base import Draft, DraftRow, Feedback
from ..proposal import Proposal

log = logging.getLogger("speculant.serve")

T = TypeVar("T")


class Guarded:
    """Implements `Draft` around another one. failed: it raised, and is not asked any more."""

    def __init__(self, inner: Draft) -> None:
        self.inner, self.info, self.failed = inner, inner.info, False

    def __copy__(self) -> Guarded:
        """With an inner draft of its own: an engine copies a draft to have its per-slot state."""
        return Guarded(copy(self.inner))

    @property
    def limit(self) -> int:
        """Tokens up to which the draft has context; 0: it sets no limit."""
        return int(getattr(self.inner, "limit", 0))

    def start(self, rows: int, capacity: int) -> None:
        """Not guarded: a draft that cannot even start is the operator's to see."""
        self.inner.start(rows, capacity)

    def open(self, row: DraftRow) -> None:
        """See `Draft.open`."""
        self._try(lambda: self.inner.open(row), None)

    def resume(self, row: DraftRow, shared: int) -> int:
        """See `Draft.resume`; the target's cache is whole whatever the draft does."""
        return self._try(lambda: self.inner.resume(row, shared), shared)

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """See `Draft.prefill`."""
        self._try(lambda: self.inner.prefill(row, start, hidden), None)

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """See `Draft.propose`; nothing for every row once the draft has failed."""
        return self._try(lambda: self.inner.propose(rows), Proposal.chains([[] for _ in rows]))

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """See `Draft.update`."""
        self._try(lambda: self.inner.update(rows, feedback), None)

    def close(self, slot: int) -> None:
        """See `Draft.close`."""
        self._try(lambda: self.inner.close(slot), None)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        """What the draft answers; `otherwise` where it fails, or has failed before."""
        if self.failed:
            return otherwise
        try:
            return action()
        except Exception:
            log.exception("draft %s failed", self.info.name)
            self.failed = True
            return otherwise
