"""Trees of drafted tokens: sampled siblings, and chosen nodes of a fixed or a dynamic shape.

Nodes are verified from the root down, so only the children of the node that the walk is at decide
anything. Sampled children are therefore drawn when the walk gets to their parent: the nodes of
other branches cost a forward's rows, and are counted, but their tokens change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .chains import Round
from .draws import USED_UP, Floats, Ints
from .world import World, check_vocab

ROOT = 0  # row of the root in every table here; node i of a tree is row i + 1
NONE = -1
MOST_NODES = 256


def full_tree_nodes(shape: Sequence[int]) -> int:
    """Nodes of a full tree: 2, 2, 2 has 2 + 4 + 8."""
    return int(np.cumprod(np.array(shape, dtype=np.int64)).sum())


def check_shape(shape: Sequence[int], vocab: int) -> None:
    """Raise ValueError unless every width lies in 1..vocab and the tree has at most 256 nodes."""
    check_vocab(vocab)
    if not shape or not all(1 <= width <= vocab for width in shape):
        raise ValueError(f"tree shape {list(shape)}: every width must be in 1..{vocab}")
    if len(shape) > MOST_NODES or full_tree_nodes(shape) > MOST_NODES:
        raise ValueError(f"tree shape {list(shape)}: at most {MOST_NODES} nodes")


@dataclass(frozen=True)
class SampledTree:
    """`shape[d]` siblings below every node at depth d, drawn from the draft without replacement.

    At a node with residual r (at first the target) and draft q: accept sibling x with
    min(1, r(x) / q(x)) and descend; else r <- norm((r - q)+), take x out of q, renormalise, next.
    """

    shape: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Most tokens a round accepts."""
        return len(self.shape)

    @property
    def nodes(self) -> int:
        """Drafted tokens a round."""
        return full_tree_nodes(self.shape)

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """One round behind roots [B], given as states."""
        emitted = np.full((len(roots), self.depth + 1), -1)
        ranks = np.full((len(roots), self.depth), -1)
        walking, states = np.arange(len(roots)), roots  # rows still going down, and where they are
        for depth, width in enumerate(self.shape):
            tokens, rank = try_siblings(world, world.rows(depth, states), width, rng)
            emitted[walking, depth], ranks[walking, depth] = tokens, rank
            descended = rank >= 0
            walking, states = walking[descended], world.after(tokens[descended])
        emitted[walking, self.depth] = world.from_target.draw(states, rng.random(len(walking)))
        return Round((ranks >= 0).sum(axis=1), emitted, ranks)


