"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams out of a Jacobi window.

No draft model. A window of W columns and N - 1 levels of guessed tokens rides along in the
target's own forward (section 3.1, "lookahead branch"); its top level's argmax completes one n-gram
a column, which goes into a pool. Pool n-grams that begin with the root are proposed as a tree
(section 3.2, "verification branch"). The trajectory of the window is Jacobi's fixed-point
iteration: whatever it holds, only verification decides what is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..proposal import ROOT, Proposal, Window
from .base import DraftInfo, DraftRow, Feedback

MAX_KEYS = 4096
"""First tokens that one slot's pool remembers."""


class Pool:
    """N-grams by their first token: no duplicates, the least recently used forgotten first.

    per_key: n-grams kept a first token (G); max_keys: first tokens kept
    """

    def __init__(self, per_key: int, max_keys: int = MAX_KEYS) -> None:
        self.per_key, self.max_keys = per_key, max_keys
        # Dictionaries keep insertion order: re-inserting makes an entry the most recent one.
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Take an n-gram in, or make it the most recent one."""
        tails = self._tails.pop(ngram[0], {})
        self._tails[ngram[0]] = tails
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.per_key:
            del tails[next(iter(tails))]
        if len(self._tails) > self.max_keys:
            del self._tails[next(iter(self._tails))]

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, most recent first; counts as a use of it."""
        tails = self._tails.pop(token, None)
        if tails is None:
            return []
        self._tails[token] = tails
        return list(reversed(tails))

    def __len__(self) -> int:
        return sum(len(tails) for tails in self._tails.values())


