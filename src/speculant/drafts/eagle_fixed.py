"""EAGLE-1's fixed tree (Li et al. 2024a, arXiv 2401.15077): the same shape every round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..proposal import ROOT
from .base import DraftRow
from .eagle_head import CachedHead, Paths
from .eagle_tree import Tree, likeliest

FIXED = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""EAGLE-1's tree (Li et al. 2024a; the authors' code draws the same one for every model): 25
nodes, each by its path of ranks, 0 the likeliest. Level by level, so that parents come first."""


def plant_fixed(
    passes: CachedHead, rows: Sequence[DraftRow], depths: Sequence[int], outputs: Tensor
) -> list[Tree]:
    """The tree `FIXED` for every row, its first `depths[i]` levels; arguments as of `grow_trees`.

    One pass a level over the nodes that have children, whatever the head thinks of them.
    """
    place = {path: i for i, path in enumerate(FIXED)}
    parents = [place.get(path[:-1], ROOT) for path in FIXED]
    inner = [i for i, path in enumerate(FIXED) if i in set(parents)]
    device, count = outputs.device, len(rows)
    tokens = torch.zeros(count, len(FIXED), dtype=torch.int64, device=device)  # draft ids
    scores = torch.full((count, len(FIXED)), -torch.inf, device=device)
    broken = torch.zeros(count, dtype=torch.bool, device=device)
    hidden, above = outputs[:, None], [ROOT]  # the outputs that this level is offered from
    run: list[int] = []  # nodes whose entries lie behind the length, in order
    for depth in range(1, max(depths) + 1):
        mine = [i for i, path in enumerate(FIXED) if len(path) == depth]
        if not mine:
            break
        logits = passes.logits(hidden, rows, _fixed_paths(passes, tokens, above))
        best, ids = likeliest(logits, 1 + max(FIXED[i][-1] for i in mine))  # shape: [B, m, ranks]
        columns = [above.index(parents[i]) for i in mine]
        ranks = [FIXED[i][-1] for i in mine]
        tokens[:, mine], scores[:, mine] = ids[:, columns, ranks], best[:, columns, ranks]
        level = [i for i in mine if i in inner]
        if not level or depth == max(depths):
            break
        behind = len(run)
        run += level
        seen = [[_is_prefix(FIXED[j], FIXED[i]) for j in run] for i in level]
        outputs = passes.run(
            [row.slot for row in rows],
            passes.target_ids[tokens[:, level]],
            hidden[:, [above.index(parents[i]) for i in level]],
            torch.full((len(level),), depth - 1, device=device),
            torch.tensor(seen, device=device).expand(count, -1, -1),
            behind=behind,
        )
        broken |= ~outputs.isfinite().flatten(1).all(dim=1)
        hidden, above = outputs, level
    for b in broken.nonzero().flatten().tolist():
        passes.cache.erase(rows[b].slot, passes.cache.lengths[rows[b].slot])
    found = zip(passes.target_ids[tokens].tolist(), scores.tolist(), depths, strict=True)
    return [_cut(ids, parents, values, depth) for ids, values, depth in found]


def _is_prefix(path: tuple[int, ...], of: tuple[int, ...]) -> bool:
    return of[: len(path)] == path


def _fixed_paths(passes: CachedHead, tokens: Tensor, nodes: Sequence[int]) -> Paths:
    """Target ids from below the root down to some nodes of the fixed tree, row by row."""

    def paths(row: int) -> list[list[int]]:
        ids = passes.target_ids[tokens[row]].tolist()
        place = {path: i for i, path in enumerate(FIXED)}
        ways = [() if node == ROOT else FIXED[node] for node in nodes]
        return [[ids[place[way[: d + 1]]] for d in range(len(way))] for way in ways]

    return paths


def _cut(ids: list[int], parents: list[int], scores: list[float], depth: int) -> Tree:
    """A fixed tree's first levels, without forbidden tokens and what hangs on them."""
    kept: dict[int, int] = {ROOT: ROOT}
    tree: Tree = ([], [])
    for i, path in enumerate(FIXED):
        if len(path) <= depth and scores[i] > -torch.inf and parents[i] in kept:
            kept[i] = len(tree[0])
            tree[0].append(ids[i])
            tree[1].append(kept[parents[i]])
    return tree
