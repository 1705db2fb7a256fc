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
    """Plain decoding that keeps the tapped states of every request until they are taken.

    taps: layer ids or LAST, in the order of the columns
    """

    def __init__(self, taps: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.info = DraftInfo("record", taps=tuple(taps))
        self.dtype = dtype

    def start(self, rows: int, capacity: int) -> None:
        """Nothing noted yet."""
        self._running: dict[int, tuple[DraftRow, list[Tensor]]] = {}
        self._done: dict[tuple[int, ...], Tensor] = {}

    def open(self, row: DraftRow) -> None:
        """A request took the slot."""
        self._running[row.slot] = (row, [])

    def resume(self, row: DraftRow, shared: int) -> int:
        """States are noted as tokens are run: all are run again."""
        self.close(row.slot)
        self.open(row)
        return 0

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Note the states [T, n * H] of prompt positions."""
        assert hidden is not None
        self._running[row.slot][1].append(hidden.to(self.dtype))

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Note the root's states."""
        assert feedback.hidden is not None
        states = feedback.hidden[:, :1].to(self.dtype)
        for b, row in enumerate(rows):
            parts = self._running[row.slot][1]
            parts.append(states[b])
            if len(parts) >= PIECES:
                parts[:] = [torch.cat(parts)]

    def close(self, slot: int) -> None:
        """The slot's request is gone: keep its states under its tokens."""
        row, parts = self._running.pop(slot)
        if len(parts) > 0:
            self._done[tuple(row.tokens)] = torch.cat(parts)

    def take(self) -> dict[tuple[int, ...], Tensor]:
        """Tokens [T] of every request that ended since the last call -> its states [T - 1, n * H].

        The newest token of a request is never run, so it has no state.
        """
        done, self._done = self._done, {}
        return done
