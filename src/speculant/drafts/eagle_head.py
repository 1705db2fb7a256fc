"""An EAGLE head with its own key/value cache: what drafting a chain and growing a tree both run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..attention import Reading
from ..cache import KVCache
from ..heads.base import EagleHead
from ..heads.packed import greedy_chain
from .base import DraftRow

Paths = Callable[[int], Sequence[Sequence[int]]]
"""Row i of a pass -> the drafted target ids that lead to each of its outputs."""


class CachedHead:
    """A head over a cache of pairs. The cache's lengths count the pairs made of target features.

    head:         the head, on the target's device
    embed:        token ids -> the target's input embeddings, unless the head has its own
    target_vocab: V of the target
    """

    def __init__(
        self, head: EagleHead, embed: Callable[[Tensor], Tensor], target_vocab: int
    ) -> None:
        self.head, self.target_vocab = head, target_vocab
        self.embed = head.own_embedding or embed
        weight = next(head.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.target_ids = head.target_ids
        self.targets: list[int] = self.target_ids.tolist()  # 8192 of them take 0.1 ms a round
        self.reduced = len(self.target_ids) < target_vocab
        c = head.config
        steps = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=self.device)
        self.inv_freq = 1.0 / c.rope_theta ** (steps / c.head_dim)  # shape: [D / 2]
        self.chain = greedy_chain(head, self.embed, self.inv_freq)

    def start(self, rows: int, capacity: int) -> None:
        """Reserve the cache."""
        c = self.head.config
        self.cache = KVCache(1, rows, capacity, c.kv_heads, c.head_dim, self.dtype, self.device)

    def run(
        self,
        slots: Sequence[int],
        tokens: Tensor,
        hidden: Tensor,
        offsets: Tensor,
        mask: Tensor | None = None,
        behind: int = 0,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """One pass over new pairs [b, T]; the lengths of the cache stay. Returns outputs [b, T, H].

        tokens:  [b, T] target ids; hidden: [b, T, H], features or the head's own outputs
        offsets: [T] int64, positions counted from each row's length
        mask, behind, counts: as in `KVCache.rows` and `CacheRows`
        """
        rows = self.cache.rows(slots, tokens.shape[1], behind, counts)
        positions = torch.tensor(rows.starts, device=self.device)[:, None] + offsets
        embedded = self.embed(tokens).to(hidden)
        config, layers = self.head.config, self.head.compiled
        reading = Reading(rows, mask, config.num_heads // config.kv_heads)
        if layers is None or reading.kernel is None:
            return self.head(embedded, hidden, positions, partial(reading.attend, 0))
        angles, real = positions[..., None].float() * self.inv_freq, rows.real()  # [b, T, D / 2]
        if real is None:
            out = hidden.clone(memory_format=torch.contiguous_format)
            layers(out, angles, self.cache.data, reading.kernel, (), embedded.contiguous())
            return out
        some, turns, beside = (x.flatten(0, 1)[real] for x in (hidden, angles, embedded))
        parts = (some, turns, self.cache.data, reading.kernel, (), beside)
        layers(*parts, counts=rows.counts)
        spread = torch.zeros_like(hidden)
        spread.view(-1, hidden.shape[-1])[real] = some
        return spread

    def logits(self, hidden: Tensor, rows: Sequence[DraftRow], paths: Paths) -> Tensor:
        """Logits [b, T, Vd] of outputs [b, T, H], with every row's penalties and bias applied."""
        out = self.head.logits(hidden)
        for i, row in enumerate(rows):
            if row.history.active:  # its adjustments are over the target's vocabulary
                full = self.widen(out[i]).to(row.history.device)
                out[i] = row.history.adjust(full, paths(i)).to(out.device)[:, self.target_ids]
        return out

    def widen(self, values: Tensor) -> Tensor:
        """Values [b, Vd] over the draft vocabulary as [b, V] over the target's, 0 elsewhere."""
        if not self.reduced:
            return values
        full = values.new_zeros(len(values), self.target_vocab)
        full[:, self.target_ids] = values
        return full
