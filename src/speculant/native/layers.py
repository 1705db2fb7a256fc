"""Whole decoder layers of few rows, in the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Attention
from .library import library
from .linear import FORMATS, LANES, PackedLinear

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """Packed weights; calls.h has the same struct, and those below."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "scales", "minima", "bias")),
        *((name, INT) for name in ("format", "inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
        ("beside_norm", POINTER),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
    )


class Model(ctypes.Structure):
    """Layers and their sizes."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, INT) for name in ("count", "hidden", "heads", "kv_heads", "dim", "middle")),
        ("eps", ctypes.c_float),
    )


class Pass(ctypes.Structure):
    """One forward of them."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "beside", "cos", "sin", "keys", "values", "taps")),
        *((name, POINTER) for name in ("slots", "starts", "mask", "firsts", "counts")),
        *((name, INT) for name in ("rows", "batch", "tokens", "behind", "layer_stride")),
        *((name, INT) for name in ("row_stride", "head_stride", "threads")),
    )


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norms [H] or [D] in float32, packed matrices.

    beside_norm: [H] of an EAGLE layer, whose QKV reads [norm(beside) ; norm(hidden)]
    """

    input_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    beside_norm: Tensor | None = None


class Layers:
    """The decoder's layers in one call. Sizes: hidden and middle are multiples of 16.

    middle: width of the MLP; eps: of every norm
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        heads: int,
        kv_heads: int,
        dim: int,
        middle: int,
        eps: float,
    ) -> None:
        self.weights = tuple(layers)  # keeps what the pointers below point to
        self.hidden, self.half = len(layers[0].input_norm), dim // 2
        array = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        sizes = (len(layers), self.hidden, heads, kv_heads, dim, middle)
        self.model = Model(array, *sizes, eps)

    def __call__(
        self,
        hidden: Tensor,
        angles: Tensor,
        cache: Tensor,
        reading: Attention,
        taps: Sequence[int],
        beside: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Mapping[int, Tensor]:
        """Run all layers over hidden [B, T, H], in place; the states [B, T, H] that enter `taps`.

        angles: [B, T, D / 2] of the rotary embedding; cache: `KVCache.data`, float32
        beside: [B, T, H] float32, for layers with a `beside_norm`
        counts: tokens of each row, at most T of the mask: all of [B, T, ...] above are then
                [sum of counts, ...], one row behind the other
        """
        rows, batch = hidden.numel() // self.hidden, len(reading.starts)
        tokens, firsts, lengths = rows // batch, None, None
        if counts is not None:
            lengths = torch.tensor(counts)
            firsts = lengths.cumsum(0) - lengths
            tokens = reading.width
        cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
        tapped = {tap: torch.empty_like(hidden) for tap in taps}
        count = len(self.weights)
        pointers = (POINTER * (count + 1))()  # null
        for tap, state in tapped.items():
            pointers[tap] = state.data_ptr()
        call = Pass(
            hidden.data_ptr(),
            address(beside),
            cos.data_ptr(),
            sin.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            ctypes.cast(pointers, POINTER),
            reading.slots.data_ptr(),
            reading.starts.data_ptr(),
            address(reading.mask),
            address(firsts),
            address(lengths),
            rows,
            batch,
            tokens,
            reading.behind,
            cache.stride(1),
            cache.stride(2),
            cache.stride(3),
            torch.get_num_threads(),
        )
        loaded = library()
        assert loaded is not None
        loaded.speculant_layers(ctypes.byref(self.model), ctypes.byref(call))
        return tapped


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square, times weight [H]; in float32, of x's precision.

    torch's own takes 0.1 ms for one row, as long as three layers of a small model.
    """
    plain = x.dtype is weight.dtype is torch.float32 and x.device.type == "cpu"
    loaded = library() if plain and not torch.is_grad_enabled() else None
    if loaded is None:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    rows = INT(x.numel() // size)
    parts = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    loaded.speculant_norm(*map(POINTER, parts), rows, INT(size), ctypes.c_float(eps))
    return out


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax of logits [B, T, V], ties to the lowest id, and where it means something: [B, T] each.

    Nothing where a position holds NaN or +inf, or forbids every token; one reduction tells: the
    maximum is NaN or +inf iff one of the logits is, and -inf iff all of them are. torch's own takes
    five times as long.
    """
    rows, columns, count = logits.shape
    even = logits.stride(2) == 1 and (rows == 1 or logits.stride(0) == columns * logits.stride(1))
    plain = logits.dtype is torch.float32 and logits.device.type == "cpu"
    loaded = library() if plain and even else None
    if loaded is None:
        best, ids = logits.max(dim=-1)
        return ids, best.isfinite()
    ids = torch.empty(rows, columns, dtype=torch.int64)
    sizes = map(INT, (rows * columns, logits.stride(1), count))
    parts = (POINTER(logits.data_ptr()), *sizes, POINTER(ids.data_ptr()))
    loaded.speculant_likeliest(*parts, torch.get_num_threads())
    return ids.clamp(min=0), ids >= 0


def fits(hidden: int, middle: int) -> bool:
    """True for sizes that need no padding between matrices."""
    return hidden % LANES == 0 and middle % LANES == 0


def _layer(layer: LayerWeights) -> _Layer:
    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm, layer.beside_norm)
    return _Layer(*(address(norm) for norm in norms), *(matrix(m) for m in matrices))


def matrix(linear: PackedLinear) -> Matrix:
    """Where the library finds it. The pointers live as long as the linear layer does."""
    outputs, inputs = linear.shape
    parts = (linear.weight, linear.scales, linear.minima, linear.bias)
    width = (outputs + LANES - 1) // LANES * LANES
    return Matrix(*(address(p) for p in parts), FORMATS.index(linear.form), inputs, width)


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers lie; null for none."""
    return None if tensor is None else tensor.data_ptr()
