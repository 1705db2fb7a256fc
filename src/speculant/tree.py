"""Trees of drafted tokens: ancestor masks, depths, paths, shapes.

Row 0 of everything here is the root, row i + 1 is node i of the proposal: the rows of the
target's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .proposal import ROOT, Proposal


def is_chain(parents: Tensor) -> bool:
    """True when every row of parents [B, n] is -1, 0, 1, ...: one branch."""
    n = parents.shape[1]
    return bool((parents == torch.arange(-1, n - 1, device=parents.device)).all())


def chain_rows(proposal: Proposal) -> Tensor:
    """[B] bool: which rows of a proposal are one branch, their padding aside."""
    if proposal.is_chain:
        return torch.ones_like(proposal.num_nodes, dtype=torch.bool)
    order = torch.arange(-1, proposal.width - 1, device=proposal.parents.device)
    return ((proposal.parents == order) | ~proposal.real).all(dim=1)


def depths(parents: Tensor) -> Tensor:
    """Depth of the root (0) and of every node: parents [B, n] -> [B, 1 + n] int64."""
    return ancestor_mask(parents).sum(dim=2) - 1


def ancestor_mask(parents: Tensor) -> Tensor:
    """Which rows each row may attend to: itself, its ancestors and the root.

    parents [B, n] -> [B, 1 + n, 1 + n] bool. For parents (-1, -1, 0):

              root  0  1  2
        root    1
        0       1   1
        1       1      1
        2       1   1     1
    """
    rows, n = parents.shape
    mask = torch.eye(n + 1, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    above = torch.nn.functional.pad(parents + 1, (1, 0))  # shape: [B, 1 + n], the root's is itself
    while bool(above.any()):  # each pass doubles how far up every row sees
        mask |= mask.gather(1, above[:, :, None].expand(-1, -1, n + 1))
        above = above.gather(1, above)
    mask[:, :, 0] = True
    return mask


def node_paths(parents: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Drafted tokens between the root and each row of one tree, the row's own token last.

    Row 0, the root, has the empty path.
    """
    paths: list[list[int]] = [[]]
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def shape_parents(branching: Sequence[int]) -> list[int]:
    """Parents of a full tree, breadth first: [2, 2, 2] -> 2 + 4 + 8 nodes.

    `branching[d]` is the number of children of every node at depth d.
    """
    parents: list[int] = []
    level = [ROOT]
    for width in branching:
        if width < 1:
            raise ValueError(f"tree shape {list(branching)}: every width must be at least 1")
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return parents


def best_nodes(scores: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best candidates of every row as a tree: EAGLE-2's reranking (Li et al. 2024b, 4.2).

    scores:  [B, N] cumulative confidence, a product along the path or its logarithm; -inf: none
    parents: [B, N] int64, the candidate above each, or ROOT; it comes before its children

    A child scores no more than its parent, and of equals the first wins, so whatever is kept has
    its ancestors with it. Returns the kept candidates [B, m] in their order, m = min(count, N),
    their parents [B, m] among the kept, and how many are real [B]; padding goes on like a chain.
    """
    total, device = scores.shape[1], scores.device
    width = min(count, total)
    best, order = scores.sort(dim=1, descending=True, stable=True)
    absent = best[:, :width] == -torch.inf
    kept = order[:, :width].masked_fill(absent, total).sort(dim=1).values  # shape: [B, m]
    place = torch.zeros_like(scores, dtype=torch.int64)  # of every candidate among the kept
    place = torch.nn.functional.pad(place, (1, 1))  # shape: [B, 1 + N + 1], ROOT's and none's too
    place.scatter_(1, kept + 1, torch.arange(width, device=device).expand_as(kept))
    place[:, 0] = ROOT
    chain = torch.arange(-1, width - 1, device=device)
    real = kept < total
    kept = kept.clamp(max=total - 1)
    above = place.gather(1, parents.gather(1, kept) + 1)
    return kept, torch.where(real, above, chain), real.sum(dim=1)


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Node indices from the root down to every leaf, in leaf order."""
    inner = set(parents)
    paths = []
    for leaf in (i for i in range(len(parents)) if i not in inner):
        path, node = [], leaf
        while node != ROOT:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    assert all(parents[b] == a for path in paths for a, b in pairwise(path))
    return paths


def forward_layout(proposal: Proposal) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of the target's forward for a proposal, root and window included.

    Returns tokens [B, n + w] without the root, offsets [B, 1 + n + w] from the root's position,
    and the mask [B, T, T] bool with T = 1 + n + w, or None when it is causal.
    """
    parents, window = proposal.parents, proposal.window
    if window is None and not proposal.width:
        return proposal.tokens, parents.new_zeros(len(parents), 1), None
    if window is None and (proposal.is_chain or is_chain(parents)):
        offsets = torch.arange(proposal.width + 1, device=parents.device)
        return proposal.tokens, offsets.expand(len(parents), -1), None
    mask = ancestor_mask(parents)
    offsets = mask.sum(dim=2) - 1
    if window is None:
        return proposal.tokens, offsets, mask
    nodes, extra = mask.shape[1], window.tokens.shape[1]
    full = torch.zeros(len(parents), nodes + extra, nodes + extra, dtype=torch.bool)
    full = full.to(mask.device)
    full[:, :nodes, :nodes] = mask
    full[:, nodes:, nodes:] = window.mask
    full[:, nodes:, 0] = True  # every window row sees the root
    tokens = torch.cat([proposal.tokens, window.tokens], dim=1)
    return tokens, torch.cat([offsets, window.offsets], dim=1), full
