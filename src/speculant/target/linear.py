"""Linear layers for few rows.

Speculation lives from a forward of 8 rows that costs little more than one of a single row.
torch's `F.linear` does not give that on a CPU: SmolLM2's layers take 42 ms for one row and 66 ms
for eight on two cores. The same weights prepacked once for oneDNN take 25 and 29 ms, so on a CPU
the packed operator is used (and only the packed copy is kept); elsewhere `F.linear`.
"""

from __future__ import annotations

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
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self.weight, self.bias)
