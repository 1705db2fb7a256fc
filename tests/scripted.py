"""Drafts for tests: the target's own continuation, made wrong where a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speculant.drafts.base import DraftInfo, DraftRow, Feedback
from speculant.proposal import Proposal

Guess = Callable[[Sequence[int], int], list[int]]


class Scripted:
    """Proposes what `guess(tokens, budget)` says, as a chain, or as a tree with wrong siblings.

    Chosen nodes. `siblings` hangs that many wrong tokens beside every right one.
    """

    def __init__(self, guess: Guess, n: int = 4, siblings: int = 0, vocab: int = 32) -> None:
        self.guess, self.siblings, self.vocab = guess, siblings, vocab
        self.info = DraftInfo("scripted", max_nodes=n * (1 + siblings))
        self.n = n

    def start(self, rows: int, capacity: int) -> None: ...

    def open(self, row: DraftRow) -> None: ...

    def resume(self, row: DraftRow, shared: int) -> int:
        return shared

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None: ...

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None: ...

    def close(self, slot: int) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        trees = []
        for row in rows:
            chain = self.guess(row.tokens, min(row.budget, self.n))
            tokens: list[int] = []
            parents: list[int] = []
            above = -1
            for token in chain:
                for j in range(1, self.siblings + 1):
                    tokens.append((token + j) % self.vocab)
                    parents.append(above)
                tokens.append(token)
                parents.append(above)
                above = len(tokens) - 1
            trees.append((tokens, parents))
        return Proposal.trees(trees)


class Sampled(Scripted):
    """Draws a chain from `probs(tokens)` at every depth, with draft_probs."""

    def __init__(self, probs: Callable[[Sequence[int]], Tensor], n: int = 3) -> None:
        super().__init__(lambda tokens, budget: [], n)
        self.probs = probs

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        lengths = [min(row.budget, self.n) for row in rows]
        width = max(lengths)
        vocab = len(self.probs(rows[0].tokens))
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        dists = torch.full((len(rows), width, vocab), 1 / vocab)
        for b, row in enumerate(rows):
            for i in range(lengths[b]):
                p = self.probs([*row.tokens, *tokens[b, :i].tolist()])
                dists[b, i] = p
                cut = torch.tensor(row.random.take(1)[0]) * p.sum()
                below = torch.searchsorted(p.cumsum(0), cut, right=True)
                tokens[b, i] = min(int(below), vocab - 1)
                assert p[tokens[b, i]] > 0
        parents = torch.arange(-1, width - 1)
        return Proposal(tokens, parents, dists, torch.tensor(lengths))
