"""What a head computes for one fixed input: the same numbers before an export and after it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..heads.eagle1 import Eagle1Head
from ..heads.eagle3 import Eagle3Head
from ..heads.layers import causal
from ..heads.medusa import MedusaHead
from ..heads.weights import Head

LENGTH = 5
NUMBERS = 16
TOLERANCE = 2e-4
"""Largest difference between two probes, of the largest number, that other machines explain."""


@torch.no_grad()
def probe(head: Head, dtype: torch.dtype) -> list[float]:
    """NUMBERS of a head's outputs for a fixed input, its weights rounded to `dtype` before.

    EAGLE-3's are logits; the others, which borrow the target's LM head, are judged by the states that
    go into it.
    """
    rounded = copy.deepcopy(head).to(dtype).float().eval()
    size = head.config.hidden_size
    embedded, positions = wave(1, LENGTH, size), torch.arange(LENGTH)[None]
    if isinstance(rounded, Eagle3Head):
        c = rounded.config
        hidden = rounded.fuse(wave(1, LENGTH, len(c.taps) * c.state_size, shift=0.5))
        out = rounded.logits(rounded(embedded, hidden, positions, causal))
    elif isinstance(rounded, Eagle1Head):
        out = rounded(embedded, wave(1, LENGTH, size, shift=0.5), positions, causal)
    elif isinstance(rounded, MedusaHead):
        out = rounded(embedded).flatten(-2)
    else:
        out = rounded(embedded, positions, causal)
    last = out[0, -1]
    mixed = wave(NUMBERS, len(last), shift=0.25) @ last / len(last) ** 0.5  # every output counts
    return [round(float(value), 6) for value in mixed]


def wave(*shape: int, shift: float = 0.0) -> Tensor:
    """Numbers that look random and are the same on every machine: a sine sampled too seldom."""
    count = int(torch.tensor(shape).prod())
    steps = torch.arange(count, dtype=torch.float64)
    return torch.sin(steps * (12.9898 + shift)).float().view(*shape)


def differs(mine: list[float], theirs: list[float]) -> bool:
    """True when two probes are not of the same function."""
    a, b = torch.tensor(mine), torch.tensor(theirs)
    if a.shape != b.shape:
        return True
    return float((a - b).abs().max()) > TOLERANCE * max(1e-6, float(a.abs().max()))
