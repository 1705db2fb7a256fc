"""Expected tokens of a tree, from an acceptance-per-rank model.

Given that a node is on the accepted path, the target's next token is the draft's first choice with
probability alpha. If it is not, it is the second choice with probability alpha * decay of what is
left, the third with alpha * decay^2 of what is left then, and so on. One constant, `decay`, is
fitted on published chains and trees of the same head (`tune/data/constants.json`). A node is
reached when every node on its path was accepted, so a tree commits 1 + the sum over its nodes of
the product of rank rates along the path, and the best tree of m nodes holds the m largest products
(a parent's product is never below its child's).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .formulas import Acceptance, position_rates


@dataclass(frozen=True)
class TreeShape:
    """The best tree of a size: expected tokens a forward, and how many nodes at each depth."""

    expected_tokens: float
    nodes_per_depth: tuple[int, ...]
    widest: int  # most children of one node

    @property
    def nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return sum(self.nodes_per_depth)

    @property
    def depth(self) -> int:
        """Longest path, in drafted tokens."""
        return len(self.nodes_per_depth)


def rank_rates(alpha: float, branch: int, decay: float) -> list[float]:
    """Probability that the target's token is the draft's choice of rank 1..branch."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}: it lies in 0..1")
    left, rates = 1.0, []
    for rank in range(branch):
        hit = left * alpha * decay**rank
        rates.append(hit)
        left -= hit
    return rates


def conditional_rates(acceptance: Acceptance, depth: int) -> list[float]:
    """Acceptance at position i given that position i - 1 was accepted, i in 1..depth."""
    rates = position_rates(acceptance, depth)
    before = [1.0, *rates[:-1]] if rates else []
    return [
        now / earlier if earlier > 0 else 0.0 for now, earlier in zip(rates, before, strict=True)
    ]


def best_tree(
    acceptance: Acceptance, nodes: int, depth: int, branch: int, decay: float
) -> TreeShape:
    """The tree of at most `nodes` drafted nodes, `depth` levels, `branch` children a node.

    acceptance: of the first choice, per position (unconditional) or constant
    decay:      see `rank_rates`
    """
    if nodes < 0 or depth < 0 or branch < 1:
        raise ValueError(f"nodes {nodes}, depth {depth}, branch {branch}: 0, 0 and 1 at least")
    per_depth = [rank_rates(alpha, branch, decay) for alpha in conditional_rates(acceptance, depth)]
    order = 0  # ties go to the node found first, so that the same inputs give the same tree
    heap: list[tuple[float, int, int, int]] = []
    if per_depth:
        for rank, rate in enumerate(per_depth[0]):
            heapq.heappush(heap, (-rate, order := order + 1, 0, rank))
    total, counts, widest = 1.0, [0] * depth, 0
    for _ in range(nodes):
        if not heap:
            break
        product, _, level, rank = heapq.heappop(heap)
        total -= product
        counts[level] += 1
        widest = max(widest, rank + 1)
        if level + 1 < depth:
            for child, rate in enumerate(per_depth[level + 1]):
                heapq.heappush(heap, (product * rate, order := order + 1, level + 1, child))
    while counts and counts[-1] == 0:
        counts.pop()
    return TreeShape(total, tuple(counts), widest)


def alpha_of_tree(
    expected: float, nodes: int, depth: int, branch: int, decay: float, steps: int = 40
) -> float:
    """The constant alpha at which the best tree commits `expected` tokens (bisection).

    Raises ValueError when it lies outside 1..depth + 1.
    """
    if not 1.0 <= expected <= depth + 1:
        raise ValueError(f"{expected:g} tokens a forward from depth {depth}: 1..{depth + 1}")
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        short = best_tree(middle, nodes, depth, branch, decay).expected_tokens < expected
        low, high = (middle, high) if short else (low, middle)
    return (low + high) / 2


def chain_or_tree(
    acceptance: Acceptance | Sequence[float], depth: int, nodes: int, branch: int, decay: float
) -> float:
    """Expected tokens of a proposal: a chain when nodes == depth, else the best such tree."""
    if nodes <= depth:
        return 1.0 + sum(position_rates(acceptance, min(nodes, depth)))
    return best_tree(acceptance, nodes, depth, branch, decay).expected_tokens
