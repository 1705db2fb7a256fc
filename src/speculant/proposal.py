"""What a draft proposes and what verification answers.

A chain is a tree with one branch. The root (the last committed token) is not part of a
proposal; `parents[i] == -1` hangs node i on the root. In the target's forward the root
is row 0 and node i is row i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

ROOT = -1


@lru_cache(maxsize=128)
def chain_parents(n: int) -> Tensor:
    """Parents [n] of one branch: -1, 0, 1, ... The same tensor every time: not to be written to."""
    return torch.arange(-1, n - 1)


@dataclass(frozen=True)
class Window:
    """Extra rows of the target's forward that are computed but not verified (Lookahead).

    tokens:  [B, w] int64
    offsets: [B, w] int64, position of each row relative to the root (root = 0)
    mask:    [B, w, w] bool, which window rows each window row sees, itself included;
             every window row also sees the prefix and the root, and no proposed node
    """

    tokens: Tensor
    offsets: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        rows, width = self.tokens.shape
        if self.offsets.shape != (rows, width) or self.mask.shape != (rows, width, width):
            raise ValueError(
                f"Window of {rows}x{width} tokens has offsets {tuple(self.offsets.shape)} "
                f"and mask {tuple(self.mask.shape)}"
            )


@dataclass(frozen=True)
class Proposal:
    """One round's drafted tokens.

    tokens:      [B, n] int64; node i of row b is real when i < lengths[b]
    parents:     [B, n] or [n] int64; index of the parent node, ROOT (-1) for the root;
                 a parent comes before its children
    draft_probs: [B, n, V] or None. None: the nodes were *chosen* (n-gram, top-k). Else the
                 distribution node i was drawn from; siblings were drawn from one
                 distribution without replacement, in index order
    lengths:     [B] int64, real nodes per row (default: all n)
    window:      rows that ride along unverified (Lookahead)
    is_chain:    known to be one branch, every row: its parents are `chain_parents`
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor | None = None
    lengths: Tensor | None = None
    window: Window | None = None
    is_chain: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ValueError(f"Proposal.tokens must be [B, n], got {tuple(self.tokens.shape)}")
        rows, n = self.tokens.shape
        object.__setattr__(self, "is_chain", self.parents is chain_parents(n))
        if self.parents.dim() == 1:
            object.__setattr__(self, "parents", self.parents.expand(rows, n))
        if self.parents.shape != (rows, n):
            raise ValueError(f"Proposal.parents is {tuple(self.parents.shape)}, tokens {rows}x{n}")
        if self.lengths is None:
            whole = torch.full((rows,), n, dtype=torch.int64, device=self.tokens.device)
            object.__setattr__(self, "lengths", whole)
        if n and not self.is_chain:
            order = torch.arange(n, device=self.parents.device)
            if bool(((self.parents >= order) | (self.parents < ROOT)).any()):
                raise ValueError("Proposal.parents: a parent must come before its children")
        if self.draft_probs is not None and self.draft_probs.shape[:2] != (rows, n):
            raise ValueError(
                f"Proposal.draft_probs is {tuple(self.draft_probs.shape)}, tokens {rows}x{n}"
            )

    @property
    def num_nodes(self) -> Tensor:
        """[B] int64: real nodes per row."""
        assert self.lengths is not None
        return self.lengths

    @cached_property
    def real(self) -> Tensor:
        """[B, n] bool: which nodes are not padding."""
        order = torch.arange(self.width, device=self.tokens.device)
        return order < self.num_nodes[:, None]

    @property
    def width(self) -> int:
        """n: nodes of the widest row."""
        return self.tokens.shape[1]

    def select(self, rows: Tensor) -> Proposal:
        """The proposal of some rows [b] alone, without the window."""
        probs = None if self.draft_probs is None else self.draft_probs[rows]
        return Proposal(self.tokens[rows], self.parents[rows], probs, self.num_nodes[rows])

    def spread(self, rows: Sequence[int], count: int) -> Proposal:
        """The proposal of `count` rows, of which `rows` are these and the others draft nothing."""
        lengths = self.num_nodes.new_zeros(count)
        tokens = self.tokens.new_zeros(count, self.width)
        above = torch.arange(ROOT, self.width + ROOT, device=tokens.device).repeat(count, 1)
        index = torch.tensor(rows, device=tokens.device)
        tokens[index], above[index], lengths[index] = self.tokens, self.parents, self.num_nodes
        probs = None
        if self.draft_probs is not None:
            probs = self.draft_probs.new_zeros(count, *self.draft_probs.shape[1:])
            probs[index] = self.draft_probs
        return Proposal(tokens, above, probs, lengths)

    def to(self, device: torch.device) -> Proposal:
        """The same proposal with every tensor on a device."""
        if self.tokens.device == device:
            return self
        probs = None if self.draft_probs is None else self.draft_probs.to(device)
        window = self.window and Window(
            self.window.tokens.to(device),
            self.window.offsets.to(device),
            self.window.mask.to(device),
        )
        parts = (self.tokens.to(device), self.parents.to(device), probs)
        return Proposal(*parts, self.num_nodes.to(device), window)

    @staticmethod
    def chains(rows: Sequence[Sequence[int]], window: Window | None = None) -> Proposal:
        """A ragged batch of chosen chains, one list of token ids a row (may be empty)."""
        n = max(map(len, rows), default=0)
        if not n and window is None:
            return _nothing(len(rows))
        ids = torch.tensor([[*row, *[0] * (n - len(row))] for row in rows], dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return Proposal(ids.view(len(rows), n), chain_parents(n), None, lengths, window)

    @staticmethod
    def trees(
        rows: Sequence[tuple[Sequence[int], Sequence[int]]], window: Window | None = None
    ) -> Proposal:
        """A ragged batch of chosen trees: one (tokens, parents) pair a row."""
        n = max((len(tokens) for tokens, _ in rows), default=0)
        ids = torch.zeros(len(rows), n, dtype=torch.int64)
        if not n:
            return Proposal(ids, ids, window=window)
        # padding goes on like a chain, so that ragged chains stay chains (`tree.is_chain`)
        parents = torch.arange(-1, n - 1).repeat(len(rows), 1)
        for b, (tokens, above) in enumerate(rows):
            if len(tokens):
                ids[b, : len(tokens)] = torch.tensor(list(tokens))
                parents[b, : len(tokens)] = torch.tensor(list(above))
        lengths = torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.int64)
        return Proposal(ids, parents, lengths=lengths, window=window)


@lru_cache(maxsize=128)
def _nothing(rows: int) -> Proposal:
    """No node for any row. The same every time: not to be written to."""
    lengths = torch.zeros(rows, dtype=torch.int64)
    return Proposal(lengths.new_zeros(rows, 0), chain_parents(0), None, lengths)


def deepest(parents: Sequence[int]) -> int:
    """Depth of the deepest node of a tree, 1 below the root; 0 where there is none."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


@dataclass(frozen=True)
class Verdict:
    """What verification decided, per row.

    num_accepted: [B] int64, accepted draft tokens
    path:         [B, d] int64, the accepted nodes from the root down, -1 past the end
    next_token:   [B] int64, the recovered token, or the bonus token when everything on the
                  walked branch was accepted
    is_bonus:     [B] bool
    """

    num_accepted: Tensor
    path: Tensor
    next_token: Tensor
    is_bonus: Tensor