def try_siblings(
    world: World, rows: Ints, width: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """The emitted token [B] at a node, and the rank [B] of the sibling it is; -1: recovered.

    rows: [B], each row's node, as in `World.rows`

    The residual stays of the form (p - a q)+ / m: with the tried tokens' share of q taken out, q is
    c q, and norm(((p - a q)+ / m - c q)+) = norm((p - (a + m c) q)+). At a tried token both sides
    are 0, since it was rejected: its residual was below c q.
    """
    tokens, ranks = np.full(len(rows), -1), np.full(len(rows), -1)
    left, row = np.arange(len(rows)), rows  # whose siblings were all rejected so far
    tried = np.empty((len(rows), 0), np.int64)
    a, mass, rest = np.zeros(len(rows)), np.ones(len(rows)), np.ones(len(rows))  # rest: 1 / c
    target, draft = world.target.ravel(), world.draft.ravel()
    for rank in range(width):
        uniforms = rng.random((2, len(row)))
        if rank == 0:
            x = world.from_draft.draw(row, uniforms[0])
        else:
            x = world.from_draft.draw_others(row, tried, uniforms[0])
        entry = row * world.vocab + x
        q = draft[entry]
        p = target[row % world.states * world.vocab + x]
        accept = uniforms[1] * q * mass < (p - a * q) * rest
        tokens[left[accept]], ranks[left[accept]] = x[accept], rank
        kept = (~accept).nonzero()[0]
        left, row, x, q = left[kept], row[kept], x[kept], q[kept]
        a = a[kept] + mass[kept] / rest[kept]
        if rank == width - 1 or not len(left):
            break
        rest = rest[kept] - q
        tried = np.concatenate([tried[kept], x[:, None]], axis=1)
        used_up = rest < USED_UP  # the draft has no other token: no further sibling in this row
        if used_up.any():
            ended = left[used_up]
            tokens[ended] = world.residuals.draw(row[used_up], a[used_up], rng.random(len(ended)))
            going = ~used_up
            left, row, tried, a, rest = left[going], row[going], tried[going], a[going], rest[going]
        mass = world.residuals.mass(row, a)[0]
    tokens[left] = world.residuals.draw(row, a, rng.random(len(left)))
    return tokens, ranks


@dataclass(frozen=True, eq=False)
class ChosenTree:
    """A tree for every root state, a function of the past alone: nothing in it was sampled.

    parents: [S, m] row of the parent of node i (row i + 1); ROOT or an earlier row
    tokens:  [S, m]; states: [S, m + 1], behind the root and every node
    child:   [S, m + 1, V], the row that a token leads to from a row, or NONE
    rank:    [S, m + 1], how many siblings of the row come before it
    """

    parents: Ints
    tokens: Ints
    states: Ints
    child: Ints
    rank: Ints
    depth: int

    @property
    def nodes(self) -> int:
        """Drafted tokens a round: m."""
        return int(self.tokens.shape[1])

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """Sample from the target and descend while the sample is a child (design, law 2)."""
        emitted = np.full((len(roots), self.depth + 1), -1)
        ranks = np.full((len(roots), self.depth), -1)
        walking, rows = np.arange(len(roots)), np.full(len(roots), ROOT)
        for depth in range(self.depth + 1):
            trees = roots[walking]
            tokens = world.from_target.draw(self.states[trees, rows], rng.random(len(walking)))
            emitted[walking, depth] = tokens
            below = self.child[trees, rows, tokens]
            found = below != NONE
            walking, rows = walking[found], below[found]
            if not len(walking):
                break
            ranks[walking, depth] = self.rank[roots[walking], rows]
        return Round((ranks >= 0).sum(axis=1), emitted, ranks)


def chosen_tree(world: World, parents: Ints, tokens: Ints) -> ChosenTree:
    """The tables of trees given by parents [S, m] (rows) and tokens [S, m]."""
    states, m = tokens.shape
    roots = np.arange(states)
    behind = np.concatenate([roots[:, None], world.after(tokens)], axis=1)
    child = np.full((states, m + 1, world.vocab), NONE)
    rank, depth = np.zeros((states, m + 1), np.int64), np.zeros((states, m + 1), np.int64)
    for i in range(m):
        above = parents[:, i]
        rank[:, i + 1] = (child[roots, above] != NONE).sum(axis=1)
        depth[:, i + 1] = depth[roots, above] + 1
        if (child[roots, above, tokens[:, i]] != NONE).any():
            raise ValueError("two children of one node hold the same token")
        child[roots, above, tokens[:, i]] = i + 1
    return ChosenTree(parents, tokens, behind, child, rank, int(depth.max(initial=0)))


def fixed_tree(world: World, shape: Sequence[int]) -> ChosenTree:
    """The `shape[d]` likeliest tokens of the draft below every node at depth d, breadth first."""
    check_shape(shape, world.vocab)
    frontier = np.arange(world.states)[:, None]  # states of the level above, shape: [S, nodes]
    above = np.full((world.states, 1), ROOT)  # their rows
    parents, tokens, made = [], [], 0
    for depth, width in enumerate(shape):
        ids = likeliest(world.draft[world.level(depth)], width)[
            frontier
        ]  # shape: [S, nodes, width]
        parents.append(above.repeat(width, axis=1))
        tokens.append(ids.reshape(world.states, -1))
        count = tokens[-1].shape[1]
        above = np.arange(made + 1, made + count + 1)[None].repeat(world.states, axis=0)
        made += count
        frontier = world.after(tokens[-1])
    return chosen_tree(world, np.concatenate(parents, axis=1), np.concatenate(tokens, axis=1))


def likeliest(probs: Floats, count: int) -> Ints:
    """Ids of the `count` largest of probs [..., V], in descending order, ties to the lowest id."""
    return np.argsort(-probs, axis=-1, kind="stable")[..., :count]
