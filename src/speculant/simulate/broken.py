"""Rules that are in use and are not lossless, to see the chi-square test fail on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .chains import Round, Rule, token_rule
from .draws import Floats, Ints, draw_rows, residual
from .trees import SampledTree
from .world import World

UNSURE = 0.1  # confidence below which `dropping_rule` drops a token


def careless_rule(world: World, states: Ints, tokens: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
    """The token rule, but a rejected token is replaced from the target, not from the residual."""
    accepted, _ = token_rule(world, states, tokens, uniforms)
    state = states[np.arange(len(states)), accepted]
    return accepted, world.from_target.draw(state, uniforms[:, -1])


def dropping_rule(world: World, states: Ints, tokens: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
    """The token rule, but a token that the draft was unsure of is dropped, with all behind it.

    The target's own sample is emitted in its place, as after a shorter chain (design, law 3).
    """
    accepted, last = token_rule(world, states, tokens, uniforms)
    confidence = [
        world.draft[world.level(i), states[:, i], tokens[:, i]] for i in range(tokens.shape[1])
    ]
    unsure = np.stack([c < UNSURE for c in confidence], axis=1)
    sure = np.where(unsure.any(axis=1), unsure.argmax(axis=1), tokens.shape[1])
    cut = sure <= accepted
    state = states[np.arange(len(states)), sure]
    return np.minimum(accepted, sure), np.where(
        cut, world.from_target.draw(state, uniforms[:, -1]), last
    )


@dataclass(frozen=True)
class BestPathTree(SampledTree):
    """Siblings judged each for itself, and of those accepted the target's likeliest wins."""

    def play(self, world: World, roots: Ints, rng: np.random.Generator) -> Round:
        """One round behind roots [B], given as states."""
        emitted = np.full((len(roots), self.depth + 1), -1)
        ranks = np.full((len(roots), self.depth), -1)
        walking, states = np.arange(len(roots)), roots
        for depth, width in enumerate(self.shape):
            target = world.target[states]
            draft = world.draft[world.level(depth), states]
            keys = rng.exponential(size=draft.shape) / np.maximum(draft, 1e-300)
            siblings = keys.argsort(axis=1)[:, :width]  # drawn without replacement
            p = np.take_along_axis(target, siblings, axis=1)
            q = np.take_along_axis(draft, siblings, axis=1)
            accept = rng.random(p.shape) * q < p
            best = np.where(accept, p, -1.0).argmax(axis=1)
            found = accept.any(axis=1)
            drawn = draw_rows(residual(target, draft), rng.random(len(walking)))
            tokens = np.where(found, siblings[np.arange(len(walking)), best], drawn)
            emitted[walking, depth] = tokens
            ranks[walking, depth] = np.where(found, best, -1)
            walking, states = walking[found], world.after(tokens[found])
        emitted[walking, self.depth] = world.from_target.draw(states, rng.random(len(walking)))
        return Round((ranks >= 0).sum(axis=1), emitted, ranks)


BROKEN_RULES: dict[str, Rule] = {"residual": careless_rule, "drop": dropping_rule}
"""For chains. The tree's is `best-path`."""
BREAKS = (*BROKEN_RULES, "best-path")
