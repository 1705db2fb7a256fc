"""What a request's logits depend on besides the model: bias, penalties, min_tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .sampling import SamplingParams


class History:
    """What one request's logits depend on besides the model: seen tokens, counts, EOS ids.

    Only committed tokens enter. Drafted positions are served by `adjust` with the drafted path
    as an argument, so that a rejected token leaves no trace here.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        stop_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params, self.device = params, device
        self.num_output = 0
        self.stop_ids = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
        self.bias: Tensor | None = None
        if params.logit_bias:
            bias = torch.zeros(vocab_size)
            bias[torch.tensor(list(params.logit_bias))] = torch.tensor(
                [float(value) for value in params.logit_bias.values()]
            )
            self.bias = bias.to(device)
        if params.needs_history:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
            self.counts = torch.zeros(vocab_size, device=device)

    @property
    def active(self) -> bool:
        """False when `adjust` would change nothing."""
        return self.bias is not None or self.params.needs_history

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens joined the output."""
        self.num_output += len(tokens)
        if self.params.needs_history and tokens:
            ids = torch.tensor(list(tokens), device=self.device)
            self.seen[ids] = True
            self.counts.index_add_(0, ids, torch.ones(len(tokens), device=self.device))

    def adjust(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Bias, penalties and min_tokens for logits [T, V] after each drafted path; a new tensor.

        paths: for each of the T positions, the drafted tokens between the root and it.
        """
        if not self.active:
            return logits
        out = logits if self.bias is None else logits + self.bias
        if not self.params.needs_history:
            return out
        out = self._penalise(out, self.seen, self.counts)
        for i, path in enumerate(paths):
            if path:
                ids, times = torch.tensor(list(path), device=self.device).unique(return_counts=True)
                raw = logits[i, ids] if self.bias is None else logits[i, ids] + self.bias[ids]
                seen = torch.ones(len(ids), dtype=torch.bool, device=self.device)
                out[i, ids] = self._penalise(raw, seen, self.counts[ids] + times)
            if self.num_output + len(path) < self.params.min_tokens:
                out[i, self.stop_ids] = -math.inf
        return out

    def _penalise(self, logits: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        p = self.params
        r = p.repetition_penalty
        out = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
        return out - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
