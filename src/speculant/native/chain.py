"""A greedy chain of a one-layer draft head in one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layers import INT, POINTER, Layers, Matrix, Model, Pass, address, matrix
from .library import library
from .linear import PackedLinear


class Call(ctypes.Structure):
    """The arguments of `speculant_chain`; calls.h has the same struct."""

    _fields_ = (
        ("model", ctypes.POINTER(Model)),
        ("work", ctypes.POINTER(Pass)),
        ("norm", POINTER),
        *((name, Matrix) for name in ("fc", "head")),
        *((name, POINTER) for name in ("embeddings", "cos", "sin", "depths")),
        *((name, INT) for name in ("steps", "tokens")),
        *((name, POINTER) for name in ("ids", "taps", "features")),
    )


@dataclass(frozen=True)
class Pairs:
    """Pairs to run before the chain, one row's behind the other's: R of them, at least one a row.

    taps: [R, n * H] float32, the target's states; embedded: [R, H] float32; counts: of each row
    """

    taps: Tensor
    embedded: Tensor
    counts: Sequence[int]


class Chain:
    """What a chain needs of a head: its layer, norm, LM head and the draft vocabulary's embeddings.

    layer: one layer with a `beside_norm`; norm: [H], before the LM head; head: H -> N
    embeddings: [N, H] float32, of the tokens that it drafts; inv_freq: [D / 2], of RoPE
    fc: tapped states to features, where that is all that makes them
    """

    def __init__(
        self,
        layer: Layers,
        norm: Tensor,
        head: PackedLinear,
        embeddings: Tensor,
        inv_freq: Tensor,
        fc: PackedLinear | None = None,
    ) -> None:
        self.layer, self.norm, self.head, self.fc = layer, norm.contiguous(), head, fc
        self.embeddings, self.inv_freq = embeddings.contiguous(), inv_freq
        self._taps = (POINTER * 2)()  # of one layer, none
        self._matrices = (Matrix() if fc is None else matrix(fc), matrix(head))

    def __call__(
        self,
        first: Tensor | Pairs,
        depths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Tensor,
    ) -> tuple[list[list[int]], Tensor]:
        """Draft ids of every row, `depths` of them (at least one); and what predicts the first, [B, H].

        first: that, [B, H] float32, or the pairs whose last outputs it is
        slots, starts: of each row in `cache`, `KVCache.data`; pairs and what is drafted lie behind
        A row ends with -1 where a logit is NaN, or the largest is infinite.
        """
        batch, steps = len(slots), max(depths)
        pairs = first if isinstance(first, Pairs) else None
        counts = [0] * batch if pairs is None else pairs.counts
        where = torch.tensor([slots, starts, depths, counts])  # shape: [4, B]
        turns = (torch.arange(steps - 1)[:, None] + (where[1] + where[3])).flatten()
        rows, widest = batch, 1
        firsts = features = None
        if pairs is not None:
            rows, widest = len(pairs.taps), max(counts)
            firsts = where[3].cumsum(0) - where[3]
            own = [place for s, n in zip(starts, counts, strict=True) for place in range(s, s + n)]
            turns = torch.cat([torch.tensor(own), turns])
            hidden, features = (
                torch.empty(batch, self.layer.hidden),
                torch.empty_like(pairs.embedded),
            )
        else:
            assert isinstance(first, Tensor)
            hidden = first.contiguous()
        angles = turns[:, None].float() * self.inv_freq  # shape: [R + (steps - 1) * B, D / 2]
        cos, sin = angles.cos(), angles.sin()
        done = 0 if pairs is None else rows * cos.stride(0) * cos.element_size()
        ids = torch.empty(batch, steps, dtype=torch.int64)
        work = Pass(
            hidden=hidden.data_ptr(),
            beside=None if pairs is None else pairs.embedded.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=cache[0].data_ptr(),
            values=cache[1].data_ptr(),
            taps=ctypes.cast(self._taps, POINTER),
            slots=where[0].data_ptr(),
            starts=where[1].data_ptr(),
            firsts=address(firsts),
            counts=None if pairs is None else where[3].data_ptr(),
            rows=rows,
            batch=batch,
            tokens=widest,
            layer_stride=cache.stride(1),
            row_stride=cache.stride(2),
            head_stride=cache.stride(3),
            threads=torch.get_num_threads(),
        )
        call = Call(
            ctypes.pointer(self.layer.model),
            ctypes.pointer(work),
            self.norm.data_ptr(),
            *self._matrices,
            address(self.embeddings),
            cos.data_ptr() + done,
            sin.data_ptr() + done,
            where[2].data_ptr(),
            steps,
            len(self.embeddings),
            ids.data_ptr(),
            None if pairs is None else pairs.taps.data_ptr(),
            address(features),
        )
        loaded = library()
        assert loaded is not None
        loaded.speculant_chain(ctypes.byref(call))
        chains = [row[:depth] for row, depth in zip(ids.tolist(), depths, strict=True)]
        return chains, hidden