def merge(chains: Sequence[Sequence[int]], depth: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the trie of the chains, each cut at `depth`.

    [a b c], [a b d], [e] -> tokens [a b c d e], parents [-1 0 1 1 -1]
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for chain in chains:
        above = ROOT
        for token in chain[:depth]:
            node = nodes.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
            above = node
    return tokens, parents


def window_layout(columns: int, levels: int) -> tuple[Tensor, Tensor]:
    """Offsets [w] from the root and mask [w, w] of the window, w = levels * columns, level-major.

    Level l, column j stands for the token 1 + j + l behind the root. Its context is one guess at
    the text between: level 0 up to its own column, then its own column's lower levels, then itself.
    Three columns, three levels, "lj" is level l column j:

        offset        00 01 02 10 11 12 20 21 22
           1      00   1  .  .  .  .  .  .  .  .
           2      01   1  1  .  .  .  .  .  .  .
           3      02   1  1  1  .  .  .  .  .  .
           2      10   1  .  .  1  .  .  .  .  .
           3      11   1  1  .  .  1  .  .  .  .
           4      12   1  1  1  .  .  1  .  .  .
           3      20   1  .  .  1  .  .  1  .  .
           4      21   1  1  .  .  1  .  .  1  .
           5      22   1  1  1  .  .  1  .  .  1
    """
    level = torch.arange(levels).repeat_interleave(columns)  # shape: [w]
    column = torch.arange(columns).repeat(levels)  # shape: [w]
    first_level = (level == 0) & (column <= column[:, None])
    own_column = (column == column[:, None]) & (level <= level[:, None])
    return 1 + column + level, first_level | own_column


class LookaheadDraft:
    """Jacobi window, n-gram pool, and a chosen tree of the pool's n-grams.

    window:         W, columns
    ngram:          N, tokens of an n-gram; the window has N - 1 levels, a proposal N - 1 depths
    max_candidates: G, n-grams verified a round
    context_length: positions the target has; the window's rows stay inside
    """

    def __init__(
        self,
        window: int = 5,
        ngram: int = 4,
        max_candidates: int = 5,
        context_length: int | None = None,
    ) -> None:
        for name, value, least in (
            ("window", window, 1),
            ("ngram", ngram, 2),
            ("max_candidates", max_candidates, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        self.window, self.ngram, self.max_candidates = window, ngram, max_candidates
        self.context_length = context_length
        self.offsets, self.mask = window_layout(window, ngram - 1)
        self.info = DraftInfo(
            name="lookahead",
            max_nodes=max_candidates * (ngram - 1),
            max_window=window * (ngram - 1),
            options={"window": window, "ngram": ngram, "max_candidates": max_candidates},
        )
        self._levels = torch.zeros(0, ngram - 1, window, dtype=torch.int64)
        self._pools: dict[int, Pool] = {}

    def start(self, rows: int, capacity: int) -> None:
        """Make room for every slot's window."""
        # shape: [rows, N - 1, W]
        self._levels = torch.zeros(rows, self.ngram - 1, self.window, dtype=torch.int64)
        self._pools = {}

    def open(self, row: DraftRow) -> None:
        """Guess the window from the prompt, and fill the pool with the prompt's n-grams."""
        tokens = row.tokens
        prompt = torch.tensor(tokens)
        steps = torch.arange(self.window * (self.ngram - 1)) % len(tokens)
        self._levels[row.slot] = prompt[steps].view(self.ngram - 1, self.window)
        self._pools[row.slot] = pool = Pool(self.max_candidates)
        for i in range(len(tokens) - self.ngram + 1):
            pool.add(tokens[i : i + self.ngram])

    def resume(self, row: DraftRow, shared: int) -> int:
        """Begin as behind a cold prompt: the window and the pool come from it alone."""
        self.open(row)
        return shared

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """The prompt was read by `open`."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """The trie of the pool's n-grams that begin with the root, and the window beside it."""
        if all(row.budget <= 0 for row in rows):
            return Proposal.chains([[] for _ in rows])  # the last token needs no look ahead
        trees = []
        for row in rows:
            found = self._pools[row.slot].starting_with(row.tokens[-1]) if row.budget > 0 else []
            trees.append(merge(found, row.budget))
        return Proposal.trees(trees, self._window(rows))

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Take in the window's n-grams, then move the window behind the new root."""
        live = [b for b, row in enumerate(rows) if row.slot in self._pools]
        for b in live:
            self._add_committed(rows[b], len(feedback.committed[b]))
        if feedback.window_logits is None or not live:
            return
        slots = torch.tensor([rows[b].slot for b in live])
        top = feedback.window_logits[live, -self.window :]  # shape: [B, W, V]
        new = top.argmax(dim=-1).cpu()  # shape: [B, W]
        ngrams = torch.cat([self._levels[slots], new[:, None]], dim=1)  # shape: [B, N, W]
        for b, columns in zip(live, ngrams.transpose(1, 2).tolist(), strict=True):
            for column in columns:
                self._pools[rows[b].slot].add(column)
        # Dropping level 0 moves the window one token on. Every accepted draft moves it one more:
        # the columns it passed rotate to the right end, where any guess will do.
        accepted = torch.tensor([len(feedback.paths[b]) for b in live])
        columns = (torch.arange(self.window) + accepted[:, None]) % self.window  # shape: [B, W]
        index = columns[:, None].expand(-1, self.ngram - 1, -1)
        self._levels[slots] = ngrams[:, 1:].gather(2, index)

    def close(self, slot: int) -> None:
        """Forget the slot's pool."""
        self._pools.pop(slot, None)

    def _window(self, rows: Sequence[DraftRow]) -> Window:
        width = self.info.max_window
        tokens = self._levels[torch.tensor([row.slot for row in rows])]  # shape: [B, N - 1, W]
        offsets = self.offsets.expand(len(rows), width)
        if self.context_length is not None:
            room = torch.tensor([self.context_length - len(row.tokens) for row in rows])
            offsets = offsets.minimum(room[:, None])
        return Window(tokens.flatten(1), offsets, self.mask.expand(len(rows), width, width))

    def _add_committed(self, row: DraftRow, count: int) -> None:
        """The n-grams that end in the `count` newest tokens."""
        pool, tokens, n = self._pools[row.slot], row.tokens, self.ngram
        for end in range(max(n, len(tokens) - count + 1), len(tokens) + 1):
            pool.add(tokens[end - n : end])
