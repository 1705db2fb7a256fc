"""What `control` tells a draft that chooses its own nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Prices:
    """What drafting more costs, for a draft that chooses its nodes by how sure it is of them.

    rate:     tokens a millisecond that the time would commit otherwise
    nodes_ms: milliseconds that the target takes longer to verify 1, 2, ... nodes than none: each node
              takes at least as long as the one before it
    step_ms:  of one more pass of the draft
    """

    rate: float
    nodes_ms: tuple[float, ...]
    step_ms: float

    def node(self, rank: int) -> float:
        """Tokens that the node in place `rank` must be worth, 1 the first; inf behind the last."""
        if rank > len(self.nodes_ms):
            return math.inf
        return self.rate * (
            self.nodes_ms[rank - 1] - (self.nodes_ms[rank - 2] if rank > 1 else 0.0)
        )
