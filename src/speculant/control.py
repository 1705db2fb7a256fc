"""How much to draft now. Decided before anything is sampled (design, law 3)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """Always the same depth, as far as the request has room for it."""

    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}: it must be at least 0")

    def budget(self, remaining: int) -> int:
        """Depth to draft when `remaining` tokens may still be committed.

        A round commits one token more than it accepts, hence the one that is kept back.
        """
        return max(0, min(self.num_draft_tokens, remaining - 1))
