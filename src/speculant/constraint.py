"""Output held to a form (a grammar): which tokens may follow, at every drafted position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .history import History
from .sampling import SamplingParams


class Constraint(Protocol):
    """What a form allows. Only committed tokens move it; drafted ones are looked at and undone."""

    error: str | None
    """Why the form cannot be followed further; from then on nothing more is masked."""

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Tokens that may follow the committed ones and then `path`: [V] bool on the CPU.

        None where `path` itself breaks the form: such a position is never reached.
        """
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens joined the output; EOS may be the last of them."""
        ...


class ConstrainedHistory(History):
    """A history whose `adjust` also forbids what a constraint forbids at each position.

    The target and every draft that samples through the same transform see the same masks. A
    drafted token that breaks the form has probability 0 at its parent, so it is never accepted.
    """

    def __init__(
        self,
        constraint: Constraint,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        stop_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(params, vocab_size, prompt, stop_ids, device)
        self.constraint = constraint

    @property
    def active(self) -> bool:
        """True: every position is masked."""
        return True

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens joined the output."""
        super().commit(tokens)
        self.constraint.commit(tokens)

    def adjust(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Bias, penalties, min_tokens, then the mask of each drafted path; a new tensor [T, V]."""
        out = super().adjust(logits, paths).clone()
        for i, path in enumerate(paths):
            mask = self.constraint.allowed(path)
            if mask is not None:
                out[i].masked_fill_(~mask.to(out.device), -math.inf)
        return out
