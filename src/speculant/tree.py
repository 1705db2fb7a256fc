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
    order = torch.arange(-1, proposal.width - 1, device=proposal.parents.device)
    return ((proposal.parents == order) | ~proposal.real).all(dim=1)


def depths(parents: Tensor) -> Tensor:
    """Depth of the root (0) and of every node: parents [B, n] -> [B, 1 + n] int64."""
    rows, n = parents.shape
    out = torch.zeros(rows, n + 1, dtype=torch.int64, device=parents.device)
    for i in range(n):
        above = parents[:, i : i + 1] + 1
        out[:, i + 1] = out.gather(1, above).squeeze(1) + 1
    return out


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
    batch = torch.arange(rows, device=parents.device)
    for i in range(n):
        mask[:, i + 1] |= mask[batch, parents[:, i] + 1]
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
    if window is None and is_chain(parents):
        offsets = torch.arange(proposal.width + 1, device=parents.device)
        return proposal.tokens, offsets.expand(len(parents), -1), None
    offsets, mask = depths(parents), ancestor_mask(parents)
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
