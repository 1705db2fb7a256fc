"""The draft that drafts nothing: plain decoding through the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..proposal import Proposal
from .base import DraftInfo, DraftRow, Feedback


class NoDraft:
    """Proposes no token, so that every round commits the one token the target samples."""

    def __init__(self) -> None:
        self.info = DraftInfo(name="none")

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to prepare."""

    def open(self, row: DraftRow) -> None:
        """Nothing to keep."""

    def resume(self, row: DraftRow, shared: int) -> int:
        """Nothing is missing."""
        return shared

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Nothing to read."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """An empty chain for every row."""
        return Proposal.chains([[] for _ in rows])

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Nothing to roll back."""

    def close(self, slot: int) -> None:
        """Nothing to forget."""
