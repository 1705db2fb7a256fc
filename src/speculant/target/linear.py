"""Linear layers and embedding look-ups for few rows.

Speculation lives from a forward of 8 rows that costs little more than one of a single row.
torch's `F.linear` does not give that on a CPU: SmolLM2's matrices take 42 ms for one row, 66 ms
for eight on two cores. The same weights prepacked once for oneDNN take 25 and 29 ms, so on a CPU
the packed operator is used (and only the packed copy is kept); elsewhere `F.linear`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

PACK_ROWS = 16
"""Row count the packed layout is chosen for; measured best over 1 to 64 rows."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True when oneDNN's packed linear exists here for this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Linear:
    """y = x W^T + b, with W [out, in] packed where the machine has a packed operator."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = can_pack(weight.dtype, weight.device)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        elif weight.device.type == "cpu":
            weight = weight.clone()  # it may be a view of a mapped file
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self.weight, self.bias)


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
