"""CUDA graphs of the fast decoder's forward: one launch instead of some ten for every layer.

A forward of few rows on a GPU is bound by launching its kernels. A graph is recorded once and replayed,
on the memory it was recorded on: so inputs are copied into buffers, everything that changes from
forward to forward (slots, lengths, mask) is a tensor, and shapes are padded to buckets, a graph each.

Not run on a GPU: none was at hand. What is recorded is tested on the CPU, where it is called every
time instead of replayed; recording itself (`record`) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from ..attention import additive
from ..cache import CacheRows, KVCache
from .base import LAST

if TYPE_CHECKING:
    from .llama import LlamaTarget

NEW = (1, 2, 4, 8, 16, 32, 64)
"""New tokens a row that there are graphs for; more are a prompt's, and bound by arithmetic."""
COLUMNS = 256
"""Columns that attention reads come in multiples of this."""
Outputs = tuple[Tensor | None, Tensor | None]
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], object], Outputs]]


@dataclass
class Inputs:
    """What a graph reads. tokens, positions: [B, T]; slots, starts: [B]; mask: [B, T, T] bool."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    mask: Tensor

    @staticmethod
    def empty(rows: int, new: int, device: torch.device) -> Inputs:
        """Buffers of a shape."""
        numbers = torch.zeros(rows, new, dtype=torch.int64, device=device)
        mask = torch.zeros(rows, new, new, dtype=torch.bool, device=device)
        return Inputs(numbers, numbers.clone(), numbers[:, 0].clone(), numbers[:, 0].clone(), mask)

    def fill(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, rows: CacheRows) -> None:
        """Copy a forward's inputs in. Padding sees itself, what it computes is left out later."""
        count, new = tokens.shape[1], self.tokens.shape[1]
        device = self.mask.device
        for buffer, given in ((self.tokens, tokens), (self.positions, positions)):
            buffer.zero_()
            buffer[:, :count] = given
        self.slots.copy_(torch.tensor(rows.slots))
        self.starts.copy_(torch.tensor(rows.starts))
        self.mask.copy_(torch.eye(new, dtype=torch.bool, device=device))
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        self.mask[:, :count, :count] = causal if mask is None else mask.to(device)


class StaticReading:
    """Attention over a cache where slots and lengths are tensors: takes the place of `Reading`."""

    def __init__(self, cache: KVCache, inputs: Inputs, span: int, groups: int) -> None:
        """span: columns to read, which hold every row's cached and new tokens."""
        self.cache, self.slots, self.span = cache, inputs.slots, span
        new, starts = inputs.tokens.shape[1], inputs.starts[:, None]  # shape: [B, 1]
        device = starts.device
        self.columns = starts + torch.arange(new, device=device)  # shape: [B, T]
        seen = torch.arange(span, device=device) < starts[:, :, None]  # shape: [B, 1, S]
        index = self.columns[:, None, :].expand(-1, new, -1)
        seen = seen.expand(-1, new, -1).scatter(2, index, inputs.mask)
        self.bias = additive(seen, groups, cache.data.dtype)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `Reading.attend`: queries [B, H, T, D], new keys and values [B, Hkv, T, D]."""
        cached = self.cache.layer(layer)
        parts = []
        for where, new in zip(cached, (keys, values), strict=True):
            where[self.slots[:, None], :, self.columns] = new.transpose(1, 2)
            parts.append(where[self.slots, :, : self.span])  # shape: [B, Hkv, S, D]
        stacked = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])
        out = scaled_dot_product_attention(stacked, parts[0], parts[1], self.bias)
        return out.view(queries.shape)


@dataclass
class _Graph:
    inputs: Inputs
    replay: Callable[[], object]
    outputs: Outputs


class Graphs:
    """The graphs of one target.

    record: takes the forward as a function of nothing; runs it, and returns what repeats it and the
            tensors in which its results appear
    """

    def __init__(self, target: LlamaTarget, record: Record | None = None) -> None:
        self.target, self.record = target, record or _recorder()
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def fits(self, cache: CacheRows) -> bool:
        """True for the forwards that there are graphs for: few new tokens, room for padding, no
        sliding window, nothing uncommitted behind the lengths."""
        if cache.new_tokens > NEW[-1] or cache.behind or self.target.config.window is not None:
            return False
        new = next(n for n in NEW if n >= cache.new_tokens)
        return max(cache.starts) + new <= cache.cache.capacity

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int],
        need_logits: bool,
    ) -> Outputs:
        """As `Target.forward`, for what `fits`."""
        new = next(n for n in NEW if n >= cache.new_tokens)
        whole = -(-(max(cache.starts) + new) // COLUMNS) * COLUMNS
        span = min(whole, cache.cache.capacity)
        rows = len(cache.slots)
        # a graph holds for one cache's memory
        where = (cache.cache.data.data_ptr(), cache.cache.data.shape)
        key = (*where, rows, new, span, tuple(taps), need_logits)
        graph = self._graphs.get(key)
        if graph is None:
            inputs = Inputs.empty(rows, new, self.target.info.device)
            inputs.fill(tokens, positions, mask, cache)  # recording runs it, on real inputs

            def run() -> Outputs:
                return self._run(inputs, cache.cache, span, taps, need_logits)

            graph = self._graphs[key] = _Graph(inputs, *self.record(run))
        graph.inputs.fill(tokens, positions, mask, cache)
        graph.replay()
        logits, hidden = graph.outputs
        count = cache.new_tokens  # copies: the next replay writes over the buffers
        return (
            None if logits is None else logits[:, :count].clone(),
            None if hidden is None else hidden[:, :count].clone(),
        )

    def _run(
        self, inputs: Inputs, cache: KVCache, span: int, taps: Sequence[int], need_logits: bool
    ) -> Outputs:
        """The forward that is recorded."""
        target = self.target
        reading = StaticReading(
            cache, inputs, span, target.config.num_heads // target.config.kv_heads
        )
        tapped: dict[int, Tensor] = {}
        inner = [tap for tap in taps if tap != LAST]
        hidden = target.embedding(inputs.tokens)
        hidden = target.run_layers(hidden, inputs.positions, reading, tapped, inner)
        hidden = rms_norm(hidden, target.norm.shape, target.norm, target.config.norm_eps)
        tapped[LAST] = hidden
        logits = target.unembed(hidden) if need_logits else None
        return logits, torch.cat([tapped[i] for i in taps], dim=-1) if taps else None


def _recorder() -> Record:
    """Records CUDA graphs that share one pool of memory. Not run: no GPU was at hand."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up in their first runs
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = run()
        return graph.replay, outputs

    return record
