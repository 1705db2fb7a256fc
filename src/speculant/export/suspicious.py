"""Does a tensor look trained? Zeros, and matrices of nothing but random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 32
"""Rows and columns under which the statistics of random numbers say too little."""
ROWS = 8192  # of a large table that are looked at


def all_zero(tensor: Tensor) -> bool:
    """True for a tensor of zeros."""
    return not bool(tensor.any())


def looks_random(weight: Tensor) -> bool:
    """True for a matrix that cannot be told from independent random numbers, as a fresh one is.

    Two things tell training: its singular values reach beyond the edge of a random matrix's,
    std * (sqrt(rows) + sqrt(columns)) (Marchenko and Pastur 1967), and its numbers are spread neither
    evenly nor normally. Both must be missing. The matrices of the heads that ship here have kurtosis
    3.0 and more, and reach up to 14 times the edge.
    """
    if weight.ndim != 2 or min(weight.shape) < LEAST:
        return False
    matrix = weight[:ROWS].float()
    matrix = matrix - matrix.mean()
    std = float(matrix.std())
    if std == 0:
        return False
    kurtosis = float((matrix / std).pow(4).mean())
    slack = 0.03 + 4 * (24 / matrix.numel()) ** 0.5
    if min(abs(kurtosis - shape) for shape in (1.8, 3.0)) > slack:
        return False
    edge = std * (matrix.shape[0] ** 0.5 + matrix.shape[1] ** 0.5)
    return bool(largest_singular(matrix) < 1.06 * edge)


def largest_singular(matrix: Tensor, steps: int = 20) -> float:
    """The largest singular value of [rows, columns], by power iteration: from below."""
    vector = torch.sin(torch.arange(matrix.shape[1], dtype=torch.float64) * 12.9898).to(matrix)
    for _ in range(steps):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=1e-30)
    return float((matrix @ vector).norm())
