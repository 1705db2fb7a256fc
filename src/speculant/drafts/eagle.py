"""EAGLE-3 drafting (Li et al. 2025): the head runs over the target's features, then on its own outputs.

The head's cache holds one entry per position t: the pair of the target's features at t and token
t + 1. Between rounds, with tokens[0 .. L-1] committed and the root at L - 1:

    cached        pairs 0 .. L-2, all from the target's own features
    last output   of pair L - 2, which predicts token L, the first to draft

A drafted token is fed with the head's last output in place of features. Those entries are rolled
back after verification, and the accepted positions are run again from the target's features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import CacheRows, KVCache, additive
from ..heads.eagle3 import Eagle3Head
from ..proposal import Proposal
from ..sampling import to_probs_rows
from .base import DraftInfo, DraftRow, Feedback
from .sample import argmax_tokens, chain_proposal, draw_tokens, sound_rows


@dataclass
class _Slot:
    """What a request's slot holds besides its cache row."""

    output: Tensor | None = None  # [H], the head's output at the last pair
    features: Tensor | None = None  # [m, H], fused features not yet run
    tokens: tuple[int, ...] = ()  # the tokens paired with them


class Eagle3Draft:
    """A chain from an EAGLE-3 head: sampled with `draft_probs`, or chosen when every row is greedy.

    head:         the head, on the target's device
    embed:        token ids -> the target's input embeddings
    target_vocab: V of the target
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[Tensor], Tensor],
        target_vocab: int,
        num_draft_tokens: int = 5,
    ) -> None:
        self.head, self.embed, self.target_vocab = head, embed, target_vocab
        self.info = DraftInfo("eagle3", head.config.taps, max_nodes=num_draft_tokens)
        self.limit = head.config.context_length
        self.target_ids = head.target_ids

    def start(self, rows: int, capacity: int) -> None:
        """Reserve the head's cache."""
        c, weight = self.head.config, self.head.fc.weight
        self.cache = KVCache(1, rows, capacity, c.kv_heads, c.head_dim, weight.dtype, weight.device)
        self._slots: dict[int, _Slot] = {}

    def open(self, row: DraftRow) -> None:
        """A request took the slot."""
        self._slots[row.slot] = _Slot()

    def close(self, slot: int) -> None:
        """Empty the slot."""
        self._slots.pop(slot, None)
        self.cache.truncate(slot, 0)

    @torch.inference_mode()
    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Run the pairs of prompt positions [start, start + T), from the target's states."""
        assert hidden is not None
        end = start + len(hidden)
        if end > self.limit:  # longer than the head's context: the request goes on undrafted
            self._slots[row.slot] = _Slot()
            return
        features = self.head.fuse(hidden.to(self.head.fc.weight.dtype))[None]
        output = self._run([row.slot], [row.tokens[start + 1 : end + 1]], features)
        self.cache.advance(row.slot, end - start)
        self._slots[row.slot].output = output[0, -1]

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft a chain for every row, one pass of the head a depth."""
        depths = [self._depth(row) for row in rows]
        live = [b for b, depth in enumerate(depths) if depth > 0]
        self._catch_up([rows[b] for b in live])
        live = [b for b in live if self._slots[rows[b].slot].output is not None]
        sampled = not all(row.params.greedy for row in rows)
        chains: list[list[int]] = [[] for _ in rows]
        drawn_from: list[tuple[list[int], Tensor]] = []  # a depth's rows b and probs [b, V]
        outputs = [self._slots[rows[b].slot].output for b in live]
        hidden = torch.stack([h for h in outputs if h is not None]) if live else None
        while live and hidden is not None:
            logits = self._logits(hidden, [rows[b] for b in live], [chains[b] for b in live])
            probs = to_probs_rows(logits, [rows[b].params for b in live]) if sampled else logits
            sound = sound_rows(logits, probs)
            live, probs, hidden = [live[i] for i in sound], probs[sound], hidden[sound]
            picked = (
                draw_tokens(probs, [rows[b] for b in live]) if sampled else argmax_tokens(probs)
            )
            drawn_from.append((live, probs))
            for b, token in zip(live, picked, strict=True):
                chains[b].append(token)
            go_on = [i for i, b in enumerate(live) if len(chains[b]) < depths[b]]
            live, hidden = [live[i] for i in go_on], hidden[go_on]
            if live:
                slots = [rows[b].slot for b in live]
                hidden = self._run(slots, [chains[b][-1:] for b in live], hidden[:, None])[:, 0]
                for slot in slots:
                    self.cache.advance(slot, 1)
        return chain_proposal(chains, drawn_from, self.target_vocab, sampled)

    @torch.inference_mode()
    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Roll the cache back to the target's features, and keep the new ones for the next round."""
        assert feedback.hidden is not None
        for b, row in enumerate(rows):
            committed, slot = feedback.committed[b], self._slots.get(row.slot)
            if slot is None or not committed:
                continue
            before = len(row.tokens) - len(committed) - 1  # pairs that came from the target
            done = self.cache.lengths[row.slot]
            self.cache.truncate(row.slot, min(done, before))
            sources = [0, *(node + 1 for node in feedback.paths[b])][: len(committed)]
            taps = feedback.hidden[b, sources].to(self.head.fc.weight.dtype)
            features, tokens = self.head.fuse(taps), tuple(committed)
            if slot.features is not None:  # a round that drafted nothing left some behind
                features = torch.cat([slot.features, features])
                tokens = slot.tokens + tokens
            slot.features, slot.tokens, slot.output = features, tokens, None

    def _depth(self, row: DraftRow) -> int:
        """How far to draft, settled before anything is sampled."""
        slot, length = self._slots[row.slot], self.cache.lengths[row.slot]
        known = slot.output is not None or slot.features is not None
        if not known or length + len(slot.tokens) != len(row.tokens) - 1:
            return 0  # a prompt of one token, or one longer than the head's context
        return min(row.budget, self.info.max_nodes, self.limit - len(row.tokens))

    def _catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Run the features of the last round's committed tokens, rows together."""
        behind = [row.slot for row in rows if self._slots[row.slot].features is not None]
        if not behind:
            return
        slots = [self._slots[s] for s in behind]
        width = max(len(slot.tokens) for slot in slots)
        features = self.head.fc.weight.new_zeros(len(behind), width, self.head.config.hidden_size)
        for i, slot in enumerate(slots):
            assert slot.features is not None
            features[i, : len(slot.tokens)] = slot.features
        outputs = self._run(behind, [slot.tokens for slot in slots], features)
        for i, (number, slot) in enumerate(zip(behind, slots, strict=True)):
            self.cache.advance(number, len(slot.tokens))
            slot.output = outputs[i, len(slot.tokens) - 1]
            slot.features, slot.tokens = None, ()

    def _run(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], hidden: Tensor) -> Tensor:
        """One pass over new pairs [b, T] behind each slot's length, padded at the tail: [b, T, H]."""
        width = hidden.shape[1]
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        rows = self.cache.rows(slots, width)
        starts = torch.tensor(rows.starts, device=hidden.device)
        positions = starts[:, None] + torch.arange(width, device=hidden.device)
        embedded = self.embed(ids).to(hidden)
        out: Tensor = self.head(embedded, hidden, positions, _attention(rows, self.head))
        return out

    def _logits(
        self, hidden: Tensor, rows: Sequence[DraftRow], chains: Sequence[Sequence[int]]
    ) -> Tensor:
        """Logits [b, V] over the target's vocabulary; -inf for tokens the head never drafts."""
        small = self.head.logits(hidden)  # shape: [b, Vd]
        logits = small.new_full((len(rows), self.target_vocab), -torch.inf)
        logits[:, self.target_ids] = small
        if not any(row.history.active for row in rows):
            return logits
        adjusted = [
            row.history.adjust(logits[i : i + 1].to(row.history.device), [chains[i]])
            for i, row in enumerate(rows)
        ]
        return torch.cat(adjusted).to(logits.device)


def _attention(rows: CacheRows, head: Eagle3Head) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of new pairs over the head's cache."""
    groups = head.config.num_heads // head.config.kv_heads

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        biases = [
            additive(rows.visible(a, b, None), groups, queries.dtype) for a, b in rows.stretches()
        ]
        return rows.attend(0, queries, keys, values, biases)

    return attend
