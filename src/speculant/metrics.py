"""Raw counters of one request or of many; every rate is defined here and nowhere else.

Only what was committed counts: tokens cut off by EOS, a stop string or max_tokens are neither
emitted nor accepted. Names and conventions are vLLM's (`SpecDecodingStats`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Raw counts and times (milliseconds).

    num_drafts:        verification rounds that carried at least one drafted token
    num_draft_tokens:  drafted tokens (nodes of a tree)
    num_accepted_tokens_per_pos: drafted tokens accepted at depth i + 1
    num_drafted_per_pos: rounds whose proposal reached depth i + 1
    num_emitted_tokens: committed tokens: accepted + recovered + bonus + plain
    target_forwards:   forwards of the decoding loop (a prompt's prefill is not one)
    verify_ms:         target forward and acceptance rule; forward_ms: the forward alone
    decode_ms:         whole rounds, the loop's own work included
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafted_per_pos: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0
    target_forwards: int = 0
    accepted_length_histogram: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    forward_ms: float = 0.0

    def add_round(self, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """One round of one row: `drafted` nodes reaching `depth`, of which `accepted` committed."""
        if not 0 <= accepted <= min(depth, emitted):
            raise ValueError(f"accepted {accepted} of depth {depth}, emitted {emitted}")
        self.target_forwards += 1
        self.num_emitted_tokens += emitted
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        _bump(self.num_drafted_per_pos, range(depth))
        _bump(self.num_accepted_tokens_per_pos, range(accepted), size=depth)
        _bump(self.accepted_length_histogram, [accepted])

    def merge(self, other: Counters) -> None:
        """Add another request's counts and times."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, list):
                _bump(mine, [], size=len(value))
                for i, count in enumerate(value):
                    mine[i] += count
            else:
                setattr(self, name, mine + value)

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per drafting round, 1 + accepted / num_drafts (vLLM; the papers' tau)."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Committed tokens per target forward, rounds without a draft included."""
        return self.num_emitted_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafted tokens / drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Unconditional: rounds that accepted position i / drafting rounds."""
        return [n / self.num_drafts for n in self.num_accepted_tokens_per_pos]

    @property
    def conditional_acceptance_per_position(self) -> list[float]:
        """Position i accepted, given that i - 1 was (the EAGLE papers' n-alpha)."""
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos[:-1]]
        pairs = zip(self.num_accepted_tokens_per_pos, reached, strict=False)
        return [n / before if before else 0.0 for n, before in pairs]

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding (prefill not counted)."""
        return 1e3 * self.num_emitted_tokens / self.decode_ms if self.decode_ms else 0.0

    @property
    def loop_share(self) -> float:
        """Share of decode time that is neither the target's forward nor the draft."""
        return 1 - (self.forward_ms + self.draft_ms) / self.decode_ms if self.decode_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counters and rates for JSON."""
        rates = (
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "acceptance_per_position",
            "conditional_acceptance_per_position",
            "tokens_per_forward",
            "tokens_per_s",
            "loop_share",
        )
        raw: dict[str, Any] = {
            k: list(v) if isinstance(v, list) else round(v, 3) for k, v in vars(self).items()
        }
        return raw | {name: getattr(self, name) for name in rates}


def _bump(counts: list[int], positions: Any, size: int = 0) -> None:
    size = max(size, max(positions, default=-1) + 1)
    counts += [0] * (size - len(counts))
    for i in positions:
        counts[i] += 1
