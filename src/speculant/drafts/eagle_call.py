"""What an EAGLE draft drafts in one call of the compiled library (`native.chain`).

The same as `eagle` and `eagle_tree` do one operator at a time, for heads that the library runs
whole: what the rows committed in the last round, then chains of their likeliest tokens, or trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..heads.packed import Pairs
from .base import DraftRow
from .eagle_head import CachedHead
from .eagle_tree import Tree, Trust


@dataclass
class Slot:
    """What a request's slot holds besides its cache row."""

    output: Tensor | None = None  # [H], the head's output at the last pair
    taps: list[Tensor] = field(default_factory=list)  # not yet run: [m, len(taps) * H] in parts
    tokens: list[int] = field(default_factory=list)  # the tokens paired with them
    off: bool = False  # drafts no more: beyond the head's context, or its state holds NaN
    hoped: float = 0.0  # tokens of the last tree that its confidence promised
    trust: Trust = field(default_factory=Trust)


Slots = Mapping[int, Slot]


@dataclass(frozen=True)
class OneCall:
    """The calls of a draft; depth, tree, branch and fixed are the draft's."""

    passes: CachedHead
    depth: int
    tree: int
    branch: int
    fixed: bool

    def runs(self, rows: Sequence[DraftRow]) -> bool:
        """Whether it drafts for these rows: chosen trees, and chains of greedy rows."""
        if self.passes.chain is None or self.fixed or any(row.history.active for row in rows):
            return False
        return bool(self.tree) or all(row.params.greedy for row in rows)

    def runs_pairs(self, rows: Sequence[DraftRow], slots: Slots) -> bool:
        """Whether it can run what each of them committed in the last round, too: not a lot."""
        chain = self.passes.chain
        if chain is None or chain.fc is None or not self.runs(rows):
            return False
        return all(0 < len(slots[row.slot].tokens) <= self.depth + 1 for row in rows)

    def behind_pairs(
        self, rows: Sequence[DraftRow], slots: Slots, depths: Sequence[int]
    ) -> list[Tree | None]:
        """Run the rows' pending pairs and draft behind them; None for a row whose state holds NaN."""
        mine = [slots[row.slot] for row in rows]
        ids = torch.tensor([token for slot in mine for token in slot.tokens])
        taps = torch.cat([part for slot in mine for part in slot.taps])
        counts = [len(slot.tokens) for slot in mine]
        pairs = Pairs(taps, self.passes.embed(ids).to(taps).contiguous(), counts)
        drafted, first = self.behind(rows, slots, depths, pairs)
        finite = first.isfinite().all(dim=1).tolist()
        for i, slot in enumerate(mine):
            slot.output, slot.taps, slot.tokens = first[i], [], []
        return [tree if fine else None for tree, fine in zip(drafted, finite, strict=True)]

    def behind(
        self,
        rows: Sequence[DraftRow],
        slots: Slots,
        depths: Sequence[int],
        first: Tensor | Pairs,
    ) -> tuple[list[Tree], Tensor]:
        """Trees of these rows, a chain among them, and the outputs [b, H] behind which they are.

        first: those, or the pairs that give them, which become part of the cache
        """
        cache, chain, targets = self.passes.cache, self.passes.chain, self.passes.targets
        assert chain is not None
        numbers = [row.slot for row in rows]
        parts = (first, depths, numbers, [cache.lengths[slot] for slot in numbers], cache.data)
        out: list[Tree] = []
        broken: list[bool] = []
        if self.tree:
            prices = [
                None if p is None else (p.rate, p.nodes_ms, p.step_ms)
                for p in (row.prices for row in rows)
            ]
            trust = [slots[slot].trust.share for slot in numbers]
            branch = min(self.branch, len(targets))
            grown, outputs = chain.trees(*parts, branch, self.tree, prices, trust)
            for slot, tree in zip(numbers, grown, strict=True):
                slots[slot].hoped = tree.hoped
                out.append(([targets[i] for i in tree.ids], tree.parents))
                broken.append(tree.broken)
        else:
            chains, outputs = chain(*parts)
            for ids in chains:
                broken.append(-1 in ids)
                tokens = [targets[i] for i in (ids[: ids.index(-1)] if -1 in ids else ids)]
                out.append((tokens, list(range(-1, len(tokens) - 1))))
        for i, slot in enumerate(numbers):
            if isinstance(first, Pairs):
                cache.advance(slot, first.counts[i])
            if broken[i]:  # NaN may lie behind its length
                cache.erase(slot, cache.lengths[slot])
        return out, outputs
