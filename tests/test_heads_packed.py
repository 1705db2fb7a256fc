"""Packed heads draft what the heads in their files do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from speculant.heads.layers import causal
from speculant.heads.packed import Packed, pack
from speculant.native.library import library
from test_heads import H, V, make


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa"])
def test_a_packed_head_computes_the_same(kind: str) -> None:
    """In float32 within rounding; in bfloat16 what the head with weights rounded so computes."""
    generator = torch.Generator().manual_seed(1)
    head = make(kind)
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(0.3)
    rounded = copy.deepcopy(head)
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.bfloat16().float()
    unembed = torch.randn(V, H, generator=generator)
    x, y = torch.randn(2, 2, 5, H, generator=generator)

    @torch.no_grad()
    def run(it: Any) -> torch.Tensor:
        if kind != "eagle3":
            it.bind(lambda h: h @ unembed.T)
        if kind == "medusa":
            return it.logits(x)
        positions = torch.arange(5).expand(2, -1)
        features = it.fuse(torch.cat([y, x], dim=-1)) if kind == "eagle3" else y
        return it.logits(it(x, features, positions, causal))

    plain, want = run(head), run(rounded)
    torch.testing.assert_close(run(pack(copy.deepcopy(head), torch.float32)), plain)
    packed = pack(head)
    there = any(isinstance(module, Packed) for module in packed.modules())
    assert there == (library() is not None)
    if there:
        assert not any(isinstance(module, nn.Linear) for module in packed.modules())
        torch.testing.assert_close(run(packed), want)
        assert next(packed.parameters()).dtype is torch.float32
