"""Worlds whose distributions are known: a target and a draft as tables of probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .draws import Floats, Ints, Residuals, Sampler, residual

KINDS = ("context-free", "markov")
MAX_VOCAB = 256
ROUNDING = 1e-9  # how far a row of probabilities may sum from 1


@dataclass(frozen=True, eq=False)
class World:
    """A target and a draft over V tokens, in S states and at D depths of a proposal.

    target: [S, V], the target's distribution in every state
    draft:  [D, S, V], the draft's at depth d (from 0) of a proposal; the last row goes on deeper

    S = 1 is context-free: every position is like every other. S = V is Markov: the state is the
    last token, so the distributions change from position to position and the draft, which goes on
    from its own tokens, gets to states that the target would not have chosen.
    """

    target: Floats
    draft: Floats

    def __post_init__(self) -> None:
        states, vocab = self.target.shape
        if states not in (1, vocab) or vocab < 2:
            raise ValueError(f"target [{states}, {vocab}]: one state, or as many as tokens (2 up)")
        if self.draft.ndim != 3 or self.draft.shape[1:] != self.target.shape or not len(self.draft):
            raise ValueError(f"draft {self.draft.shape} does not fit target {self.target.shape}")
        for name, probs in (("target", self.target), ("draft", self.draft)):
            sums = probs.sum(axis=-1)
            if not ((probs >= 0).all() and (abs(sums - 1) < ROUNDING).all()):
                raise ValueError(f"{name}: every row must be a distribution")

    @property
    def states(self) -> int:
        """S: 1 or V."""
        return len(self.target)

    @property
    def vocab(self) -> int:
        """V."""
        return int(self.target.shape[1])

    @property
    def kind(self) -> str:
        """context-free or markov."""
        return KINDS[self.states > 1]

    def after(self, tokens: Ints) -> Ints:
        """The state behind each token."""
        return tokens if self.states > 1 else np.zeros_like(tokens)

    def level(self, depth: int) -> int:
        """Row of `draft` for a depth of the proposal."""
        return min(depth, len(self.draft) - 1)

    def to_states(self, by_token: Floats) -> Floats:
        """Mass by token [..., V] as mass by state [..., S]."""
        return by_token if self.states > 1 else by_token.sum(axis=-1, keepdims=True)

    @cached_property
    def stationary(self) -> Floats:
        """[S] how often the target's own text is in each state."""
        moves = self.to_states(self.target)
        return stationary(moves)

    @property
    def alpha(self) -> float:
        """E[sum min(p, q)] at the first drafted position, over the target's own text."""
        return float(self.stationary @ np.minimum(self.target, self.draft[0]).sum(axis=1))

    def rows(self, depth: int, states: Ints) -> Ints:
        """Rows of the draft's tables below, for states at one depth."""
        return self.level(depth) * self.states + states

    @cached_property
    def from_target(self) -> Sampler:
        """Draws from the target; row: state."""
        return Sampler(self.target)

    @cached_property
    def from_draft(self) -> Sampler:
        """Draws from the draft; row: see `rows`."""
        return Sampler(self.draft.reshape(-1, self.vocab))

    @cached_property
    def from_residual(self) -> Sampler:
        """Draws from norm((target - draft)+); row: see `rows`."""
        return Sampler(residual(self.target, self.draft).reshape(-1, self.vocab))

    @cached_property
    def residuals(self) -> Residuals:
        """Masses of and draws from norm((target - a draft)+) for any a; row: see `rows`."""
        target = np.broadcast_to(self.target, self.draft.shape)
        return Residuals(target.reshape(-1, self.vocab), self.draft.reshape(-1, self.vocab))

    @cached_property
    def ratio(self) -> Floats:
        """[D * S * V] target / draft, 0 where the draft never goes."""
        return (self.target / np.where(self.draft > 0, self.draft, np.inf)).ravel()


def stationary(moves: Floats) -> Floats:
    """[S] the distribution that moves [S, S] (rows sum to 1) keep: solved, not iterated."""
    size = len(moves)
    system = np.vstack([moves.T - np.eye(size), np.ones((1, size))])
    wanted = np.zeros(size + 1)
    wanted[-1] = 1.0
    found: Floats = np.maximum(np.linalg.lstsq(system, wanted, rcond=None)[0], 0.0)
    found /= found.sum()
    return found


def check_vocab(vocab: int) -> None:
    """Raise ValueError unless tables of that many tokens stay small."""
    if not 2 <= vocab <= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab}: it must have 2 to {MAX_VOCAB} tokens")


def softmax(logits: Floats) -> Floats:
    """Probabilities over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    out: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return out


def make_world(
    kind: str,
    vocab: int,
    noise: float,
    rng: np.random.Generator,
    drift: float = 0.0,
    depths: int = 1,
    sharpness: float = 2.0,
) -> World:
    """A random world: target logits are N(0, sharpness^2), the draft's are those and N(0, noise^2).

    kind:   one of KINDS
    drift:  the noise grows by this share of itself with every depth, as a draft's own errors do
    depths: D; deeper ones draft like the last
    """
    if kind not in KINDS:
        raise ValueError(f"unknown world {kind!r}: choose {' or '.join(KINDS)}")
    check_vocab(vocab)
    for name, value in (("noise", noise), ("drift", drift), ("sharpness", sharpness)):
        if not 0 <= value <= 20:
            raise ValueError(f"{name} is {value}: it lies in 0..20")
    states = vocab if kind == "markov" else 1
    logits = rng.normal(0.0, sharpness, (states, vocab))
    errors = rng.normal(0.0, 1.0, (states, vocab))
    growth = noise * (1 + drift * np.arange(depths))
    return World(softmax(logits), softmax(logits + growth[:, None, None] * errors))
