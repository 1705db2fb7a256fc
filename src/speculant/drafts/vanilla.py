"""Vanilla speculative decoding (Leviathan et al. 2023, arXiv 2211.17192): a smaller model drafts.

The draft has a KV cache of its own. Between rounds it holds a prefix of the committed tokens; what
is missing up to the root ("pending": the root alone, or two tokens after a full acceptance, whose
last draft was never fed) goes in with the next proposal's first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..cache import KVCache
from ..heads.vanilla import VanillaHead
from ..heads.weights import check_target, head_kind, is_head, load_head
from ..proposal import Proposal
from ..sampling import to_probs_rows
from ..target.base import Target
from .base import DraftInfo, DraftRow, Feedback
from .sample import argmax_tokens, chain_proposal, draw_tokens, sound_rows

DEFAULT_LAYERS = 6
"""Layers of the target that draft for it when no other model is given."""
CHUNK = 256
"""Prompt tokens a forward."""
MAX_PENDING = 8
"""Pending tokens that are fed with the batch; more are caught up on first, row by row."""


class VanillaDraft:
    """A model with the target's tokenizer, drafting a chain token by token.

    model:            the drafting model
    target_vocab:     V, the target's vocabulary; the draft's is cut or padded to it
    num_draft_tokens: most tokens a round
    """

    def __init__(self, model: Target, target_vocab: int, num_draft_tokens: int = 4) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        self.model, self.target_vocab = model, target_vocab
        self.info = DraftInfo(
            name="vanilla",
            max_nodes=num_draft_tokens,
            options={"model": model.info.name, "num_draft_tokens": num_draft_tokens},
        )
        self.limit = 0
        self.cache: KVCache

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the draft's cache."""
        self.limit = min(capacity, self.model.info.context_length)
        # A ragged batch is padded at the tail: its shorter rows write up to MAX_PENDING - 1
        # entries that are not theirs behind their last token.
        self.cache = self.model.new_cache(rows, self.limit + MAX_PENDING)

    def open(self, row: DraftRow) -> None:
        """Start from an empty row."""
        self.cache.truncate(row.slot, 0)

    def resume(self, row: DraftRow, shared: int) -> int:
        """Keep what the cache holds of the shared tokens; the rest is caught up on as ever."""
        self.cache.truncate(row.slot, min(self._length(row), shared))
        return shared

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """Stay within a chunk of the target, so that no round has a whole prompt to catch up on."""
        self._catch_up(row, min(start + CHUNK, len(row.tokens) - 1, self.limit))

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft a chain for every row, one forward of the draft model a depth."""
        # How far to draft is settled here, before anything is sampled. The last draft comes from
        # feeding position len(tokens) + depth - 2, which the draft's context must still hold.
        depths = [
            min(row.budget, self.info.max_nodes, self.limit - len(row.tokens) + 1) for row in rows
        ]
        live = [b for b, depth in enumerate(depths) if depth > 0]
        for b in live:
            self._catch_up(rows[b], len(rows[b].tokens) - MAX_PENDING)
        sampled = not all(row.params.greedy for row in rows)
        chains: list[list[int]] = [[] for _ in rows]
        drawn_from: list[tuple[list[int], Tensor]] = []  # a depth's rows b and probs [b, V]
        while live:
            # at depth 0 what the cache lacks up to the root, then the token just drafted
            pending = [chains[b][-1:] or rows[b].tokens[self._length(rows[b]) :] for b in live]
            logits = self._feed([rows[b].slot for b in live], pending)  # shape: [b, V]
            logits = self._adjust(logits, [rows[b] for b in live], [chains[b] for b in live])
            probs = to_probs_rows(logits, [rows[b].params for b in live]) if sampled else logits
            sound = sound_rows(logits, probs)
            self._settle([rows[b].slot for b in live], pending, sound)
            live, probs = [live[i] for i in sound], probs[sound]
            tokens = (
                draw_tokens(probs, [rows[b] for b in live]) if sampled else argmax_tokens(probs)
            )
            for b, token in zip(live, tokens, strict=True):
                chains[b].append(token)
            drawn_from.append((live, probs))
            live = [b for b in live if len(chains[b]) < depths[b]]
        return chain_proposal(chains, drawn_from, self.target_vocab, sampled)

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """Roll back to what was committed, the new root left out."""
        for row in rows:
            self.cache.truncate(row.slot, min(self._length(row), len(row.tokens) - 1))

    def close(self, slot: int) -> None:
        """Empty the slot's row."""
        self.cache.truncate(slot, 0)

    def _length(self, row: DraftRow) -> int:
        return self.cache.lengths[row.slot]

    def _catch_up(self, row: DraftRow, end: int) -> None:
        """Feed one row's committed tokens until its cache holds the first `end`."""
        while (length := self._length(row)) < end:
            chunk = torch.tensor([row.tokens[length : min(end, length + CHUNK)]])
            count = chunk.shape[1]
            positions = torch.arange(length, length + count)[None]
            self._forward(chunk, positions, [row.slot], need_logits=False)
            self.cache.advance(row.slot, count)

    def _feed(self, slots: Sequence[int], pending: Sequence[Sequence[int]]) -> Tensor:
        """Logits [b, V] after each row's last pending token; the lengths stay as they are.

        Rows are padded at the tail, where the causal mask hides the padding from real tokens.
        """
        width = max(len(tokens) for tokens in pending)
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in pending])
        starts = torch.tensor([self.cache.lengths[slot] for slot in slots])
        positions = starts[:, None] + torch.arange(width)  # shape: [b, width]
        # Padding may stand past the last position the model has.
        positions = positions.clamp(max=self.model.info.context_length - 1)
        logits = self._forward(ids, positions, slots, need_logits=True)
        assert logits is not None
        last = torch.tensor([len(tokens) - 1 for tokens in pending], device=logits.device)
        return logits[torch.arange(len(slots), device=logits.device), last]

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Sequence[int], need_logits: bool
    ) -> Tensor | None:
        device = self.model.info.device
        rows = self.cache.rows(slots, tokens.shape[1])
        # a target's padding id that the draft's smaller table lacks: any other id will do here
        tokens = tokens.clamp(max=self.model.info.vocab_size - 1)
        logits, _ = self.model.forward(
            tokens.to(device), positions.to(device), None, rows, need_logits=need_logits
        )
        return logits

    def _adjust(
        self, logits: Tensor, rows: Sequence[DraftRow], chains: Sequence[Sequence[int]]
    ) -> Tensor:
        """Logits [b, V_draft] cut or padded to the target's V, penalties and bias applied.

        Padding is -inf, which every transform turns into probability 0.
        """
        missing = self.target_vocab - logits.shape[-1]
        if missing:  # a negative pad cuts
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        if not any(row.history.active for row in rows):
            return logits
        adjusted = [  # history lives on the target's device
            row.history.adjust(logits[i : i + 1].to(row.history.device), [chains[i]])
            for i, row in enumerate(rows)
        ]
        return torch.cat(adjusted).to(logits.device)

    def _settle(
        self, slots: Sequence[int], pending: Sequence[Sequence[int]], sound: Sequence[int]
    ) -> None:
        """Take what was fed into the cache of the sound rows, and nothing of a broken one.

        A broken row drafts no further but keeps its drafted tokens: dropping a sampled token after
        looking at what comes behind it would bias the output.
        """
        for i in sound:
            self.cache.advance(slots[i], len(pending[i]))
        for i in set(range(len(slots))).difference(sound):
            # No NaN may lie behind a row's length: attention's weight 0 times NaN is NaN.
            start = self.cache.lengths[slots[i]]
            self.cache.data[:, :, slots[i], :, start : start + len(pending[i])] = 0


