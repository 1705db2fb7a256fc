"""The draft that drafts nothing and notes the target's hidden states: features for training.

Answering a prompt computes the states at every position anyway. Noting them saves the second pass
over the text that a feature file would cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import DraftInfo, DraftRow, Feedback
from .none import NoDraft

PIECES = 64
"""Single states are joined when this many have gathered: few large pieces, little overhead."""


class RecordDraft(NoDraft):
    """Plain decoding that keeps the tapped states of every request until its slot is needed.

    taps: layer ids or LAST, in the order of the columns
    """

    def __init__(self, taps: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.info = DraftInfo("record", taps=tuple(taps))
        self.dtype = dtype

    def start(self, rows: int, capacity: int) -> None:
        """Nothing noted yet."""
        self._noted: dict[int, tuple[DraftRow, list[Tensor]]] = {}

    def open(self, row: DraftRow) -> None:
        """A request took the slot."""
        self._noted[row.slot] = (row, [])

    def resume(self, row: DraftRow, shared: int) -> int:
        """The states of the shared tokens are there already."""
        _, parts = self._noted[row.slot]
        kept = torch.cat(parts)[:shared].clone() if parts else None  # no view: the rest can go
        self._noted[row.slot] = (row, [] if kept is None else [kept])
        return 0 if kept is None else len(kept)

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Note the states [T, n * H] of prompt positions."""
        assert hidden is not None
        self._noted[row.slot][1].append(hidden.to(self.dtype))

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Note the root's states."""
        assert feedback.hidden is not None
        states = feedback.hidden[:, :1].to(self.dtype)
        for b, row in enumerate(rows):
            parts = self._noted[row.slot][1]
            parts.append(states[b])
            if len(parts) >= PIECES:
                parts[:] = [torch.cat(parts)]

    def close(self, slot: int) -> None:
        """The slot's request is gone. Its states stay until the slot is taken."""

    def states_of(self, tokens: Sequence[int]) -> Tensor | None:
        """States [T - 1, n * H] of the request that runs or ended with these tokens [T], if noted.

        The newest token of a request is never run, so it has no state.
        """
        wanted = list(tokens)
        for row, parts in self._noted.values():
            if parts and row.tokens == wanted:
                return torch.cat(parts)
        return None
