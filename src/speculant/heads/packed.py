"""A head for drafting: its linear layers packed for few rows, its weights in bfloat16.

A draft step is bound by reading the head's weights, and what a draft proposes need not be exact to
the last bit: the target verifies it. Heads are stored in bfloat16, so that packing one from its file
rounds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..native.linear import PackedLinear, can_pack


class Packed(nn.Module):
    """Stands where an `nn.Linear` stood. It is run, not trained or saved.

    weight: empty; it tells the precision and the device of what goes in and comes out
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.linear = PackedLinear(linear.weight.detach().to(dtype), bias)
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.linear(x).to(self.weight.dtype)


def pack(head: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The head with its linear layers packed, in place, where the compiled library is here.

    Drafting keeps no graph: the packed layers take no gradient.
    """
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and can_pack(
                child.in_features, "bfloat16", child.weight.device
            ):
                setattr(module, name, Packed(child, dtype))
    return head
