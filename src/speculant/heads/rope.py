"""Rotary position embedding: the plain one, and the two scalings that published heads are trained with.

A head reads positions as its target does: one of Llama 3.1 is trained with that model's `llama3`
scaling (Dubey et al. 2024, arXiv 2407.21783, released with the weights), others with `linear` (Chen et
al. 2023, arXiv 2306.15595). Run with the plain one it accepts less, the further into a text the less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Type of a scaling -> its numbers, all positive."""


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise ValueError for a scaling that is neither empty nor one of SCALINGS with its numbers."""
    if not scaling:
        return
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ValueError(f"rope_scaling is of type {kind!r}: known are {known} and the plain one")
    if set(scaling) != {"rope_type", *SCALINGS[kind]}:
        raise ValueError(f"rope_scaling of type {kind} has {', '.join(SCALINGS[kind])}")
    for name in SCALINGS[kind]:
        value = scaling[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"rope_scaling.{name} is {value!r}: it must be a positive number")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError("rope_scaling.high_freq_factor must be above low_freq_factor")


def rotary(
    positions: Tensor, dim: int, theta: float, dtype: torch.dtype, scaling: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, D] for positions [B, T]; scaling: {} for the plain one."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
    if scaling:
        angles = positions[..., None].float() * frequencies(theta ** -(steps / dim), scaling)
    else:
        angles = positions[..., None].float() / theta ** (steps / dim)  # shape: [B, T, D / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Frequencies [D / 2], in radians a position, under a scaling.

    linear: all of them slowed by `factor`. llama3: those that turn `high_freq_factor` times and more
    within the original context stay, those that turn `low_freq_factor` times and less are slowed,
    and in between the share of each changes linearly with the number of turns.
    """
    slow: Tensor = plain / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = plain * scaling["original_max_position_embeddings"] / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(slow, plain, kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, D], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
