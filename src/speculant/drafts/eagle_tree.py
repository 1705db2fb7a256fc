"""EAGLE-2's dynamic tree (Li et al. 2024b, arXiv 2406.16858, section 4): expand, then rerank.

A node's confidence is the product of the head's probabilities along its path. At every depth the
k nodes of highest confidence are expanded, each offering its k likeliest tokens; of all that was
offered, at any depth, the best m are the tree. Confidence falls along a path, so a node's ancestors
are never worse than it is and the best m hang together. Chosen, not sampled: no `draft_probs`.

With k = 2, tokens named by their paths, depth 3 (* expanded, numbers are confidences):

    root   a .6*   b .3*                          candidates a, b
           aa .4*  ab .1   ba .2*  bb .05         the best two of depth 2 are aa and ba
           aaa .3  aab .05  baa .1  bab .02       m = 5 keeps a, aa, b, aaa, ba

The expanded nodes' keys and values lie uncommitted behind the row's length, k a depth, while the
round lasts; each node sees the committed pairs, its ancestors and itself.

A row with `DraftRow.prices` keeps only nodes that are worth verifying, and goes a level deeper only
where that is worth a pass. Confidence is close to the probability of being accepted, and what it lacks
is learned from the request (`Trust`). A choice like that never biases the output: it depends on the
tokens so far, and nothing is drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..prices import Prices
from ..proposal import ROOT
from ..tree import best_nodes, node_paths
from .base import DraftRow
from .eagle_head import CachedHead

Tree = tuple[list[int], list[int]]
"""Target ids of the nodes and the parent of each."""
CHILDREN = 0.6
"""Of a node that would be accepted, how often one of its children is too: what a pass may find."""


@dataclass
class Trust:
    """How many tokens are accepted for one that a head's confidence promises, in one request.

    Both fade by half every 32 rounds, and begin as if FIRST tokens had been promised and accepted.
    """

    promised: float = 0.0
    accepted: float = 0.0

    FIRST: ClassVar[float] = 4.0
    FADE: ClassVar[float] = 0.5 ** (1 / 32)

    def learn(self, promised: float, accepted: int) -> None:
        """A tree whose nodes' confidences sum up to `promised`; nothing where it had none."""
        if promised:
            self.promised = self.FADE * self.promised + promised
            self.accepted = self.FADE * self.accepted + accepted

    @property
    def share(self) -> float:
        """Accepted over promised."""
        return (self.FIRST + self.accepted) / (self.FIRST + self.promised)


@dataclass(frozen=True)
class _Frontier:
    """The k nodes a row that are expanded next.

    members: [r] int64, rows of the batch that go this deep
    nodes:   [r, k] int64, which candidates they are; scores: [r, k], their confidence, -inf: none
    hidden:  [r, k, H], the output that each was offered from
    mask:    [r, k, behind + k] bool, which uncommitted entries each sees, itself included
    """

    members: Tensor
    nodes: Tensor
    scores: Tensor
    hidden: Tensor
    mask: Tensor

    def select(self, keep: Tensor, width: int) -> _Frontier:
        """The rows that stay, keep: [r] bool, with their first `width` nodes."""
        rows = slice(None) if bool(keep.all()) else keep
        columns = self.mask.shape[2] - self.nodes.shape[1] + width  # what lies behind, and its own
        return _Frontier(
            self.members[rows],
            self.nodes[rows, :width],
            self.scores[rows, :width],
            self.hidden[rows, :width],
            self.mask[rows, :width, :columns],
        )


