"""Rounds over many rows at once: whole texts, or counters with their Monte-Carlo error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..metrics import Counters
from .chains import Round
from .draws import Floats, Ints
from .world import World

BURN_IN = 12  # rounds before counting, so that round starts have their long-run distribution
ROWS = 1000


class Strategy(Protocol):
    """How a round drafts and verifies."""

    @property
    def depth(self) -> int:
        """Most tokens a round accepts."""

    @property
    def nodes(self) -> int:
        """Drafted tokens a round."""

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """One round behind roots [B], given as states."""


@dataclass(frozen=True)
class Direct:
    """No draft: one token a forward, from the target."""

    depth: int = 0
    nodes: int = 0

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """One token behind roots [B], given as states."""
        tokens = world.from_target.draw(roots, rng.random(len(roots)))
        none = np.zeros(len(roots), np.int64)
        return Round(none, tokens[:, None])


def write(
    world: World, strategy: Strategy, starts: Ints, length: int, rng: np.random.Generator
) -> tuple[Ints, int]:
    """Texts [B, length] behind starts [B] (states), and the forwards of the target they took.

    Rows that are done leave the batch. What a row commits past `length` is cut off, at a position
    fixed beforehand, so the cut does not look at any token.
    """
    room = length + strategy.depth
    texts = np.empty((len(starts), room + 1), np.int64)
    flat, first = texts.reshape(-1), np.arange(len(starts)) * (room + 1)
    active, states = np.arange(len(starts)), starts
    filled, forwards = np.zeros(len(starts), np.int64), 0
    columns = np.arange(strategy.depth + 1)
    while len(active):
        played = strategy.play(world, states, rng)
        forwards += len(active)
        # what follows the last token of the round is overwritten by the next one
        flat[(first + filled)[active][:, None] + columns] = played.emitted
        filled[active] += played.accepted + 1
        going = filled[active] < length
        active, states = active[going], world.after(played.last[going])
    return texts[:, :length], forwards


@dataclass(frozen=True, eq=False)
class Measured:
    """Long-run figures of one strategy.

    standard_error: of counters.tokens_per_forward, from rows that know nothing of each other
    leaf_counts:    how often every path of ranks was accepted whole, when asked for
    """

    counters: Counters
    standard_error: float
    leaf_counts: Ints | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Committed tokens per target forward."""
        return self.counters.tokens_per_forward


def measure(
    world: World,
    strategy: Strategy,
    rounds: int,
    rng: np.random.Generator,
    starts: Floats | None = None,
    shape: tuple[int, ...] | None = None,
) -> Measured:
    """At least `rounds` rounds over up to 1000 independent rows.

    starts: [S] how often rounds start in each state in the long run; without it a burn-in comes
            before the rounds that count
    shape:  widths of a full tree whose leaves are to be counted
    """
    if rounds < 2:
        raise ValueError(f"{rounds} rounds are too few to measure")
    rows = min(ROWS, rounds)
    each = -(-rounds // rows)
    burn_in = BURN_IN if starts is None else 0
    states = rng.choice(world.states, size=rows, p=world.stationary if starts is None else starts)
    histogram = np.zeros(strategy.depth + 1, np.int64)
    committed = np.zeros(rows, np.int64)
    leaves = None if shape is None else np.zeros(shape, np.int64)
    for number in range(burn_in + each):
        played = strategy.play(world, states, rng)
        states = world.after(played.last)
        if number < burn_in:
            continue
        histogram += np.bincount(played.accepted, minlength=strategy.depth + 1)
        committed += played.accepted + 1
        if leaves is not None and played.ranks is not None:
            whole = played.ranks[played.accepted == strategy.depth]
            np.add.at(leaves, tuple(whole.T), 1)
    error = float((committed / each).std(ddof=1) / np.sqrt(rows))
    counts = None if leaves is None else leaves.ravel()
    return Measured(counters_of(histogram, strategy.nodes), error, counts)


def counters_of(histogram: Ints, nodes: int) -> Counters:
    """Raw counters of rounds that all drafted `nodes` tokens, from how many accepted how many."""
    rounds, depth = int(histogram.sum()), len(histogram) - 1
    accepted = int(histogram @ np.arange(depth + 1))
    counters = Counters(target_forwards=rounds, num_emitted_tokens=rounds + accepted)
    if nodes:
        counters.num_drafts = rounds
        counters.num_draft_tokens = rounds * nodes
        counters.num_accepted_tokens = accepted
        counters.num_drafted_per_pos = [rounds] * depth
        reached = histogram[::-1].cumsum()[::-1]  # rounds that accepted at least i
        counters.num_accepted_tokens_per_pos = reached[1:].tolist()
        counters.accepted_length_histogram = histogram.tolist()
    return counters


def transitions(world: World, starts: Ints, texts: Ints) -> Ints:
    """Counts [S, V] of every token behind every state, over texts [B, L] that follow starts [B]."""
    before = np.concatenate([starts[:, None], world.after(texts[:, :-1])], axis=1)
    cells = before * world.vocab + texts
    counts = np.bincount(cells.ravel(), minlength=world.states * world.vocab)
    return counts.reshape(world.states, world.vocab)


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Mean of independent values [B] and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
