"""Copying where the text repeats itself, another draft where it does not.

A look-up of what followed the last three tokens or more costs nothing and is right more often than any
head, where there is something to copy: quotes, code, names, answers from a document. Elsewhere it has
nothing to offer, and a head does. Which of the two drafts, a row's own tokens decide before anything
is drawn (design, law 3), so that verification stays what it is. (Snowflake's Arctic Inference combines
suffix look-up with a speculator in the same way.)
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..proposal import Proposal, deepest
from .base import Depths, Draft, DraftInfo, DraftRow, Feedback

COPY, OTHER = 0, 1


class HybridDraft:
    """A chain copied from the row's own tokens where there is one, else what `other` drafts.

    copier: the n-gram look-up
    other:  any other draft without a window
    vocab:  V of the target
    depths: one that says how deep each part goes, or none: as deep as the engine says. Whoever adapts
            the depth puts it in (`pace.adapt`); copies of the draft share the list
    """

    def __init__(
        self, copier: Draft, other: Draft, vocab: int, depths: list[Depths] | None = None
    ) -> None:
        if other.info.max_window:
            raise ValueError(f"{other.info.name} has a window: it does not go with another draft")
        self.parts: tuple[Draft, Draft] = (copier, other)
        self.vocab = vocab
        self.depths: list[Depths] = [] if depths is None else depths
        a, b = copier.info, other.info
        nodes, depth = max(a.max_nodes, b.max_nodes), max(a.depth, b.depth)
        name, options = f"{a.name}+{b.name}", {**b.options}
        self.info = DraftInfo(name, b.taps, nodes, options=options, max_depth=depth)
        self._records: dict[int, Any] = {}  # slot -> what the request has shown
        self._turns: dict[int, int] = {}  # slot -> which part drafted last

    def __copy__(self) -> HybridDraft:
        """With parts of its own: an engine copies a draft to have its per-slot state."""
        parts = (copy(self.parts[COPY]), copy(self.parts[OTHER]))
        return HybridDraft(*parts, self.vocab, self.depths)

    @property
    def limit(self) -> int:
        """Tokens up to which the other part has context; 0: it sets no limit."""
        return int(getattr(self.parts[OTHER], "limit", 0))

    def start(self, rows: int, capacity: int) -> None:
        """Start both."""
        for part in self.parts:
            part.start(rows, capacity)

    def open(self, row: DraftRow) -> None:
        """Open both."""
        self._begin(row.slot)
        for part in self.parts:
            part.open(row)

    def resume(self, row: DraftRow, shared: int) -> int:
        """What both can do without."""
        self._begin(row.slot)
        self.parts[COPY].resume(row, shared)  # which needs no prefill
        return self.parts[OTHER].resume(row, shared)

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Both read it."""
        for part in self.parts:
            part.prefill(row, start, hidden)

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """A copied chain for rows that have one worth its cost, the other part's for the rest."""
        if not any(row.budget for row in rows):
            return self.parts[OTHER].propose(rows)
        most = [row.budget for row in rows]
        copied = self._copied(rows)
        try:
            for row, chain, depth in zip(rows, copied, most, strict=True):
                row.budget = 0 if chain else self._budget(OTHER, row, depth)
                if row.budget and row.slot in self._records:
                    row.prices = self.depths[0].worth(self._records[row.slot], OTHER)
            others = self.parts[OTHER].propose(rows)
        finally:
            for row, chain in zip(rows, copied, strict=True):
                if chain:
                    row.budget = len(chain)
        for row, chain in zip(rows, copied, strict=True):
            self._turns[row.slot] = COPY if chain else OTHER
        return self._merged(rows, copied, others)

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Both learn what was committed; the part that drafted, how it fared."""
        asked = [b for b, row in enumerate(rows) if row.budget and row.slot in self._records]
        if asked:
            counts = feedback.proposal.num_nodes.tolist()
            parents = feedback.proposal.parents.tolist()
            for b in asked:
                row = rows[b]
                depth = deepest(parents[b][: counts[b]])
                turn, accepted = self._turns[row.slot], min(depth, len(feedback.paths[b]))
                self.depths[0].tell(self._records[row.slot], turn, depth, accepted, counts[b])
        for part in self.parts:
            part.update(rows, feedback)

    def close(self, slot: int) -> None:
        """Close both."""
        self._records.pop(slot, None)
        self._turns.pop(slot, None)
        for part in self.parts:
            part.close(slot)

    def _copied(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The chain that each row copies, [] where it copies nothing."""
        found = self.parts[COPY].propose(rows)
        ids, counts = found.tokens.tolist(), found.num_nodes.tolist()
        chains = [tokens[:count] for tokens, count in zip(ids, counts, strict=True)]
        return [
            chain[: self._budget(COPY, row, row.budget)] if chain else []
            for row, chain in zip(rows, chains, strict=True)
        ]

    def _begin(self, slot: int) -> None:
        if self.depths:
            self._records[slot] = self.depths[0].begin()

    def _budget(self, part: int, row: DraftRow, most: int) -> int:
        """How deep a part may draft for a row. Asked once a round, and only of a part that could."""
        most = min(most, self.parts[part].info.depth)
        if most and row.slot in self._records:
            return self.depths[0].ask(self._records[row.slot], part, most)
        return most

    def _merged(
        self, rows: Sequence[DraftRow], copied: Sequence[list[int]], others: Proposal
    ) -> Proposal:
        """Both proposals as one.

        A sampled row of a part that samples is verified against what its tokens were drawn from, in
        every round and whatever the others do: a copied token was drawn with probability 1.
        """
        counts, ids, above = (x.tolist() for x in (others.num_nodes, others.tokens, others.parents))
        trees = [
            (chain, list(range(-1, len(chain) - 1))) if chain else (tokens[:n], parents[:n])
            for chain, n, tokens, parents in zip(copied, counts, ids, above, strict=True)
        ]
        merged = Proposal.trees(trees)
        sampled = not all(row.params.greedy for row in rows)
        if not (sampled and self.parts[OTHER].info.samples) or not merged.width:
            return merged
        given = others.draft_probs
        device = merged.tokens.device if given is None else given.device
        probs = torch.zeros(len(rows), merged.width, self.vocab, device=device)
        if given is not None:
            width = min(merged.width, given.shape[1])
            probs[:, :width] = given[:, :width]
        for b, chain in enumerate(copied):
            if chain:
                probs[b] = 0
                probs[b, torch.arange(len(chain)), torch.tensor(chain)] = 1
        return Proposal(merged.tokens, merged.parents, probs, merged.lengths)
