"""Trees against chains of equal compute: the same number of drafted nodes in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from . import exact
from .chains import Chain, block_rule, token_rule
from .draws import Floats
from .dynamic import dynamic_tree
from .loop import Measured, Strategy, measure
from .trees import SampledTree, check_shape, fixed_tree, full_tree_nodes
from .world import make_world

LEVELS = 16  # depths at which the draft may differ
DEEP = 8  # levels that the dynamic tree may grow to, when the fixed one has fewer
ROUNDS = (100, 1_000_000)


@dataclass(frozen=True)
class Leaf:
    """A path from the root to a leaf: how often it is accepted whole.

    path:  which sibling at every depth, 1 is the first
    alpha: probability ** (1 / depth), the acceptance of one token along it
    """

    path: tuple[int, ...]
    probability: float
    exact: float | None
    alpha: float


@dataclass(frozen=True)
class Contender:
    """One way to spend the nodes. `exact` figures are theory's; None where it has no closed form."""

    name: str
    nodes: int
    depth: int
    measured: Measured
    expected: exact.Expected | None
    leaves: tuple[Leaf, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counters, known = self.measured.counters, self.expected
        return {
            "name": self.name,
            "nodes": self.nodes,
            "depth": self.depth,
            "tokens_per_forward": self.measured.tokens_per_forward,
            "standard_error": self.measured.standard_error,
            "exact": known and known.tokens_per_forward,
            "draft_acceptance_rate": counters.draft_acceptance_rate,
            "acceptance_per_position": counters.acceptance_per_position,
            "exact_acceptance_per_position": known and known.acceptance.tolist(),
            "conditional_acceptance_per_position": counters.conditional_acceptance_per_position,
            "leaves": [vars(leaf) for leaf in self.leaves],
        }


@dataclass(frozen=True)
class Comparison:
    """All contenders in one world."""

    world: str
    alpha: float
    shape: tuple[int, ...]
    contenders: tuple[Contender, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "world": self.world,
            "alpha": self.alpha,
            "shape": list(self.shape),
            "nodes": full_tree_nodes(self.shape),
            "contenders": [contender.as_dict() for contender in self.contenders],
            "best": max(self.contenders, key=lambda c: c.measured.tokens_per_forward).name,
        }


def compare(
    kind: str,
    shape: tuple[int, ...],
    rounds: int = 10_000,
    seed: int = 0,
    vocab: int = 32,
    noise: float = 1.0,
    drift: float = 0.25,
    sharpness: float = 2.0,
) -> Comparison:
    """Chains under both rules, and trees: sampled, chosen with a fixed shape, chosen dynamically."""
    if not ROUNDS[0] <= rounds <= ROUNDS[1]:
        raise ValueError(f"{rounds} rounds: give {ROUNDS[0]} to {ROUNDS[1]}")
    check_shape(shape, vocab)
    rng, nodes = np.random.default_rng(seed), full_tree_nodes(shape)
    world = make_world(kind, vocab, noise, rng, drift, min(nodes, LEVELS), sharpness)
    fixed = fixed_tree(world, shape)
    grown = dynamic_tree(world, nodes, *dynamic_size(nodes, shape, vocab))
    chain = exact.sampled(world, [1] * nodes)
    entries: list[tuple[str, Strategy, exact.Expected | None, tuple[int, ...] | None]] = [
        ("chain, token rule", Chain(nodes, token_rule), chain, None),
        ("chain, block rule", Chain(nodes, block_rule), None, None),
        ("sampled tree", SampledTree(shape), exact.sampled(world, shape), shape),
        ("chosen tree", fixed, exact.chosen(world, fixed), shape),
        ("dynamic tree", grown, exact.chosen(world, grown), None),
    ]
    contenders = []
    for name, strategy, expected, widths in entries:
        starts = None if expected is None else expected.starts
        found = measure(world, strategy, rounds, rng, starts, widths)
        leaves = _leaves(found, expected, widths)
        contenders.append(Contender(name, strategy.nodes, strategy.depth, found, expected, leaves))
    return Comparison(kind, world.alpha, shape, tuple(contenders))


def dynamic_size(nodes: int, shape: tuple[int, ...], vocab: int) -> tuple[int, int]:
    """Depth and branching of a dynamic tree that offers at least `nodes` candidates."""
    depth, branch = min(nodes, max(len(shape), DEEP)), max(shape)
    while branch + (depth - 1) * branch**2 < nodes:
        depth, branch = (depth, branch + 1) if branch < vocab else (depth + 1, branch)
    return depth, branch


def _leaves(
    found: Measured, expected: exact.Expected | None, shape: tuple[int, ...] | None
) -> tuple[Leaf, ...]:
    """Of a full tree, leaf by leaf."""
    if shape is None or found.leaf_counts is None:
        return ()
    rounds = found.counters.target_forwards
    known: Floats | None = None if expected is None else expected.leaves
    out = []
    for i, (path, count) in enumerate(
        zip(product(*map(range, shape)), found.leaf_counts.tolist(), strict=True)
    ):
        chance = count / rounds
        theory = None if known is None else float(known[i])
        alpha = chance ** (1 / len(shape))
        out.append(Leaf(tuple(rank + 1 for rank in path), chance, theory, alpha))
    return tuple(out)
