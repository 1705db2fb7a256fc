"""Attention of a forward's new tokens over the cache, read in place.

Few new tokens go through the compiled kernel (`native/attention.cpp`), which reads each row as far as
that row goes. Without it, for prompts, and on other devices it is torch's own attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cache import CacheRows
from .native.attention import Attention, can_attend

FEW = 64
"""New tokens a row up to which the kernel attends: what it gives does not depend on how many there
are, so that a prompt read in chunks of at most so many is the same to the last bit however it is cut,
as when a conversation's earlier turns are still in the cache. Beyond it torch's own is faster."""


class Reading:
    """How every layer of one forward reads the rows of a cache.

    rows:      the rows and the new tokens, B and T of them
    mask:      [B, T, behind + T] bool or None (causal), as in `CacheRows.visible`
    groups:    query heads a K/V head
    window:    a token sees columns less than this many positions back; positions: [B, T], of the new
               tokens (a cached token's position is its column). None: everything
    """

    def __init__(
        self,
        rows: CacheRows,
        mask: Tensor | None,
        groups: int,
        positions: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self.rows, new, data = rows, rows.new_tokens, rows.cache.data
        if window is not None and rows.span(0, len(rows.slots)) <= window:
            window = None
        few = new <= FEW and window is None
        self.kernel: Attention | None = None
        self.biases: Sequence[Tensor | None] = ()
        if few and can_attend(data.dtype, data.device, data.shape[-1]):
            self.kernel = Attention(rows.slots, rows.starts, mask, rows.behind)
        else:
            self.biases = [
                self._bias(a, b, mask, groups, positions, window) for a, b in rows.stretches()
            ]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write new keys, values [B, Hkv, T, D]; attention of queries [B, H, T, D]: [B, H, T, D].

        Query head h = kv * groups + g reads K/V head kv.
        """
        if self.kernel is not None:
            return self.kernel(queries, keys, values, self.rows.cache.layer(layer))
        self.rows.write(layer, keys, values)
        count, heads, new, dim = queries.shape
        # the heads of one K/V head are stacked as query rows: no expanded keys are needed
        stacked = queries.reshape(count, keys.shape[1], -1, dim)  # shape: [B, Hkv, groups * T, D]
        parts = []
        for (a, b), bias in zip(self.rows.stretches(), self.biases, strict=True):
            k, v = self.rows.read(layer, a, b)
            parts.append(scaled_dot_product_attention(stacked[a:b], k, v, attn_mask=bias))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(count, heads, new, dim)

    def _bias(
        self,
        a: int,
        b: int,
        mask: Tensor | None,
        groups: int,
        positions: Tensor | None,
        window: int | None,
    ) -> Tensor | None:
        """Additive bias [b - a, 1, groups * T, span] of a stretch; None: everything is visible."""
        rows, new = self.rows, self.rows.new_tokens
        even = new == 1 and rows.behind == 0 and min(rows.starts[a:b]) == max(rows.starts[a:b])
        if even and window is None:
            return None
        seen = rows.visible(a, b, mask)  # shape: [b - a, T, span]
        if window is not None:
            assert positions is not None
            columns = torch.arange(seen.shape[-1], device=seen.device).expand(b - a, -1).clone()
            for row, start in enumerate(rows.starts[a:b]):
                columns[row, start : start + new] = positions[a + row]
            seen &= positions[a:b, :, None] - columns[:, None, :] < window
        return additive(seen, groups, rows.cache.data.dtype)


def additive(seen: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """What may be seen, [B, T, S] bool, as a bias [B, 1, G * T, S]: 0 or -inf."""
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    bias.masked_fill_(~seen, float("-inf"))
    return bias[:, None].repeat(1, 1, groups, 1)
