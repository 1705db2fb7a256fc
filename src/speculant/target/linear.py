"""Linear layers and embedding look-ups for few rows.

Speculation lives from a forward of 8 rows that costs little more than one of a single row.
torch's `F.linear` does not give that on a CPU. Our own kernel (`native/linear.cpp`) does, in every
weight format, and gives a row the same result alone and among others. It computes in float32; where
the model runs in bfloat16, or the library is not compiled, the weights are prepacked for oneDNN.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..native.linear import GROUP, PackedLinear, Quantised, can_pack, quantise, rounded

PACK_ROWS = 16
"""Row count that oneDNN's layout is chosen for; measured best over 1 to 64 rows."""
WEIGHTS = {
    "float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int4": "q4_1",
    "int8-a8": "q8_0", "int4-a8": "q4_1", "bfloat16-a16": "bfloat16",
}  # fmt: skip
"""What `weights` may be -> the format of the packed matrices. -a8: activations in int8 as well, -a16:
in bfloat16."""


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """True when oneDNN's packed linear exists here for this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Linear:
    """y = x W^T + b, with W [out, in] packed in the best way that this machine has for it."""

    def __init__(
        self, weight: Tensor | Quantised, bias: Tensor | None = None, weights: str = ""
    ) -> None:
        """weights: a key of WEIGHTS to round to; "" keeps the numbers as they are.

        A quantised `weight` is used as it is. With weights that end in -a8 inputs are rounded too
        (`native.linear.rounded`), where 32 divides their number; with -a16, to bfloat16. Without the
        library weights stay what they were rounded to, dequantised.
        """
        kind = torch.float32 if isinstance(weight, Quantised) else weight.dtype
        source = weight if isinstance(weight, Tensor) else weight.codes
        (self.out_features, self.in_features), device = source.shape, source.device
        form = weight.form if isinstance(weight, Quantised) else WEIGHTS.get(weights, "float32")
        self.bias = bias
        self.own: PackedLinear | None = None
        self.halves = weights.endswith("-a16")
        self.rounds = weights.endswith("-a8") and self.in_features % GROUP == 0
        whole = bool(weights) or kind is torch.float32
        if whole and can_pack(self.in_features, form, device):
            packed = _rounded(weight, form)
            self.own = PackedLinear(packed, bias, self.rounds or self.halves)
            return
        dense = _dense(_rounded(weight, form), kind) if whole else _dense(weight, kind)
        self.packed = can_prepack(kind, device)
        if self.packed:
            dense = torch.ops.mkldnn._reorder_linear_weight(dense.contiguous(), PACK_ROWS)
        elif device.type == "cpu":
            dense = dense.clone()  # it may be a view of a mapped file
        self.weight = dense

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weights reads."""
        return self.own.nbytes if self.own is not None else self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.own is not None:
            return self.own(x).to(x.dtype)
        if self.rounds:
            x = rounded(x).to(x.dtype)
        elif self.halves:
            x = x.to(torch.bfloat16).to(x.dtype)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self.weight, self.bias)


def _rounded(weight: Tensor | Quantised, form: str) -> Tensor | Quantised:
    if isinstance(weight, Quantised):
        return weight
    if form in ("float32", "bfloat16"):
        return weight.to(getattr(torch, form))
    return quantise(weight, form)


def _dense(weight: Tensor | Quantised, dtype: torch.dtype) -> Tensor:
    return (weight if isinstance(weight, Tensor) else weight.dequantised()).to(dtype)


class FileRows:
    """Rows of a table in a file, read when asked for.

    With a tied embedding the LM head holds the same numbers packed, so a second copy in memory
    would cost 113 MB for SmolLM2; a mapped file costs as much in the end, 64 kB a page fault.
    Reading a row costs 2 microseconds. The file stays open: deleting it does no harm.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.count, self.width = shape
        self.dtype, self.offset = dtype, offset
        self._file = path.open("rb", buffering=0)

    def read(self, ids: list[int]) -> Tensor:
        """Rows [len(ids), width]."""
        size = self.width * self.dtype.itemsize
        data = bytearray(size * len(ids))
        view = memoryview(data)
        for i, row in enumerate(ids):
            if not 0 <= row < self.count:
                raise IndexError(f"token id {row} is outside 0..{self.count - 1}")
            self._file.seek(self.offset + row * size)
            part = self._file.read(size)
            if len(part) != size:
                raise OSError(f"{self._file.name}: was cut short while in use: copy it anew")
            view[i * size : (i + 1) * size] = part
        return torch.frombuffer(data, dtype=self.dtype).view(len(ids), self.width)


class Embedding:
    """Token ids -> vectors, from a table in memory or, where `rows` is given, in a file."""

    def __init__(self, table: Tensor, rows: FileRows | None = None) -> None:
        self.table, self.rows = table, rows

    def __call__(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        if self.rows is None:
            return self.table[tokens]
        ids = tokens.reshape(-1).tolist()
        return self.rows.read(ids).view(*tokens.shape, -1) if ids else self.table[tokens]

    @property
    def numel(self) -> int:
        """Numbers in the table."""
        return self.rows.count * self.rows.width if self.rows else self.table.numel()