class _Growth:
    """The candidates of one round, for every row: k at depth 1, then k * k a depth.

    scores: [B, N] logarithm of the confidence, -inf where there is none
    tokens: [B, N] int64 draft ids; parents: [B, N] int64 candidates
    """

    def __init__(
        self,
        passes: CachedHead,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        branch: int,
        trust: Sequence[float],
    ) -> None:
        self.passes, self.rows, self.trust = passes, rows, trust
        self.priced = [(b, row.prices) for b, row in enumerate(rows) if row.prices]
        self.depths = torch.tensor(depths, device=passes.device)
        self.k = min(branch, len(passes.target_ids))
        total, device = self.k + (max(depths) - 1) * self.k**2, passes.device
        self.scores = torch.full((len(rows), total), -torch.inf, device=device)
        self.tokens = torch.zeros(len(rows), total, dtype=torch.int64, device=device)
        self.parents = torch.full_like(self.tokens, ROOT)
        self.broken = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.behind = 0  # entries of the cache that expanded nodes have taken

    def plant(self, outputs: Tensor) -> _Frontier:
        """Depth 1: the k likeliest tokens after each root, from the head's outputs [B, H]."""
        count, k, device = len(self.rows), self.k, outputs.device
        logits = self.passes.logits(outputs[:, None], self.rows, lambda i: [[]])
        scores, tokens = likeliest(logits[:, 0], k)  # shape: [B, k]
        self.scores[:, :k], self.tokens[:, :k] = scores, tokens
        nodes = torch.arange(k, device=device).expand(count, k)
        hidden = outputs[:, None].expand(count, k, -1)
        mask = torch.eye(k, dtype=torch.bool, device=device).expand(count, k, k)
        return _Frontier(torch.arange(count, device=device), nodes, scores, hidden, mask)

    def expand(self, frontier: _Frontier, depth: int) -> _Frontier:
        """One pass over the frontier: its children are the candidates of `depth`."""
        k, members, device = self.k, frontier.members, frontier.nodes.device
        width = frontier.nodes.shape[1]
        rows = [self.rows[b] for b in members.tolist()]
        tokens = self.tokens[members].gather(1, frontier.nodes)
        outputs = self.passes.run(
            [row.slot for row in rows],
            self.passes.target_ids[tokens],
            frontier.hidden,
            torch.full((width,), depth - 2, device=device),
            frontier.mask,
            behind=self.behind,
        )
        self.behind += width
        self.broken[members] |= ~outputs.isfinite().flatten(1).all(dim=1)
        logits = self.passes.logits(outputs, rows, lambda i: self._paths(frontier, i))
        scores, ids = likeliest(logits, k)  # shape: [r, width, k], child j of frontier node i
        scores = scores + frontier.scores[:, :, None]
        start = k + (depth - 2) * k * k
        end = start + width * k
        self.scores[members, start:end] = scores.flatten(1)
        self.tokens[members, start:end] = ids.flatten(1)
        self.parents[members, start:end] = frontier.nodes.repeat_interleave(k, dim=1)
        best = scores.flatten(1).sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :k]
        above = (chosen // k)[:, :, None]  # shape: [r, k, 1], the frontier node above each
        seen = frontier.mask.gather(1, above.expand(-1, -1, frontier.mask.shape[2]))
        own = torch.eye(k, dtype=torch.bool, device=device).expand(len(rows), k, k)
        hidden = outputs.gather(1, above.expand(-1, -1, outputs.shape[2]))
        mask = torch.cat([seen, own], dim=2)
        return _Frontier(members, start + chosen, best.values[:, :k], hidden, mask)

    def _paths(self, frontier: _Frontier, i: int) -> list[list[int]]:
        """Target ids from below the root down to each frontier node of its row i."""
        b = int(frontier.members[i])
        tokens = self.passes.target_ids[self.tokens[b]].tolist()
        paths = node_paths(self.parents[b].tolist(), tokens)
        return [paths[node + 1] for node in frontier.nodes[i].tolist()]

    def going_on(self, frontier: _Frontier, depth: int) -> _Frontier:
        """The rows that go as deep as `depth`, with the nodes that may have a child worth its price."""
        keep = (self.depths[frontier.members] >= depth) & (frontier.scores > -torch.inf).any(dim=1)
        if not self.priced:
            return frontier.select(keep, self.k)
        widths = [
            self._worth(b, sure) if go else 0
            for b, sure, go in zip(
                frontier.members.tolist(),
                frontier.scores.exp().tolist(),
                keep.tolist(),
                strict=True,
            )
        ]
        going = torch.tensor([width > 0 for width in widths], device=keep.device)
        return frontier.select(going, max(widths))

    def _worth(self, b: int, frontier: Sequence[float]) -> int:
        """How many nodes of a row's frontier to expand, the most confident first; 0: no pass pays.

        A child is no surer than its parent and stands behind it among all candidates, so that what a
        node in the parent's place would have to be worth bounds it. A pass is taken to find CHILDREN
        of what its nodes promise.
        """
        prices, trust = self.rows[b].prices, self.trust[b]
        if prices is None:
            return sum(sure > 0 for sure in frontier)
        every = self.scores[b].exp().sort(descending=True).values.tolist()
        width, gain = 0, 0.0
        for sure in frontier:
            rank = bisect_right(every, -sure, key=lambda other: -other)  # its own place
            price = prices.node(rank + 1)
            if trust * sure <= price:
                break
            width += 1
            gain += max(0.0, CHILDREN * trust * sure - price)
        return width if not prices.step_ms or gain > prices.rate * prices.step_ms else 0

    def best(self, count: int) -> tuple[list[Tree], list[float]]:
        """The tree of the `count` best candidates of every row, less what is not worth its price, and
        how many tokens it promises."""
        for b, prices in self.priced:
            self._leave_out(b, prices, count)
        kept, parents, lengths = best_nodes(self.scores, self.parents, count)
        ids = self.passes.target_ids[self.tokens.gather(1, kept)]  # shape: [B, m]
        columns = zip(ids.tolist(), parents.tolist(), lengths.tolist(), strict=True)
        sure = self.scores.gather(1, kept).exp()
        order = torch.arange(kept.shape[1], device=kept.device)
        hoped = (sure * (order < lengths[:, None])).sum(dim=1).tolist()
        return [(tokens[:n], above[:n]) for tokens, above, n in columns], hoped

    def _leave_out(self, b: int, prices: Prices, count: int) -> None:
        """Forbid a row's candidates behind the number, best first, that gains most."""
        best = self.scores[b].sort(descending=True, stable=True)
        most = min(count, len(best.values), len(prices.nodes_ms))
        costs = torch.tensor(prices.nodes_ms[:most], device=best.values.device) * prices.rate
        gains = self.trust[b] * best.values[:most].exp().cumsum(0) - costs
        number = 1 + int(gains.argmax()) if most and float(gains.max()) > 0 else 0
        self.scores[b, best.indices[number:]] = -torch.inf


def grow_trees(
    passes: CachedHead,
    rows: Sequence[DraftRow],
    depths: Sequence[int],
    outputs: Tensor,
    branch: int,
    count: int,
    trust: Sequence[float],
) -> tuple[list[Tree], list[float]]:
    """A tree of at most `count` nodes and `depths[i]` levels behind the root of every row, and the
    sum of its nodes' confidences.

    outputs: [b, H], the head's output that predicts each row's first drafted token
    branch:  k, nodes expanded a depth and tokens that each offers
    trust:   a row's `Trust.share`, for rows with prices
    The cache is left as it was: lengths do not move, and no NaN stays behind them.
    """
    growth = _Growth(passes, rows, depths, branch, trust)
    frontier = growth.plant(outputs)
    for depth in range(2, max(depths) + 1):
        frontier = growth.going_on(frontier, depth)
        if not len(frontier.members):
            break
        frontier = growth.expand(frontier, depth)
    for b in growth.broken.nonzero().flatten().tolist():
        passes.cache.erase(rows[b].slot, passes.cache.lengths[rows[b].slot])
    return growth.best(count)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of logits [..., V]: log-probabilities and ids, [..., count] each.

    In descending order, ties to the lowest id, also between the last one in and the first one out.
    Log-probabilities are -inf for a forbidden token, and where logits hold NaN or +inf.
    """
    flat = logits.flatten(0, -2)  # shape: [R, V]
    total = flat.logsumexp(dim=-1, keepdim=True)
    width = min(count + 1, flat.shape[1])
    values, ids = flat.topk(width, dim=-1)
    if width > count:  # equals at the edge: `topk` takes any of them
        edge = (values[:, count - 1] == values[:, count]) & (values[:, count] > -torch.inf)
        unclear = edge.nonzero().squeeze(1)
        if len(unclear):
            ordered = flat[unclear].sort(dim=-1, descending=True, stable=True)
            values[unclear], ids[unclear] = ordered.values[:, :width], ordered.indices[:, :width]
    ids, order = ids[:, :count].sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    scores = (values - total).masked_fill(~total.isfinite(), -torch.inf)
    shape = (*logits.shape[:-1], count)
    return scores.view(shape), ids.gather(1, order).view(shape)
