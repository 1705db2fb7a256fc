"""A draft that is moved away from its target, step by step: alpha, and tokens per forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost import expected_tokens
from .chains import Chain, block_rule, token_rule
from .exact import sampled
from .loop import mean_and_error, measure
from .world import World, make_world

LEVELS = 16  # depths at which the draft may differ
LONGEST = 64
ROUNDS = (100, 1_000_000)
EXACT = 1e-9  # standard error below which simulation and theory must simply be equal


@dataclass(frozen=True)
class Cell:
    """One draft length at one distance: tokens per forward.

    exact:          of the token rule, from the world's own probabilities
    constant_alpha: the textbook's (1 - alpha^(N+1)) / (1 - alpha)
    block:          of block verification, simulated
    """

    num_draft_tokens: int
    simulated: float
    standard_error: float
    exact: float
    constant_alpha: float
    block: float
    block_error: float

    @property
    def deviation(self) -> float:
        """Simulated minus exact, in standard errors."""
        gap = self.simulated - self.exact
        return gap / self.standard_error if self.standard_error > EXACT else gap / EXACT


@dataclass(frozen=True)
class Distance:
    """One step of the perturbation; alpha_error is the standard error of alpha_measured."""

    noise: float
    alpha: float
    alpha_measured: float
    alpha_error: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Quality:
    """The steps, in the order asked for."""

    world: str
    rounds: int
    steps: tuple[Distance, ...]

    @property
    def largest_deviation(self) -> float:
        """Of all cells, in standard errors."""
        return max(abs(cell.deviation) for step in self.steps for cell in step.cells)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = [
            {
                "noise": step.noise,
                "alpha": step.alpha,
                "alpha_measured": step.alpha_measured,
                "alpha_error": step.alpha_error,
                "rows": [vars(cell) | {"deviation": cell.deviation} for cell in step.cells],
            }
            for step in self.steps
        ]
        return {
            "world": self.world,
            "rounds": self.rounds,
            "steps": steps,
            "largest_deviation": self.largest_deviation,
        }


def degrade(
    kind: str,
    noises: Sequence[float],
    lengths: Sequence[int],
    rounds: int = 5000,
    seed: int = 0,
    vocab: int = 32,
    drift: float = 0.25,
    sharpness: float = 2.0,
) -> Quality:
    """Measure every length at every noise. All steps share one target and one direction of error.

    rounds: simulated for each cell and rule
    """
    if not ROUNDS[0] <= rounds <= ROUNDS[1]:
        raise ValueError(f"{rounds} rounds: give {ROUNDS[0]} to {ROUNDS[1]}")
    if not noises or not lengths:
        raise ValueError("give at least one noise and one draft length")
    if not all(1 <= n <= LONGEST for n in lengths):
        raise ValueError(f"draft lengths {list(lengths)}: each lies in 1..{LONGEST}")
    steps = []
    for noise in noises:
        rng = np.random.default_rng(seed)  # anew: the same world but for the noise
        depths = min(max(lengths), LEVELS)
        world = make_world(kind, vocab, noise, rng, drift, depths, sharpness)
        measured, error = measure_alpha(world, rounds, rng)
        cells = tuple(_cell(world, n, rounds, rng) for n in lengths)
        steps.append(Distance(noise, world.alpha, measured, error, cells))
    return Quality(kind, rounds, tuple(steps))


def measure_alpha(world: World, samples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Share of single drafted tokens accepted behind the target's own text, and its error."""
    states = rng.choice(world.states, size=samples, p=world.stationary)
    tokens = world.from_draft.draw(states, rng.random(samples))  # level 0
    accepted = rng.random(samples) < world.ratio[states * world.vocab + tokens]
    return mean_and_error(accepted.astype(float))


def _cell(world: World, length: int, rounds: int, rng: np.random.Generator) -> Cell:
    exact = sampled(world, [1] * length)
    assert exact is not None  # single children are few enough to enumerate in any world
    token = measure(world, Chain(length, token_rule), rounds, rng, exact.starts)
    block = measure(world, Chain(length, block_rule), rounds, rng)
    return Cell(
        length,
        token.tokens_per_forward,
        token.standard_error,
        exact.tokens_per_forward,
        expected_tokens(world.alpha, length),
        block.tokens_per_forward,
        block.standard_error,
    )
