"""Medusa drafting (Cai et al. 2024, arXiv 2401.10774): a fixed sparse tree over the heads' choices.

With tokens[0 .. L-1] committed and the root at L - 1, the newest state of the target is the one at
L - 2, from which the root itself was predicted; head h predicts the token 2 + h behind it:

    position   L-2        L-1    L         L+1
    state      known      -      -         -
    token      ...        root   head 0    head 1      depth 1 is drafted by head 0

The heads do not depend on each other's tokens, so one product with the LM head gives every node.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads.medusa import MedusaHead
from ..proposal import ROOT, Proposal
from .base import DraftInfo, DraftRow, Feedback

UNMEASURED = (
    "the accuracies of these Medusa heads were never measured, so that they draft a usual tree; "
    "for one of their own: speculant import CHECKPOINT --out FOLDER --target TARGET"
)


@dataclass(frozen=True)
class Node:
    """A node of the tree: which choice (rank, from 0) of which head, under which node.

    head: depth - 1
    """

    parent: int
    head: int
    rank: int


class MedusaDraft:
    """Proposes one tree shape for all rows and rounds, cut at a row's budget; chosen nodes.

    head:      the heads, on the target's device; the tree is built from their measured accuracies,
               from `usual_accuracies` where they were never measured, with a warning
    unembed:   the target's LM head: states [..., H] -> logits [..., V] float32
    num_nodes: nodes of the tree
    """

    def __init__(
        self, head: MedusaHead, unembed: Callable[[Tensor], Tensor], num_nodes: int = 32
    ) -> None:
        self.head = head
        head.bind(unembed)
        accuracies = head.config.accuracies
        if not accuracies:
            accuracies = usual_accuracies(head.config.num_heads)
            warnings.warn(UNMEASURED, stacklevel=2)
        self.tree = sparse_tree(accuracies, num_nodes)
        self.ranks = 1 + max(node.rank for node in self.tree)
        self.info = DraftInfo(
            name="medusa",
            taps=head.config.taps,
            max_nodes=len(self.tree),
            max_depth=1 + max(node.head for node in self.tree),
            options={"num_nodes": num_nodes},
        )
        self._states: dict[int, Tensor] = {}  # slot -> [H], the target's newest state

    def start(self, rows: int, capacity: int) -> None:
        """Forget all slots."""
        self._states = {}

    def open(self, row: DraftRow) -> None:
        """Nothing is known before the prompt's forward, nor behind a prompt of one token."""
        self._states.pop(row.slot, None)

    def resume(self, row: DraftRow, shared: int) -> int:
        """Only the state of the last prompt token before the root is read: that one is run again."""
        self.open(row)
        return min(shared, len(row.tokens) - 2)

    def close(self, slot: int) -> None:
        """Empty the slot."""
        self._states.pop(slot, None)

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Keep the state of the last prompt token that was cached."""
        assert hidden is not None
        self._states[row.slot] = hidden[-1].clone()  # not a view: the rest of the chunk can go

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """The tree for every row that has a state, down to its budget."""
        live = [b for b, row in enumerate(rows) if row.slot in self._states and row.budget > 0]
        trees: list[tuple[list[int], list[int]]] = [([], []) for _ in rows]
        if live:
            depths = [min(rows[b].budget, self.info.depth) for b in live]
            chosen, sound = self._choose([rows[b].slot for b in live], max(depths))
            for i, b in enumerate(live):
                trees[b] = self._grow(chosen[i], min(depths[i], sound[i]))
        return Proposal.trees(trees)

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Keep the state of the token before the new root: the last one that was forwarded."""
        assert feedback.hidden is not None
        for b, row in enumerate(rows):
            count = len(feedback.committed[b])
            if count:
                sources = [0, *(node + 1 for node in feedback.paths[b])][:count]
                self._states[row.slot] = feedback.hidden[b, sources[-1]].clone()

    def _choose(self, slots: Sequence[int], heads: int) -> tuple[list[list[list[int]]], list[int]]:
        """The likeliest tokens [b][heads][ranks] of each slot, and how many heads are sound.

        A head whose logits hold NaN or infinity drafts nothing, nor do those behind it.
        """
        dtype = next(self.head.parameters()).dtype
        states = torch.stack([self._states[slot] for slot in slots])  # shape: [b, H]
        logits = self.head.logits(states.to(dtype), heads)  # shape: [b, heads, V]
        finite = logits.amax(dim=-1).isfinite().to(torch.int64)
        tokens: list[list[list[int]]] = logits.topk(self.ranks, dim=-1).indices.tolist()
        sound: list[int] = finite.cumprod(dim=1).sum(dim=1).tolist()
        return tokens, sound

    def _grow(self, chosen: Sequence[Sequence[int]], depth: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the tree's first `depth` levels, parents first."""
        tokens: list[int] = []
        parents: list[int] = []
        place = {ROOT: ROOT}  # node of the whole tree -> node of this one
        for i, node in enumerate(self.tree):
            if node.head < depth:
                place[i] = len(tokens)
                tokens.append(chosen[node.head][node.rank])
                parents.append(place[node.parent])
        return tokens, parents


def sparse_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[Node]:
    """The tree of at most `num_nodes` nodes with the most accepted tokens expected, parents first.

    accuracies: [heads][ranks], see `MedusaConfig`. A node is accepted when every choice on its path
    is right, estimated as the product of their accuracies; nodes are added from the likeliest down
    (Cai et al. 2024, section 2.3.3). A child is never likelier than its parent, so that this is the
    best tree. Nodes that never were right are left out, the first one aside.

    Raises ValueError without accuracies, or for less than one node.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}: it must be at least 1")
    if not accuracies:
        raise ValueError(
            "the Medusa heads have no measured accuracies, which the tree is built from"
        )
    nodes: list[Node] = []
    # (minus the chance, head, parent, rank): the shallower first among equals
    heap = [(-accuracy, 0, ROOT, rank) for rank, accuracy in enumerate(accuracies[0])]
    heapq.heapify(heap)
    while heap and len(nodes) < num_nodes:
        chance, head, parent, rank = heapq.heappop(heap)
        if chance == 0 and nodes:
            break
        nodes.append(Node(parent, head, rank))
        if head + 1 < len(accuracies):
            for below, accuracy in enumerate(accuracies[head + 1]):
                heapq.heappush(heap, (chance * accuracy, head + 1, len(nodes) - 1, below))
    return nodes


def usual_accuracies(num_heads: int, ranks: int = 10) -> tuple[tuple[float, ...], ...]:
    """Accuracies [heads][ranks] to build a tree from where none were measured.

    0.6 * 0.7^head / (rank + 1)^2, both from 0. Fitted to the nine trees of 63 nodes that Medusa's
    repository (e2a5d20, `medusa_choices.py`) publishes for its heads of Vicuna and Zephyr: the tree
    built from these shares 84 to 89 % of its nodes with each of them. It is for heads of that quality;
    weaker ones do better with a tree of their own.
    """
    return tuple(
        tuple(0.6 * 0.7**head / (rank + 1) ** 2 for rank in range(ranks))
        for head in range(num_heads)
    )