def for_target(
    target: Target,
    model: Target | VanillaHead | str | Path | None = None,
    num_draft_tokens: int = 4,
    layers: int | None = None,
    force: bool = False,
) -> VanillaDraft:
    """A vanilla draft for a target; ValueError when their tokenizers differ.

    model:  a target, what `load_target` takes, or a trained head or its folder, which drafts with
            this target's embedding and LM head; None drafts with the target's own first layers
    layers: how many of them (default 6)
    force:  take a head that was trained for another target
    """
    if model is not None and layers is not None:
        raise ValueError("draft 'vanilla' takes model or layers, not both")
    if model is None:
        drafter = _pruned(target, DEFAULT_LAYERS if layers is None else layers)
    elif isinstance(model, VanillaHead):
        drafter = from_head(target, model, force)
    elif isinstance(model, str | Path) and is_head(Path(model)):
        head = load_head(Path(model))
        if not isinstance(head, VanillaHead):
            raise ValueError(f"{model}: a head of kind {head_kind(Path(model))!r}, not 'vanilla'")
        drafter = from_head(target, head, force)
    elif isinstance(model, str | Path):
        from ..target.load import load_target

        drafter = load_target(model)
    else:
        drafter = model
    ours, theirs = drafter.tokenizer.fingerprint(), target.tokenizer.fingerprint()
    if ours != theirs:
        raise ValueError(
            f"draft {drafter.info.name} has another tokenizer than target {target.info.name}: "
            f"fingerprint {ours}, not {theirs}"
        )
    return VanillaDraft(drafter, target.info.vocab_size, num_draft_tokens)


def from_head(target: Target, head: VanillaHead, force: bool = False) -> Target:
    """The drafting model that a trained head makes with its target's embedding and LM head.

    Raises ValueError (HeadError) for another target's head (`force` aside), for other sizes, and
    for a target that the fast decoder does not run.
    """
    c, info = head.config, target.info
    extend = getattr(target, "with_layers", None)
    if extend is None:
        raise ValueError(
            f"a vanilla head runs on the fast decoder only, and target {info.name} "
            f"({info.architecture}) does not: give a whole model as draft"
        )
    if (c.hidden_size, c.vocab_size) != (info.hidden_size, info.vocab_size):
        raise ValueError(
            f"the head is for hidden size {c.hidden_size} and vocabulary {c.vocab_size}; "
            f"{info.name} has {info.hidden_size} and {info.vocab_size}"
        )
    if c.target and info.folder is not None and not force:
        from ..target.load import target_fingerprint

        check_target(head, target_fingerprint(info.folder, target.tokenizer), info.name)
    from ..target.llama import LlamaConfig

    config = LlamaConfig(
        model_type="llama",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        context_length=c.context_length,
        tied=True,
        window=None,
    )
    name = f"{info.name}, {c.num_layers} trained layers"
    drafter: Target = extend(head.state_dict(), config, name)
    return drafter


def _pruned(target: Target, layers: int) -> Target:
    """The target's first layers under its own final norm and LM head."""
    prune = getattr(target, "pruned", None)
    if prune is None:
        raise ValueError(
            f"draft 'vanilla' needs a model: target {target.info.name} "
            f"({target.info.architecture}) cannot be pruned to its first layers"
        )
    pruned: Target = prune(layers)
    return pruned
