"""The key/value cache: preallocated, one logical length per row, roll-back without copies.

Physical layout  [2, layers, rows, kv_heads, capacity, head_dim]  (2 = keys, values).
A row's logical length is the only truth: entries past it are garbage and are never
attended to, so rolling back is setting the length, and a tree's accepted path is gathered
in place among the entries just written. The prefix is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

CALL_COLUMNS = 110
"""Cached columns that a row reads while one more call of attention begins: about 20 microseconds, at
the 8.5 GB/s that one core of a server CPU reads."""


class KVCache:
    """Keys and values of `rows` sequences of up to `capacity` tokens each."""

    def __init__(
        self,
        num_layers: int,
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (2, num_layers, rows, kv_heads, capacity, head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))  # shape: [2, L, R, Hkv, C, D]
        self.lengths = [0] * rows
        self.capacity = capacity
        self._layers = [(self.data[0, i], self.data[1, i]) for i in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self.data.numel() * self.data.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [R, Hkv, C, D], as views."""
        return self._layers[index]

    def rows(
        self,
        slots: Sequence[int],
        new_tokens: int,
        behind: int = 0,
        counts: Sequence[int] | None = None,
    ) -> CacheRows:
        """The rows of one forward that adds `new_tokens` tokens behind each slot's length.

        behind: entries that earlier forwards of a round left behind every length, uncommitted; the
        new ones are written after them, and the mask says which of them each new token sees.
        counts: how many of each row's new tokens mean anything; see `CacheRows`
        Raises ValueError when they do not fit, or a slot comes twice.
        """
        if not slots or len(set(slots)) != len(slots):
            raise ValueError(f"cache slots {list(slots)}: there must be some, and each once")
        starts = [self.lengths[slot] for slot in slots]
        if max(starts) + behind + new_tokens > self.capacity:
            raise ValueError(
                f"cache holds {self.capacity} tokens a row; {max(starts)} + {behind + new_tokens} "
                "do not fit"
            )
        even = counts is None or min(counts) == new_tokens
        real = None if even or counts is None else tuple(counts)
        return CacheRows(self, tuple(slots), tuple(starts), new_tokens, behind, real)

    def advance(self, slot: int, count: int) -> None:
        """Make the `count` entries just written behind a row's length part of it."""
        if not 0 <= count <= self.capacity - self.lengths[slot]:
            raise ValueError(f"cannot advance row {slot} of length {self.lengths[slot]} by {count}")
        self.lengths[slot] += count

    def keep(self, slot: int, offsets: Sequence[int]) -> None:
        """Keep, of the entries just written behind a row's length, those at `offsets`.

        offsets: strictly increasing, from 0 (the root) on; they become contiguous. For a
        chain they already are, and only the length changes.
        """
        if any(b <= a for a, b in pairwise(offsets)):
            raise ValueError(f"offsets {list(offsets)} to keep do not increase")
        start, count = self.lengths[slot], len(offsets)
        first = next((i for i, offset in enumerate(offsets) if offset != i), count)
        if first < count:  # shape: moved [2, L, Hkv, m, D]
            source = torch.tensor(offsets[first:], device=self.data.device) + start
            moved = self.data[:, :, slot].index_select(3, source)
            self.data[:, :, slot, :, start + first : start + count] = moved
        self.advance(slot, count)

    def truncate(self, slot: int, length: int) -> None:
        """Roll a row back to `length` tokens."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate row {slot} of {self.lengths[slot]} to {length}")
        self.lengths[slot] = length

    def erase(self, slot: int, length: int) -> None:
        """Roll a row back to `length` tokens and zero what lies behind, where NaN was written.

        Attention gives what lies behind a length the weight 0, and 0 x NaN is NaN.
        """
        self.truncate(slot, length)
        self.data[:, :, slot, :, length:] = 0


@dataclass(frozen=True)
class CacheRows:
    """The part of a cache that one forward reads and writes: B rows, T new tokens each.

    Columns of row r: its cached tokens [0, starts[r]), then `behind` uncommitted entries, then the
    new tokens.

    counts: of the new tokens, how many mean anything, 1 to T a row, None: all. A target need not
            compute the padding behind them: nothing of it is read, its logits but for being finite
    """

    cache: KVCache
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    new_tokens: int
    behind: int = 0
    counts: tuple[int, ...] | None = None

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        cuts = [i for i in range(1, len(self.slots)) if self.slots[i] != self.slots[i - 1] + 1]
        return list(pairwise([0, *cuts, len(self.slots)]))

    def runs(self) -> list[tuple[int, int]]:
        """Stretches [a, b) of batch rows whose slots are neighbours, so that one view holds them.

        slots (0, 1, 2, 5) -> [(0, 3), (3, 4)]
        """
        return self._runs

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        return [part for a, b in self._runs for part in _split(self.starts, a, b)]

    def stretches(self) -> list[tuple[int, int]]:
        """Runs cut where rows of very different lengths meet; what attention reads at once.

        Rows read together read as many columns as the longest of them. Reading is what attention
        of few new tokens costs, so short rows are read without their long neighbours:

        lengths (900, 100, 110, 1000) -> [(0, 1), (1, 3), (3, 4)]
        """
        return self._stretches

    def span(self, a: int, b: int) -> int:
        """Columns that batch rows [a, b) need: their longest row, what is behind it, the new tokens."""
        return max(self.starts[a:b]) + self.behind + self.new_tokens

    def select(self, a: int, b: int) -> CacheRows:
        """Batch rows [a, b) alone."""
        slots, starts = self.slots[a:b], self.starts[a:b]
        counts = None if self.counts is None else self.counts[a:b]
        return CacheRows(self.cache, slots, starts, self.new_tokens, self.behind, counts)

    def real(self) -> Tensor | None:
        """Which of the B * T new tokens mean anything, flat indices ascending; None: all of them."""
        if self.counts is None:
            return None
        count = torch.tensor(self.counts)[:, None]
        return (torch.arange(self.new_tokens) < count).flatten().nonzero()[:, 0]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write new keys and values [B, Hkv, T, D] behind each row's length and its `behind`."""
        cached_keys, cached_values = self.cache.layer(layer)
        if len(self.slots) == 1:
            slot, start = self.slots[0], self.starts[0] + self.behind
            end = start + self.new_tokens
            cached_keys[slot, :, start:end] = keys[0]
            cached_values[slot, :, start:end] = values[0]
            return
        slots, columns = self._index  # shape: [B, 1], [B, T]
        cached_keys[slots, :, columns] = keys.transpose(1, 2)  # shape: [B, T, Hkv, D]
        cached_values[slots, :, columns] = values.transpose(1, 2)

    def read(self, layer: int, a: int, b: int) -> tuple[Tensor, Tensor]:
        """Views [b - a, Hkv, span, D] of the keys and values of a run (see `runs`)."""
        first, last, span = self.slots[a], self.slots[b - 1] + 1, self.span(a, b)
        keys, values = self.cache.layer(layer)
        return keys[first:last, :, :span], values[first:last, :, :span]

    def visible(self, a: int, b: int, mask: Tensor | None) -> Tensor:
        """Which columns each new token of batch rows [a, b) may attend to: [b - a, T, span] bool.

        mask: [B, T, behind + T] bool or None (causal), visibility among the uncommitted entries and
        the new tokens. Row r sees its cached columns [0, starts[r]), then what `mask` allows, and
        nothing past:

            starts = 3, T = 2, causal, span = 6:   1 1 1 1 0 0
                                                   1 1 1 1 1 0
        """
        device, new = self.cache.data.device, self.new_tokens
        width = self.behind + new
        starts = torch.tensor(self.starts[a:b], device=device)
        columns = torch.arange(self.span(a, b), device=device)
        seen = (columns < starts[:, None])[:, None, :].repeat(1, new, 1)
        if mask is None:
            among = torch.ones(new, width, dtype=torch.bool, device=device).tril(self.behind)
            among = among.expand(b - a, new, width)
        else:
            among = mask[a:b].to(device)
        index = (starts[:, None] + torch.arange(width, device=device))[:, None, :]
        return seen.scatter(2, index.expand(b - a, new, width), among)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        device = self.cache.data.device
        starts = torch.tensor(self.starts, device=device) + self.behind
        columns = starts[:, None] + torch.arange(self.new_tokens, device=device)
        return torch.tensor(self.slots, device=device)[:, None], columns


def _split(starts: Sequence[int], a: int, b: int) -> list[tuple[int, int]]:
    """Stretches of batch rows [a, b): a row joins its neighbours while that reads little more."""
    parts, first, widest = [], a, starts[a]
    for row in range(a + 1, b):
        count, wider = row - first, max(widest, starts[row])
        if (count + 1) * wider > count * widest + starts[row] + CALL_COLUMNS:
            parts.append((first, row))
            first, widest = row, starts[row]
        else:
            widest = wider
    return [*parts, (first, b)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory until they are written to, on a CPU.

    Not `empty`: a masked column still enters attention as 0 x its value, and uninitialised memory
    may hold NaN. Not `torch.zeros`: it writes every page; numpy's are zeroed when first touched.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
