"""A sampled chain and its two lossless rules, over B rows at once (docs/theory.md has the proofs).

A rule takes the drafted chain and uniforms and says how many tokens stand and which one follows:

states   [B, 1 + n]  state of the root, then behind each drafted token
tokens   [B, n]      the drafted chain
uniforms [B, n + 1]  in [0, 1); column i decides token i, column n draws the last token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .draws import Floats, Ints
from .world import World

TINY = 1e-300  # weights below it stand for it: their prefix stands with no more than that


@dataclass(frozen=True, eq=False)
class Round:
    """What one round of B rows commits.

    accepted: [B] drafted tokens that stand
    emitted:  [B, 1 + depth], those and the recovered or bonus token; what follows means nothing
    ranks:    [B, depth], which sibling was taken at every depth (0: the first tried), then -1;
              None where nodes have no siblings
    """

    accepted: Ints
    emitted: Ints
    ranks: Ints | None = None

    @property
    def last(self) -> Ints:
        """The recovered or bonus token [B]: the next root."""
        return self.emitted[np.arange(len(self.accepted)), self.accepted]


Rule = Callable[[World, Ints, Ints, Floats], tuple[Ints, Ints]]


@dataclass(frozen=True)
class Chain:
    """Draft `depth` tokens one after another, then verify them with `rule`."""

    depth: int
    rule: Rule

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError(f"a chain of {self.depth} tokens")

    @property
    def nodes(self) -> int:
        """Drafted tokens a round."""
        return self.depth

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """One round behind roots [B], given as states."""
        states, tokens = draft_chain(world, roots, rng.random((self.depth, len(roots))))
        uniforms = rng.random((self.depth + 1, len(roots))).T
        accepted, last = self.rule(world, states, tokens, uniforms)
        emitted = np.concatenate([tokens, last[:, None]], axis=1)
        emitted[np.arange(len(roots)), accepted] = last
        return Round(accepted, emitted)


def draft_chain(world: World, roots: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
    """States [B, 1 + n] and tokens [B, n] of chains behind roots [B], from uniforms [n, B]."""
    states, tokens = [roots], []
    for depth, column in enumerate(uniforms):
        tokens.append(world.from_draft.draw(world.rows(depth, states[-1]), column))
        states.append(world.after(tokens[-1]))
    drafted = np.stack(tokens, axis=1) if tokens else np.empty((len(roots), 0), np.int64)
    return np.stack(states, axis=1), drafted


def token_rule(world: World, states: Ints, tokens: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
    """Accept x with min(1, p(x) / q(x)) until the first rejection (Leviathan et al. 2023, alg. 1)."""
    count, n = tokens.shape
    levels = np.minimum(np.arange(n), len(world.draft) - 1)
    rows = states[:, :n] + levels * world.states
    stands = uniforms[:, :n] < world.ratio[rows * world.vocab + tokens]
    accepted = np.where(stands.all(axis=1), n, stands.argmin(axis=1)) if n else _none(count)
    cut = accepted < n
    last = _bonus(world, states, cut, uniforms)
    state = states[np.arange(count), accepted][cut]
    row = state + world.states * np.minimum(accepted[cut], len(world.draft) - 1)
    last[cut] = world.from_residual.invert(row, uniforms[cut, n])
    return accepted, last


def block_rule(world: World, states: Ints, tokens: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
    """Verify the chain jointly (Sun et al. 2024, arXiv 2403.10444, alg. 2).

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)); prefix i stands with s_i / (s_i + 1 - w_i),
    s_i = sum (w_i p - q)+, and the whole with w_n; the longest that stands is kept, and the next
    token comes from the residual (w_i p - q)+ = w_i (p - q / w_i)+.
    """
    count, n = tokens.shape
    weights = [np.ones(count)]  # w_0 .. w_n, each [B]
    for i in range(n):
        ratio = world.ratio[world.rows(i, states[:, i]) * world.vocab + tokens[:, i]]
        weights.append(np.minimum(weights[-1] * ratio, 1.0))
    accepted, kept = _none(count), np.ones(count)
    falling = np.arange(count)  # rows of which no prefix longer than i stands
    for i in range(n, 0, -1):
        weight = stands = weights[i][falling]
        if i < n:
            rows = world.rows(i, states[falling, i])
            spare = weight * world.residuals.mass(rows, 1 / np.maximum(weight, TINY))[0]  # s_i
            share = spare + 1 - weight
            # s = 0 with w = 1: the two distributions agree here, so the prefix stands
            stands = np.where(share > 0, spare / np.where(share > 0, share, 1.0), 1.0)
        stood = uniforms[falling, i - 1] < stands
        accepted[falling[stood]] = i
        kept[falling[stood]] = weight[stood]
        falling = falling[~stood]
    cut = accepted < n
    last = _bonus(world, states, cut, uniforms)
    state = states[np.arange(count), accepted][cut]
    row = state + world.states * np.minimum(accepted[cut], len(world.draft) - 1)
    weight, column = kept[cut], uniforms[cut, n]
    recovered = world.from_residual.invert(row, column)
    less = weight < 1
    recovered[less] = world.residuals.draw(row[less], 1 / weight[less], column[less])
    last[cut] = recovered
    return accepted, last


def _bonus(world: World, states: Ints, cut: NDArray[np.bool_], uniforms: Floats) -> Ints:
    """Last tokens [B]: the target's own where the whole chain stands, the others yet to be set."""
    last = _none(len(states))
    last[~cut] = world.from_target.draw(states[~cut, -1], uniforms[~cut, -1])
    return last


def _none(count: int) -> Ints:
    return np.zeros(count, np.int64)
