"""EAGLE drafting (Li et al. 2024a, 2024b, 2025): the head runs over the target's features, then on
its own outputs, as a chain or as a dynamic tree.

The head's cache holds one entry per position t: the pair of the target's features at t and token
t + 1. Between rounds, with tokens[0 .. L-1] committed and the root at L - 1:

    cached        pairs 0 .. L-2, all from the target's own features
    last output   of pair L - 2, which predicts token L, the first to draft

A drafted token is fed with the head's last output in place of features. Those entries lie behind
the cache's length and never become part of it: after verification the accepted positions are run
again from the target's features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..heads.base import EagleHead
from ..proposal import Proposal
from ..sampling import to_probs_rows
from .base import DraftInfo, DraftRow, Feedback
from .eagle_call import OneCall, Slot
from .eagle_fixed import FIXED, plant_fixed
from .eagle_head import CachedHead
from .eagle_tree import Tree, grow_trees
from .sample import argmax_tokens, chain_proposal, draw_tokens, sound_rows

MOST_PENDING = 256
"""Pairs that a row which drafts nothing lets gather before they are run: 1.8 MB of a small model's."""
CHUNK = 64
"""Of these, so many are run in one pass."""


class EagleDraft:
    """A chain, sampled with `draft_probs` or chosen when every row is greedy; or a dynamic tree.

    head:             EAGLE-1's or EAGLE-3's, on the target's device
    embed:            token ids -> the target's input embeddings
    target_vocab:     V of the target
    num_draft_tokens: most tokens of a chain, or depth of the tree
    tree:             nodes of the tree; 0 drafts a chain
    branch:           k, nodes expanded a depth and tokens that each offers
    fixed:            draft EAGLE-1's fixed tree of 25 nodes instead; `tree` and `branch` do not count
    """

    def __init__(
        self,
        head: EagleHead,
        embed: Callable[[Tensor], Tensor],
        target_vocab: int,
        num_draft_tokens: int = 5,
        tree: int = 0,
        branch: int = 8,
        name: str = "eagle3",
        fixed: bool = False,
    ) -> None:
        if fixed:
            tree = len(FIXED)
        for what, value, least in (
            ("num_draft_tokens", num_draft_tokens, 1),
            ("tree", tree, 0),
            ("branch", branch, 1),
        ):
            if value < least:
                raise ValueError(f"draft {name!r}: {what} is {value}: it must be at least {least}")
        self.passes = CachedHead(head, embed, target_vocab)
        self.tree, self.branch, self.fixed = tree, branch, fixed
        self.limit = head.config.context_length
        options: dict[str, object] = {"num_draft_tokens": num_draft_tokens, "tree": tree}
        nodes, depth = num_draft_tokens, num_draft_tokens
        if tree:
            deepest = len(FIXED[-1]) if fixed else tree
            nodes, depth = tree, min(num_draft_tokens, deepest)
            options["branch"] = branch
        self.info = DraftInfo(
            name, head.config.taps, nodes, options=options, max_depth=depth,
            priced=bool(tree) and not fixed,
        )  # fmt: skip
        self.whole = OneCall(self.passes, depth, tree, branch, fixed)

    def start(self, rows: int, capacity: int) -> None:
        """Reserve the head's cache: behind a row's length lie what is drafted, or a ragged batch's
        padding, which is as wide as the longest row's pending pairs."""
        depth = self.info.depth
        spare = max(self.branch * (depth - 1) if self.tree else depth, depth + 1, CHUNK)
        self.passes.start(rows, min(capacity, self.limit) + spare)
        self._slots: dict[int, Slot] = {}

    def open(self, row: DraftRow) -> None:
        """A request took the slot."""
        self._slots[row.slot] = Slot()

    def resume(self, row: DraftRow, shared: int) -> int:
        """Keep the pairs of shared tokens, but for the last of them, whose next token is another.

        The token before the root is run again: the head's output there drafts.
        """
        cache, slot = self.passes.cache, row.slot
        kept = max(0, min(shared - 1, cache.lengths[slot], len(row.tokens) - 2))
        if not bool(cache.data[:, :, slot, :, :kept].isfinite().all()):
            kept = 0
        cache.erase(slot, kept)
        self.open(row)
        return kept

    def close(self, slot: int) -> None:
        """Empty the slot."""
        gone = self._slots.pop(slot, None)
        self.passes.cache.truncate(slot, 0)
        if gone and gone.output is not None and not bool(gone.output.isfinite().all()):
            self.passes.cache.erase(slot, 0)  # it left before it could be given up

    @torch.inference_mode()
    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Run the pairs of prompt positions [start, start + T), from the target's states."""
        assert hidden is not None
        slot, end = self._slots[row.slot], start + len(hidden)
        slot.off |= end > self.limit  # longer than the head's context: it goes on undrafted
        if slot.off:
            return
        slot.taps = [hidden.to(self.passes.dtype)]
        slot.tokens = row.tokens[start + 1 : end + 1]
        self._run_pending([row.slot])

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft a chain or a tree for every row, one pass of the head a depth."""
        depths = [self._depth(row) for row in rows]
        live = [b for b, depth in enumerate(depths) if depth > 0]
        mine, deep = [rows[b] for b in live], [depths[b] for b in live]
        if mine and self.whole.runs_pairs(mine, self._slots):
            idle = [row for row, depth in zip(rows, depths, strict=True) if not depth]
            self._catch_up(idle, [0] * len(idle))
            return self._placed(live, self.whole.behind_pairs(mine, self._slots, deep), rows)
        self._catch_up(rows, depths)
        states = [self._slots[rows[b].slot].output for b in live]
        outputs = [output for output in states if output is not None]
        if not outputs:
            return Proposal.chains([[] for _ in rows])
        hidden = torch.stack(outputs)  # shape: [b, H]
        finite = hidden.isfinite().all(dim=1).tolist()
        for b, fine in zip(live, finite, strict=True):
            if not fine:
                self._give_up(rows[b].slot)
        live = [b for b, fine in zip(live, finite, strict=True) if fine]
        hidden = hidden[finite]
        mine, deep = [rows[b] for b in live], [depths[b] for b in live]
        if mine and self.whole.runs(mine):
            return self._placed(live, self.whole.behind(mine, self._slots, deep, hidden)[0], rows)
        if not self.tree:
            return self._chains(rows, live, depths, hidden)
        trees: list[tuple[list[int], list[int]]] = [([], []) for _ in rows]
        if live:
            parts = (self.passes, [rows[b] for b in live], [depths[b] for b in live], hidden)
            if self.fixed:
                grown = plant_fixed(*parts)
            else:
                trust = [self._slots[rows[b].slot].trust.share for b in live]
                grown, hoped = grow_trees(*parts, self.branch, self.tree, trust)
                for b, promised in zip(live, hoped, strict=True):
                    self._slots[rows[b].slot].hoped = promised
            for b, tree in zip(live, grown, strict=True):
                trees[b] = tree
        return Proposal.trees(trees)

    @torch.inference_mode()
    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Keep the target's states of what was committed, for the next round's first pass.

        They are fused there, all that have gathered at once: a row that drafts nothing should cost
        next to nothing.
        """
        assert feedback.hidden is not None
        batch: list[int] = []
        sources: list[int] = []  # rows of the target's forward: the root, then accepted nodes
        taught: list[tuple[Slot, Sequence[int]]] = []
        for b, row in enumerate(rows):
            committed, slot = feedback.committed[b], self._slots[row.slot]
            slot.trust.learn(slot.hoped, len(feedback.paths[b]))
            slot.hoped = 0.0
            slot.off |= len(row.tokens) > self.limit
            if committed and not slot.off:
                path = [0, *(node + 1 for node in feedback.paths[b])][: len(committed)]
                batch += [b] * len(path)
                sources += path
                taught.append((slot, committed))
        if not taught:
            return
        taps = feedback.hidden[batch, sources].to(self.passes.dtype)
        parts = taps.split([len(committed) for _, committed in taught])
        for (slot, committed), mine in zip(taught, parts, strict=True):
            slot.taps.append(mine)
            slot.tokens += committed
            slot.output = None

    def _chains(
        self, rows: Sequence[DraftRow], live: list[int], depths: Sequence[int], hidden: Tensor
    ) -> Proposal:
        """A chain for each live row, from the head's outputs [b, H] that predict its first token."""
        passes = self.passes
        sampled = not all(row.params.greedy for row in rows)
        chains: list[list[int]] = [[] for _ in rows]
        drawn_from: list[tuple[list[int], Tensor]] = []  # a depth's rows b and probs [b, V]
        while live:
            mine, paths = [rows[b] for b in live], [[chains[b]] for b in live]
            logits = passes.logits(hidden[:, None], mine, paths.__getitem__)[:, 0]  # [b, Vd]
            probs = to_probs_rows(logits, [row.params for row in mine]) if sampled else logits
            sound = sound_rows(logits, probs)
            for i in set(range(len(live))).difference(sound):  # NaN may lie behind its length
                passes.cache.erase(mine[i].slot, passes.cache.lengths[mine[i].slot])
            live, probs, hidden = [live[i] for i in sound], probs[sound], hidden[sound]
            mine = [rows[b] for b in live]
            picked = draw_tokens(probs, mine) if sampled else argmax_tokens(probs)
            if sampled:
                drawn_from.append((live, passes.widen(probs)))
            for b, draft_id in zip(live, picked, strict=True):
                chains[b].append(passes.targets[draft_id])
            go_on = [i for i, b in enumerate(live) if len(chains[b]) < depths[b]]
            live, hidden = [live[i] for i in go_on], hidden[go_on]
            if live:
                drafted = len(chains[live[0]]) - 1  # entries behind every length
                tokens = torch.tensor([chains[b][-1:] for b in live], device=passes.device)
                offsets = torch.tensor([drafted], device=passes.device)
                slots = [rows[b].slot for b in live]
                hidden = passes.run(slots, tokens, hidden[:, None], offsets, behind=drafted)[:, 0]
        return chain_proposal(chains, drawn_from, passes.target_vocab, sampled)

    def _placed(
        self, live: Sequence[int], drafted: Sequence[Tree | None], rows: Sequence[DraftRow]
    ) -> Proposal:
        """The proposal in which these batch rows have these trees, and the others nothing.

        A row with None is given up.
        """
        trees: list[Tree] = [([], [])] * len(rows)
        for b, tree in zip(live, drafted, strict=True):
            if tree is None:
                self._give_up(rows[b].slot)
            else:
                trees[b] = tree
        if self.tree:
            return Proposal.trees(trees)
        return Proposal.chains([tokens for tokens, _ in trees])

    def _depth(self, row: DraftRow) -> int:
        """How far to draft, settled before anything is sampled."""
        slot = self._slots[row.slot]
        if slot.off or (slot.output is None and not slot.taps):
            return 0  # nothing is known yet behind a prompt of one token
        return max(0, min(row.budget, self.info.depth, self.limit - len(row.tokens)))

    def _catch_up(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        """Run the pairs of the last round's committed tokens, rows together."""
        together: list[int] = []
        for row, depth in zip(rows, depths, strict=True):
            waiting = len(self._slots[row.slot].tokens)
            if waiting > self.info.depth + 1:  # it drafted nothing for some rounds
                if depth or waiting > MOST_PENDING:
                    self._run_chunks(row.slot)
            elif waiting and depth:
                together.append(row.slot)
        if together:
            self._run_pending(together)

    def _run_pending(self, numbers: Sequence[int]) -> None:
        """Run the pending pairs of some slots in one pass, padded at the tail, into the cache."""
        passes, slots = self.passes, [self._slots[number] for number in numbers]
        width = max(len(slot.tokens) for slot in slots)
        features = torch.zeros(
            len(slots), width, passes.head.config.hidden_size,
            dtype=passes.dtype, device=passes.device,
        )  # fmt: skip
        counts = [len(slot.tokens) for slot in slots]
        fused = passes.head.fuse(torch.cat([part for slot in slots for part in slot.taps]))
        for i, mine in enumerate(fused.split(counts)):
            features[i, : counts[i]] = mine
        ids = torch.tensor([[*s.tokens, *[0] * (width - len(s.tokens))] for s in slots])
        offsets = torch.arange(width, device=passes.device)
        outputs = passes.run(numbers, ids.to(passes.device), features, offsets, counts=counts)
        for i, (number, slot) in enumerate(zip(numbers, slots, strict=True)):
            passes.cache.advance(number, len(slot.tokens))
            slot.output = outputs[i, len(slot.tokens) - 1]
            slot.taps, slot.tokens = [], []

    def _run_chunks(self, number: int) -> None:
        """Run a slot's many pending pairs some at a time."""
        slot = self._slots[number]
        taps, tokens = torch.cat(slot.taps), slot.tokens
        for start in range(0, len(tokens), CHUNK):
            end = start + CHUNK
            slot.taps, slot.tokens = [taps[start:end]], tokens[start:end]
            self._run_pending([number])

    def _give_up(self, slot: int) -> None:
        """The head's state of a row holds NaN: the request goes on undrafted."""
        self._slots[slot] = Slot(off=True)
        self.passes.cache.erase(slot, 0)
