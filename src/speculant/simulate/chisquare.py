"""Pearson's chi-square test, with the distribution's tail computed here (scipy is not needed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .draws import Floats, Ints

SIGNIFICANCE = 1e-3  # share of lossless samples that fail a test by chance
SMALLEST = 5.0  # expected count of a cell below which it is pooled
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Verdict:
    """One test. It passes while chi_square stays at or below critical_value."""

    chi_square: float
    degrees_of_freedom: int
    critical_value: float
    p_value: float
    passed: bool
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def goodness_of_fit(observed: Ints, probs: Floats, significance: float = SIGNIFICANCE) -> Verdict:
    """Counts [G, V] against probabilities [G, V], given each group's total.

    For the transitions of a Markov chain (groups: states) the statistic has the chi-square
    distribution with the sum of (cells - 1) degrees of freedom (Billingsley 1961, "Statistical
    methods in Markov chains", theorem 3.1). Cells that expect fewer than 5 are pooled within their
    group. Raises ValueError when a token of probability 0 was seen: no statistic is needed then.
    """
    if (observed[probs <= 0] > 0).any():
        raise ValueError("a token of target probability 0 was emitted")
    expected = probs * observed.sum(axis=1, keepdims=True)
    (seen,), want = _pooled([observed], expected)
    statistic = ((seen - want) ** 2 / np.where(want > 0, want, 1.0)).sum()
    return _verdict(float(statistic), want, int(observed.sum()), significance)


def homogeneity(first: Ints, second: Ints, significance: float = SIGNIFICANCE) -> Verdict:
    """Two samples' counts [G, V] each: do they come from one distribution in every group?"""
    totals = np.stack([first.sum(axis=1), second.sum(axis=1)])  # shape: [2, G]
    shares = totals / np.maximum(totals.sum(axis=0), 1)
    sides, want = _pooled([first, second], (first + second) * shares.min(axis=0)[:, None])
    statistic = 0.0
    for side, share in zip(sides, shares, strict=True):
        expected = np.where(want > 0, (sides[0] + sides[1]) * share[:, None], 1.0)
        statistic += float(((side - expected) ** 2 / expected)[want > 0].sum())
    return _verdict(statistic, want, int(totals.sum()), significance)


def _pooled(seen: Sequence[Ints], want: Floats) -> tuple[list[Floats], Floats]:
    """Cells of counts [G, V] and expectations [G, V], as [G, V + 1]; 0 in a cell that is no more.

    Cells that expect fewer than 5 become one, the last, in their group; where even that expects
    fewer it joins the smallest of the others.
    """
    large = want >= SMALLEST
    rest = np.where(large, 0.0, want).sum(axis=1)
    joins = (rest < SMALLEST) & large.any(axis=1)
    place = np.where(joins, np.where(large, want, np.inf).argmin(axis=1), want.shape[1])
    groups, out = np.arange(len(want)), []
    for cells in (*seen, want):
        kept = np.zeros((len(want), want.shape[1] + 1))
        kept[:, :-1] = np.where(large, cells, 0.0)
        kept[groups, place] += np.where(large, 0, cells).sum(axis=1)
        out.append(kept)
    return out[:-1], out[-1]


def _verdict(statistic: float, want: Floats, samples: int, significance: float) -> Verdict:
    """The verdict on cells that expect `want` [G, V + 1] each, 0 for no cell."""
    freedom = int(np.maximum((want > 0).sum(axis=1) - 1, 0).sum())
    if freedom < 1:
        raise ValueError(f"{samples} samples are too few for a chi-square: no cell expects 5")
    limit = critical_value(freedom, significance)
    p_value = survival(statistic, freedom)
    return Verdict(statistic, freedom, limit, p_value, p_value >= significance, samples)


def survival(statistic: float, freedom: int) -> float:
    """P(chi-square of `freedom` degrees > statistic): the regularised upper incomplete gamma Q.

    The series of P below a + 1, Lentz's continued fraction of Q above it (Abramowitz and Stegun
    6.5.29 and 6.5.31).
    """
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        return 1.0 - scale * _series(a, x)
    return scale * _fraction(a, x)


def _series(a: float, x: float) -> float:
    """Sum of x^k / (a (a + 1) .. (a + k)) over k."""
    term = total = 1 / a
    for k in range(1, MAX_STEPS):
        term *= x / (a + k)
        total += term
        if term < total * 1e-17:
            break
    return total


def _fraction(a: float, x: float) -> float:
    """1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / ...))."""
    b = x + 1 - a
    c, d = math.inf, 1 / b
    out = d
    for k in range(1, MAX_STEPS):
        numerator = -k * (k - a)
        b += 2
        d = 1 / (numerator * d + b)
        c = b + numerator / c
        change = c * d
        out *= change
        if abs(change - 1) < 1e-15:
            break
    return out


def critical_value(freedom: int, significance: float) -> float:
    """The statistic whose tail is `significance`: Newton's method on the tail, kept in a bracket."""
    if not 0 < significance < 1:
        raise ValueError(f"significance is {significance}: it lies between 0 and 1")
    low, high = 0.0, float(freedom)
    while survival(high, freedom) > significance:
        low, high = high, 2 * high
    x, half = (low + high) / 2, freedom / 2
    for _ in range(200):
        excess = survival(x, freedom) - significance
        low, high = (x, high) if excess > 0 else (low, x)
        log_density = (half - 1) * math.log(x / 2) - x / 2 - math.lgamma(half) - math.log(2)
        density = math.exp(log_density)
        after = x + excess / density if density > 0 else high
        if not low < after < high:
            after = (low + high) / 2
        if abs(after - x) <= 1e-13 * x:
            break
        x = after
    return x
