"""What requests have shown of a draft so far: what an adaptive control decides by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_ROUNDS = 4.0
"""What a guess is worth where a request has shown little."""


@dataclass
class Track:
    """What one request has shown: rounds that reached a depth, and those that accepted it.

    Both fade by half every half_life rounds, since a text changes, and so do the sums over rounds in
    which the draft was asked: how many, tokens accepted, nodes and levels drafted. quiet: rounds since
    it last drafted; wait: so many until it is tried again; trial: rounds of a trial that are left

    With a longer half_life it is what all requests together have shown.
    """

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    rounds: float = 0.0
    gained: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0
    quiet: int = 0
    wait: int = 0
    trial: int = 0
    half_life: float = 32.0

    def observe(self, depth: int, accepted: int, nodes: int | None = None) -> None:
        """A draft that was asked drafted `depth` deep, and `accepted` tokens of it were committed.

        nodes: how many it drafted in all; None: a chain of that depth
        """
        if not 0 <= accepted <= depth:
            raise ValueError(f"{accepted} accepted of {depth} drafted")
        fade = 0.5 ** (1 / self.half_life)
        self.rounds = fade * self.rounds + 1
        self.gained = fade * self.gained + accepted
        self.nodes = fade * self.nodes + (depth if nodes is None else nodes)
        self.levels = fade * self.levels + depth
        if depth == 0:
            return
        missing = depth - len(self.reached)
        self.reached += [0.0] * missing
        self.accepted += [0.0] * missing
        for i in range(len(self.reached)):
            self.reached[i] = fade * self.reached[i] + (i <= accepted and i < depth)
            self.accepted[i] = fade * self.accepted[i] + (i < accepted)

    def rates(self, depth: int, prior: float | Sequence[float]) -> list[float]:
        """Conditional acceptance of each position up to `depth`.

        A position starts from its own of `prior`, worth PRIOR_ROUNDS rounds; where that is a number,
        the first starts from it and each other one from the one before it.
        """
        out: list[float] = []
        for i in range(depth):
            before = (out[-1] if out else prior) if isinstance(prior, float) else prior[i]
            reached = self.reached[i] if i < len(self.reached) else 0.0
            accepted = self.accepted[i] if i < len(self.accepted) else 0.0
            out.append((PRIOR_ROUNDS * before + accepted) / (PRIOR_ROUNDS + reached))
        return out

    def means(self, start: Sequence[float]) -> tuple[float, ...]:
        """Tokens accepted, nodes and levels drafted a round; `start` is worth PRIOR_ROUNDS rounds."""
        seen = (self.gained, self.nodes, self.levels)
        total = PRIOR_ROUNDS + self.rounds
        return tuple(
            (PRIOR_ROUNDS * guess + value) / total for guess, value in zip(start, seen, strict=True)
        )
