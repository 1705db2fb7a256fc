"""N-gram drafting, also called prompt look-up: propose what followed the last time.

    history   the cat sat on the mat . the cat ?
    suffix                             ~~~~~~~      its longest earlier occurrence: "the cat"
    proposal          sat on the ...                what followed there

No model: the whole cost is a few dictionary look-ups a token, so a wrong guess costs only its
rows in the target's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..proposal import Proposal
from .base import DraftInfo, DraftRow, Feedback


@dataclass
class _Index:
    """Where each n-gram of one slot's history last ended, and how far the history is indexed.

    ends: n-gram -> index of the token that followed its most recent occurrence. Only n-grams that
    something follows are in it, so the one at the very end of the history cannot match itself.
    """

    min_ngram: int
    max_ngram: int
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before tokens[end], for every `end` not seen yet."""
        for end in range(self.done + 1, len(tokens)):
            recent = tuple(tokens[max(0, end - self.max_ngram) : end])
            for n in range(self.min_ngram, len(recent) + 1):
                self.ends[recent[len(recent) - n :]] = end
        self.done = max(self.done, len(tokens) - 1)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of what followed the most recent occurrence of the longest suffix that has one."""
        recent = tuple(tokens[-self.max_ngram :])
        for n in range(len(recent), self.min_ngram - 1, -1):
            end = self.ends.get(recent[len(recent) - n :])
            if end is not None:
                return end
        return None


class NgramDraft:
    """Matches the longest recent suffix in prompt + output and proposes what followed it.

    num_draft_tokens:     most tokens a round
    max_ngram, min_ngram: lengths of suffix tried, longest first
    """

    def __init__(self, num_draft_tokens: int = 8, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}: "
                "they must be at least 1, and min_ngram at most max_ngram"
            )
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.info = DraftInfo(
            name="ngram",
            max_nodes=num_draft_tokens,
            options={
                "num_draft_tokens": num_draft_tokens,
                "max_ngram": max_ngram,
                "min_ngram": min_ngram,
            },
        )
        self._indexes: dict[int, _Index] = {}

    def start(self, rows: int, capacity: int) -> None:
        """Forget every slot."""
        self._indexes = {}

    def open(self, row: DraftRow) -> None:
        """Index the prompt."""
        index = self._indexes[row.slot] = _Index(self.min_ngram, self.max_ngram)
        index.extend(row.tokens)

    def resume(self, row: DraftRow, shared: int) -> int:
        """The prompt is all that is known of a request: index it."""
        self.open(row)
        return shared

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """The prompt was indexed by `open`."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """A chain for every row whose suffix has occurred before."""
        return Proposal.chains([self._continue(row) for row in rows])

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """What was committed is indexed when it is looked up."""

    def close(self, slot: int) -> None:
        """Forget the slot's history."""
        self._indexes.pop(slot, None)

    def _continue(self, row: DraftRow) -> list[int]:
        tokens, count = row.tokens, min(row.budget, self.info.max_nodes)
        if count <= 0:
            return []
        index = self._indexes[row.slot]
        index.extend(tokens)
        follows = index.find(tokens)
        if follows is None:
            return []
        # A match that overlaps the suffix runs off the end of the history after `period` tokens:
        # the text repeats itself, so the copy goes on with what it has just copied.
        period = len(tokens) - follows
        return [tokens[follows + i % period] for i in range(count)]
