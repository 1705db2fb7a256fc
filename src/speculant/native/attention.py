"""Attention of few new tokens over a long cache, in the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .library import library

LANES = 16
"""Numbers that the library's vectors hold: head sizes must be multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)


class Call(ctypes.Structure):
    """The arguments of `speculant_attend`; attention.cpp has the same struct."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_new", "v_new", "keys", "values", "out")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "mask", "firsts", "counts")),
        *((name, ctypes.c_int64 * 3) for name in ("q_strides", "k_strides", "v_strides")),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "batch", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("groups", "tokens", "dim", "behind")),
        ("scale", ctypes.c_float),
    )


class Attention:
    """What one forward reads of a cache: rows, their lengths, and what each new token sees.

    slots, starts: cache row of each batch row, and its cached length. mask: [B, T, behind + T] bool
    among the uncommitted entries and the new tokens, or None (causal).
    """

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], mask: Tensor | None, behind: int
    ) -> None:
        self.slots, self.starts = torch.tensor(slots), torch.tensor(starts)
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.behind = behind
        self.width = 0 if mask is None else mask.shape[1]  # T of the mask

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, cached: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Write keys, values [B, Hkv, T, D] behind the lengths; attend with queries [B, H, T, D].

        cached: keys and values of the layer [R, Hkv, C, D]. Returns [B, H, T, D], stored as
        [B, T, H, D], in the dtype of the queries. Any strides, but the last must be 1.
        """
        batch, heads, tokens, dim = queries.shape
        out = torch.empty(batch, tokens, heads, dim)
        call = Call(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            cached[0].data_ptr(),
            cached[1].data_ptr(),
            out.data_ptr(),
            self.slots.data_ptr(),
            self.starts.data_ptr(),
            None if self.mask is None else self.mask.data_ptr(),
            None,
            None,
            queries.stride()[:3],
            keys.stride()[:3],
            values.stride()[:3],
            cached[0].stride(0),
            cached[0].stride(1),
            batch,
            keys.shape[1],
            heads // keys.shape[1],
            tokens,
            dim,
            self.behind,
            dim**-0.5,
        )
        loaded = library()
        assert loaded is not None
        half = queries.dtype is torch.bfloat16
        loaded.speculant_attend(ctypes.byref(call), int(half), torch.get_num_threads())
        return out.to(queries.dtype).transpose(1, 2)


def can_attend(dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """True when the compiled attention is here and computes this."""
    fits = device.type == "cpu" and dtype in DTYPES and dim % LANES == 0 and dim <= 8 * LANES
    return fits and library() is not None
