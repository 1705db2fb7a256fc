"""Verdicts with their numbers, and the chi-square test behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SIGNIFICANCE = 1e-3
"""p-value under which a check fails: one false alarm in a thousand honest runs of other seeds."""


@dataclass(frozen=True)
class Check:
    """One verdict with its numbers."""

    name: str
    passed: bool
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All verdicts on a pair."""

    target: str
    draft: str
    checks: list[Check]
    silent: bool = False  # the draft proposed nothing behind any prompt: little was tested

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [{"name": c.name, "passed": c.passed, **c.numbers} for c in self.checks]
        return {
            "target": self.target,
            "draft": self.draft,
            "passed": self.passed,
            "silent": self.silent,
            "checks": checks,
        }

    def render(self) -> str:
        """A table for people."""
        lines = [f"{self.target} with {self.draft}"]
        for c in self.checks:
            lines.append(f"  {'pass' if c.passed else 'FAIL'}  {c.name:<13} {c.detail}")
        verdict = (
            "lossless on this machine" if self.passed else "NOT lossless: do not use this pair"
        )
        if self.silent:
            lines.append("  note  the draft proposed nothing behind the prompts of this check")
        return "\n".join([*lines, f"verdict: {verdict}"])


def chi_square(name: str, observed: Tensor, probs: Tensor) -> Check:
    """Pearson's test; cells expecting fewer than 5 are pooled, a token of probability 0 fails."""
    total = float(observed.sum())
    expected = probs * total
    impossible = int(observed[probs <= 0].sum())
    small = expected < 5
    seen = torch.cat([observed[~small], observed[small].sum()[None]])
    want = torch.cat([expected[~small], expected[small].sum()[None]])
    seen, want = seen[want > 0], want[want > 0]
    statistic = float(((seen - want) ** 2 / want).sum())
    freedom = max(len(want) - 1, 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    passed = p_value >= SIGNIFICANCE and not impossible
    detail = (
        f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {p_value:.3g} "
        f"({total:.0f} samples; fails below {SIGNIFICANCE:g})"
    )
    if impossible:
        detail += f"; {impossible} tokens of probability 0"
    numbers = {
        "chi_square": statistic, "degrees_of_freedom": freedom, "p_value": p_value,
        "samples": int(total), "impossible": impossible,
    }  # fmt: skip
    return Check(name, passed, detail, numbers)
