"""How many tokens to draft: the closed form for every length, and a simulation beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost import best_num_draft_tokens, expected_tokens, speedup, time_per_token
from .chains import Chain, token_rule
from .loop import measure
from .world import World

LONGEST = 1000
LONGEST_SIMULATED = 64
SAMPLES = (100, 1_000_000)


@dataclass(frozen=True)
class Length:
    """One draft length. Times are in plain forwards of the target.

    simulated: tokens a forward of a simulation and its standard error, when one was run
    """

    num_draft_tokens: int
    expected_tokens: float
    time_per_token: float
    speedup: float
    simulated: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out = {
            "num_draft_tokens": self.num_draft_tokens,
            "expected_tokens": self.expected_tokens,
            "time_per_token": self.time_per_token,
            "speedup": self.speedup,
        }
        if self.simulated:
            out |= {"simulated_tokens": self.simulated[0], "standard_error": self.simulated[1]}
        return out


@dataclass(frozen=True)
class Sweep:
    """Every length from 0 (no speculation) to the longest asked for."""

    alpha: float
    cost: float
    rows: tuple[Length, ...]
    best: Length

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "best_num_draft_tokens": self.best.num_draft_tokens,
            "best_speedup": self.best.speedup,
        }

    @property
    def advice(self) -> str:
        """One sentence on the optimum."""
        best, last = self.best, self.rows[-1].num_draft_tokens
        if best.num_draft_tokens == 0:
            if self.alpha > self.cost:
                return "Only plain decoding was asked for."
            return (
                f"Speculation does not pay: one more token gains at most alpha = {self.alpha:g} of "
                f"a token and costs {self.cost:g} of a forward."
            )
        text = f"Best: {best.num_draft_tokens} drafted tokens, {best.speedup:.2f}x."
        if best.num_draft_tokens < last:
            return text
        beyond = "there is no best length: longer is always better"
        if self.cost > 0 and self.alpha < 1:
            further = best_num_draft_tokens(self.alpha, self.cost, LONGEST)
            if further == last:
                return text
            gain = speedup(self.alpha, further, self.cost)
            more = " or more" if further == LONGEST else ""
            beyond = f"the formula's best is {further}{more}, {gain:.2f}x"
        return f"{text} That is the longest tried; {beyond}."


def sweep(alpha: float, cost: float, max_draft: int, samples: int = 0, seed: int = 0) -> Sweep:
    """Closed forms with a constant acceptance `alpha` and `cost` of a draft step per forward.

    samples: rounds to simulate for every length; 0 simulates none
    Raises ValueError for alpha outside 0..1, a negative or infinite cost, a length that is negative
    or above 1000.
    """
    if not 0 <= max_draft <= LONGEST:
        raise ValueError(f"the longest draft is {max_draft}: it lies in 0..{LONGEST}")
    if samples and not SAMPLES[0] <= samples <= SAMPLES[1]:
        raise ValueError(f"{samples} samples: give 0 for none, or {SAMPLES[0]} to {SAMPLES[1]}")
    if samples and max_draft > LONGEST_SIMULATED:
        raise ValueError(f"a simulation drafts at most {LONGEST_SIMULATED} tokens")
    rng = np.random.default_rng(seed)
    rows = tuple(
        Length(
            n,
            expected_tokens(alpha, n),
            time_per_token(alpha, n, cost),
            speedup(alpha, n, cost),
            _simulate(alpha, n, samples, rng) if samples else None,
        )
        for n in range(max_draft + 1)
    )
    return Sweep(alpha, cost, rows, rows[best_num_draft_tokens(alpha, cost, max_draft)])


def _simulate(
    alpha: float, num_draft_tokens: int, samples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Tokens per forward of the full loop in a world of this alpha, and its standard error."""
    strategy = Chain(num_draft_tokens, token_rule)
    found = measure(overlapping_world(alpha, rng), strategy, samples, rng)
    return found.tokens_per_forward, found.standard_error


def overlapping_world(alpha: float, rng: np.random.Generator, vocab: int = 16) -> World:
    """A context-free world whose sum of min(target, draft) is `alpha`.

    The draft is the target with weight alpha and, with the rest, tokens the target never emits.
    """
    half = vocab // 2
    target, wrong = np.zeros(vocab), np.zeros(vocab)
    target[:half] = rng.dirichlet(np.ones(half))
    wrong[half:] = rng.dirichlet(np.ones(vocab - half))
    draft = alpha * target + (1 - alpha) * wrong
    return World(target[None], draft[None, None])
