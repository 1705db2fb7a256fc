"""A greedy chain of a one-layer draft head in one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
        ("head", Matrix),
        *((name, POINTER) for name in ("embeddings", "cos", "sin", "depths")),
        *((name, INT) for name in ("steps", "tokens")),
        ("ids", POINTER),
    )


class Chain:
    """What a chain needs of a head: its layer, norm, LM head and the draft vocabulary's embeddings.

    layer: one layer with a `beside_norm`; norm: [H], before the LM head; head: H -> N
    embeddings: [N, H] float32, of the tokens that it drafts; inv_freq: [D / 2], of RoPE
    """

    def __init__(
        self, layer: Layers, norm: Tensor, head: PackedLinear, embeddings: Tensor, inv_freq: Tensor
    ) -> None:
        self.layer, self.norm, self.head = layer, norm.contiguous(), head
        self.embeddings, self.inv_freq = embeddings.contiguous(), inv_freq
        self._taps = (POINTER * 2)()  # of one layer, none
        self._matrix = matrix(head)

    def __call__(
        self,
        hidden: Tensor,
        depths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Tensor,
    ) -> list[list[int]]:
        """Draft ids of every row, `depths` of them (at least one), or fewer and then -1.

        hidden: [B, H] float32, the outputs that predict each row's first token
        slots, starts: of each row in `cache`, `KVCache.data`; what is drafted lies behind the start
        A row ends with -1 where a logit is NaN, or the largest is infinite.
        """
        batch, steps = len(hidden), max(depths)
        where = torch.tensor([slots, starts, depths])  # shape: [3, B]
        turns = torch.arange(steps - 1)[:, None] + where[1]
        angles = turns[..., None].float() * self.inv_freq  # shape: [steps - 1, B, D / 2]
        cos, sin, hidden = angles.cos(), angles.sin(), hidden.contiguous()
        ids = torch.empty(batch, steps, dtype=torch.int64)
        work = Pass(
            hidden=hidden.data_ptr(),
            keys=cache[0].data_ptr(),
            values=cache[1].data_ptr(),
            taps=ctypes.cast(self._taps, POINTER),
            slots=where[0].data_ptr(),
            starts=where[1].data_ptr(),
            rows=batch,
            batch=batch,
            tokens=1,
            layer_stride=cache.stride(1),
            row_stride=cache.stride(2),
            head_stride=cache.stride(3),
            threads=torch.get_num_threads(),
        )
        call = Call(
            ctypes.pointer(self.layer.model),
            ctypes.pointer(work),
            self.norm.data_ptr(),
            self._matrix,
            address(self.embeddings),
            cos.data_ptr(),
            sin.data_ptr(),
            where[2].data_ptr(),
            steps,
            len(self.embeddings),
            ids.data_ptr(),
        )
        loaded = library()
        assert loaded is not None
        loaded.speculant_chain(ctypes.byref(call))
        return [row[:depth] for row, depth in zip(ids.tolist(), depths, strict=True)]
