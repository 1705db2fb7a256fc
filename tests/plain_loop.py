"""Speculative decoding in plain Python, one token at a time: an independent truth for `simulate`.

Written from the rules' statements with lists and `random`; it shares no code with the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Row = Sequence[float]
Play = Callable[["PlainWorld", int, random.Random], list[int]]


class PlainWorld:
    """target[s][v], draft[d][s][v]; with several states the state is the last token."""

    def __init__(self, target: Sequence[Row], draft: Sequence[Sequence[Row]]) -> None:
        self.target, self.draft = target, draft

    def after(self, token: int) -> int:
        return token if len(self.target) > 1 else 0

    def p(self, state: int) -> Row:
        return self.target[state]

    def q(self, depth: int, state: int) -> Row:
        return self.draft[min(depth, len(self.draft) - 1)][state]


def pick(probs: Row, rng: random.Random) -> int:
    """A token by walking along the probabilities."""
    left = rng.random() * sum(probs)
    last = 0
    for token, chance in enumerate(probs):
        if chance > 0:
            last = token
            if left < chance:
                return token
        left -= chance
    return last


def spare(p: Row, q: Row, weight: float = 1.0) -> list[float]:
    return [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def token_round(world: PlainWorld, root: int, rng: random.Random, n: int) -> list[int]:
    states, drafted = [root], []
    for i in range(n):
        drafted.append(pick(world.q(i, states[-1]), rng))
        states.append(world.after(drafted[-1]))
    for i, x in enumerate(drafted):
        p, q = world.p(states[i]), world.q(i, states[i])
        if rng.random() >= p[x] / q[x]:
            return [*drafted[:i], pick(spare(p, q), rng)]
    return [*drafted, pick(world.p(states[n]), rng)]


def block_round(world: PlainWorld, root: int, rng: random.Random, n: int) -> list[int]:
    states, drafted, weights = [root], [], [1.0]
    for i in range(n):
        q = world.q(i, states[-1])
        x = pick(q, rng)
        weights.append(min(1.0, weights[-1] * world.p(states[-1])[x] / q[x]))
        drafted.append(x)
        states.append(world.after(x))
    kept = 0
    for i in range(1, n + 1):
        stands = weights[i]
        if i < n:
            mass = sum(spare(world.p(states[i]), world.q(i, states[i]), weights[i]))
            stands = mass / (mass + 1 - weights[i]) if mass + 1 - weights[i] > 0 else 1.0
        if rng.random() < stands:
            kept = i
    if kept == n:
        return [*drafted, pick(world.p(states[n]), rng)]
    left = spare(world.p(states[kept]), world.q(kept, states[kept]), weights[kept])
    return [*drafted[:kept], pick(left, rng)]


def tree_round(world: PlainWorld, root: int, rng: random.Random, shape: Sequence[int]) -> list[int]:
    out: list[int] = []
    state = root
    for depth, width in enumerate(shape):
        r, q = list(world.p(state)), list(world.q(depth, state))
        for _ in range(width):
            x = pick(q, rng)
            if rng.random() * q[x] / sum(q) < r[x] / sum(r):
                out.append(x)
                break
            total, mass = sum(r), sum(q)
            r = spare([a / total for a in r], [b / mass for b in q])
            q[x] = 0.0
        else:
            return [*out, pick(r, rng)]
        state = world.after(out[-1])
    return [*out, pick(world.p(state), rng)]


def write(
    world: PlainWorld, play: Play, starts: Sequence[int], length: int, rng: random.Random
) -> tuple[list[list[int]], int]:
    """A text of `length` tokens behind every start, and the rounds they took."""
    texts, rounds = [], 0
    for start in starts:
        text: list[int] = []
        state = start
        while len(text) < length:
            text += play(world, state, rng)
            state = world.after(text[-1])
            rounds += 1
        texts.append(text[:length])
    return texts, rounds


def count_transitions(
    world: PlainWorld, starts: Sequence[int], texts: Sequence[Sequence[int]]
) -> list[list[int]]:
    counts = [[0] * len(world.target[0]) for _ in world.target]
    for start, text in zip(starts, texts, strict=True):
        state = start
        for token in text:
            counts[state][token] += 1
            state = world.after(token)
    return counts
