"""What theory says: expected tokens, acceptance per position and per leaf, without any sampling.

At a node in state s let `A[s, y]` be the probability that a drafted child with token y is accepted.
For one sampled child A = min(p, q). Whatever the rule, the token emitted at the node has the
target's distribution, so `p - A` is the probability of stopping there with y. From the A of every
depth follow the distribution of where rounds start in the long run, and every figure of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .draws import Floats, residual
from .trees import NONE, ROOT, ChosenTree
from .world import World, stationary

MOST = 4_000_000  # probabilities held at once while siblings are enumerated


@dataclass(frozen=True, eq=False)
class Expected:
    """Long-run figures of a strategy.

    starts:       [S] how often rounds start in each state
    acceptance:   [depth] unconditional acceptance per position
    leaves:       [leaves] probability that the path to a leaf is accepted whole
    """

    starts: Floats
    acceptance: Floats
    leaves: Floats

    @property
    def tokens_per_forward(self) -> float:
        """1 + the acceptance of all positions."""
        return 1.0 + float(self.acceptance.sum())


def sampled(world: World, shape: Sequence[int]) -> Expected | None:
    """A tree of sampled siblings under the token rule; widths of 1 are a chain.

    None where the siblings are too many to enumerate.
    """
    if any(world.states * world.vocab**width > MOST for width in shape):
        return None
    steps = [accept_ranks(world, depth, width) for depth, width in enumerate(shape)]
    reach = np.eye(world.states)  # [S, S'], P(the walk reaches this depth in S' | root S)
    survive, moves = [], np.zeros((world.states, world.states))
    for ranks in steps:
        accept = ranks.sum(axis=0)  # A, shape: [S, V]
        moves += world.to_states(reach @ (world.target - accept))
        reach = world.to_states(reach @ accept)
        survive.append(reach.sum(axis=1))
    starts = stationary(moves + world.to_states(reach @ world.target))
    paths = starts[None]  # [paths, S]
    for ranks in steps:
        below = world.to_states(np.einsum("ps,wsv->pwv", paths, ranks))
        paths = below.reshape(-1, world.states)
    acceptance = np.array([float(starts @ row) for row in survive])
    return Expected(starts, acceptance, paths.sum(axis=1))


def accept_ranks(world: World, depth: int, width: int) -> Floats:
    """[width, S, V]: probability that the sibling of each rank is accepted and is token y."""
    found = np.zeros((width, world.states, world.vocab))
    r, q = world.target, world.draft[world.level(depth)]
    weights, states = np.ones(world.states), np.arange(world.states)
    for rank in range(width):
        np.add.at(found[rank], states, weights[:, None] * np.minimum(r, q))
        rejected = (weights[:, None] * np.maximum(q - r, 0.0)).ravel()  # of every token tried
        if rank == width - 1:
            break
        case, token = np.divmod((rejected > 0).nonzero()[0], world.vocab)
        r, q = residual(r, q)[case], q[case]
        q[np.arange(len(case)), token] = 0.0
        mass = q.sum(axis=1, keepdims=True)
        q = q / np.where(mass > 0, mass, 1.0)
        weights, states = rejected[rejected > 0], states[case]
    return found


def chosen(world: World, tree: ChosenTree) -> Expected:
    """A tree of chosen nodes: the walk reaches a node with the target's probability of its path."""
    states, m = tree.tokens.shape
    at = np.arange(states)
    reach = np.zeros((states, m + 1))
    depth = np.zeros((states, m + 1), np.int64)
    reach[:, ROOT] = 1.0
    moves = np.zeros((states, world.vocab))
    for row in range(m + 1):
        if row != ROOT:
            above, token = tree.parents[:, row - 1], tree.tokens[:, row - 1]
            reach[:, row] = reach[at, above] * world.target[tree.states[at, above], token]
            depth[:, row] = depth[at, above] + 1
        stop = np.where(tree.child[:, row] == NONE, world.target[tree.states[:, row]], 0.0)
        moves += reach[:, row, None] * stop
    starts = stationary(world.to_states(moves))
    weighted = starts[:, None] * reach
    acceptance = [float(weighted[depth == d].sum()) for d in range(1, tree.depth + 1)]
    leaves = (tree.child == NONE).all(axis=2)
    same = (leaves == leaves[:1]).all()  # a fixed shape has the same leaves behind every root
    by_leaf = weighted.sum(axis=0)[leaves[0]] if same else np.empty(0)
    return Expected(starts, np.array(acceptance), by_leaf)
