"""A tiny target for tests: a real two-layer transformer over `CacheRows`, with random weights.

Small enough that a test can recompute everything it says by brute force: `FakeTarget.logits` is
the same model without a cache, in one forward over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache import CacheRows, KVCache
from speculant.drafts.base import Draft, DraftRow, Feedback
from speculant.history import History
from speculant.proposal import Proposal
from speculant.sampling import Random, SamplingParams
from speculant.target.base import LAST, TargetInfo

HIDDEN, HEADS, HEAD_DIM, KV_HEADS, LAYERS = 16, 2, 8, 1, 2


class FakeTokenizer:
    """One character a token; two tokenizers agree when their names do."""

    has_chat_template = False

    def __init__(self, name: str = "fake", eos_ids: frozenset[int] = frozenset({0})) -> None:
        self.name, self.eos_ids = name, eos_ids

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 32 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + i) for i in ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def fingerprint(self) -> str:
        return self.name


class FakeTarget:
    """Implements `Target`: attention with two query heads on one KV head, sinusoidal positions."""

    def __init__(
        self,
        seed: int = 0,
        vocab_size: int = 32,
        context_length: int = 512,
        name: str = "fake",
        tokenizer: FakeTokenizer | None = None,
        dtype: torch.dtype = torch.float32,
        sharpness: float = 4.0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

        self.embedding = weight(vocab_size, HIDDEN)
        self.head = weight(HIDDEN, vocab_size) * sharpness / HIDDEN**0.5
        self.qkv = [weight(HIDDEN, (HEADS + 2) * HEAD_DIM) / HIDDEN**0.5 for _ in range(LAYERS)]
        self.out = [weight(HEADS * HEAD_DIM, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS)]
        self.mlp = [weight(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS)]
        self.tokenizer = tokenizer or FakeTokenizer()
        self.num_forwards = 0
        self.info = TargetInfo(
            name=name,
            architecture="FakeForCausalLM",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=vocab_size,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            context_length=context_length,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def unembed(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head).to(_at_least_float(hidden.dtype))

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(LAYERS, rows, capacity, KV_HEADS, HEAD_DIM, self.info.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int] = (),
        need_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        if int(positions.max()) >= self.info.context_length:
            raise IndexError(f"position {int(positions.max())} is outside the context")
        self.num_forwards += 1
        x = self._embed(tokens, positions)  # shape: [B, T, H]
        states: dict[int, Tensor] = {}
        for i in range(LAYERS):
            states[i] = x
            q, k, v = self._project(i, x)  # shapes: [B, heads, T, D]
            cache.write(i, k, v)
            mixed = torch.empty_like(q)
            for a, b in cache.runs():
                keys, values = cache.read(i, a, b)
                mixed[a:b] = _attend(q[a:b], keys, values, cache.visible(a, b, mask))
            x = self._rest(i, x, mixed)
        states[LAST] = x = torch.nn.functional.rms_norm(x, (HIDDEN,))
        hidden = torch.cat([states[tap] for tap in taps], dim=-1) if taps else None
        return ((x @ self.head).to(_at_least_float(x.dtype)) if need_logits else None), hidden

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, V] of a whole sequence, without a cache."""
        ids = torch.tensor([list(tokens)])
        count = ids.shape[1]
        x = self._embed(ids, torch.arange(count)[None])
        causal = torch.ones(1, count, count, dtype=torch.bool).tril()
        for i in range(LAYERS):
            q, k, v = self._project(i, x)
            x = self._rest(i, x, _attend(q, k, v, causal))
        return (torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.head)[0]

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after `tokens`, by one uncached forward each."""
        out = list(tokens)
        for _ in range(count):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(tokens) :]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rates = 1 / 50 ** (torch.arange(HIDDEN // 2) / (HIDDEN // 2))
        angles = positions[..., None].to(self.info.dtype) * rates.to(self.info.dtype)
        return self.embedding[tokens] + torch.cat([angles.sin(), angles.cos()], dim=-1)

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = torch.nn.functional.rms_norm(x, (HIDDEN,))
        qkv = (normed @ self.qkv[layer]).unflatten(-1, (HEADS + 2, HEAD_DIM)).transpose(1, 2)
        return qkv[:, :HEADS], qkv[:, HEADS : HEADS + 1], qkv[:, HEADS + 1 :]

    def _rest(self, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed.transpose(1, 2).flatten(2) @ self.out[layer]
        return x + torch.tanh(torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.mlp[layer])


class Broken(FakeTarget):
    """From `position` of `slot` on, puts `value` into the logits and NaN into the K/V."""

    position, slot, value = 10**9, 0, float("nan")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int] = (),
        need_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        logits, hidden = super().forward(tokens, positions, mask, cache, taps, need_logits)
        bad = (positions >= self.position) & (torch.tensor(cache.slots) == self.slot)[:, None]
        if logits is not None and bad.any():
            logits[bad] = self.value
            for b, slot in enumerate(cache.slots):
                for column in bad[b].nonzero().flatten().tolist():
                    cache.cache.data[:, :, slot, :, cache.starts[b] + column] = float("nan")
        return logits, hidden


class Prunable(FakeTarget):
    """Can be cut to its first layers, as the fast decoder can (here: another random model)."""

    def pruned(self, layers: int) -> FakeTarget:
        return FakeTarget(seed=layers, name=f"pruned to {layers}")


def _at_least_float(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """[B, Hq, T, D] from keys and values [B, 1, S, D]; seen: [B, T, S] bool."""
    scores = queries @ keys.transpose(2, 3) / HEAD_DIM**0.5  # shape: [B, Hq, T, S]
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
    return weights @ values


def make_row(
    tokens: Sequence[int],
    slot: int = 0,
    params: SamplingParams | None = None,
    budget: int = 8,
    vocab_size: int = 32,
    seed: int = 1,
) -> DraftRow:
    """A request's row as the engine would make it."""
    params = params or SamplingParams(temperature=0)
    history = History(params, vocab_size, tokens, stop_ids=(0,))
    return DraftRow(slot, list(tokens), params, Random(seed), history, budget)


def commit(draft: Draft, row: DraftRow, proposal: Proposal, committed: Sequence[int]) -> None:
    """Tell a draft that its only row committed these tokens: all but the last were accepted."""
    row.tokens += committed
    row.history.commit(committed)
    draft.update([row], Feedback(proposal, [list(committed)], [list(range(len(committed) - 1))]))


class Verifier:
    """A greedy decode loop over a `FakeTarget`, written plainly: one row, trees and windows."""

    def __init__(self, target: FakeTarget, draft: Draft, row: DraftRow, room: int = 512) -> None:
        self.target, self.draft, self.row = target, draft, row
        self.cache = target.new_cache(1, room)
        draft.start(1, room)
        draft.open(row)
        self._forward(row.tokens[:-1], list(range(len(row.tokens) - 1)), None)
        self.cache.advance(0, len(row.tokens) - 1)
        draft.prefill(row, 0, None)

    def round(self) -> Feedback:
        """Propose, forward, verify, roll back; returns what the draft was told."""
        row = self.row
        proposal = self.draft.propose([row])
        ids, above, n = proposal.tokens[0].tolist(), proposal.parents[0].tolist(), proposal.width
        depths = [0]
        for parent in above:
            depths.append(depths[parent + 1] + 1)
        mask = torch.eye(1 + n, dtype=torch.bool)
        for i, parent in enumerate(above):
            mask[i + 1] |= mask[parent + 1]
        if proposal.window is not None:
            width = proposal.window.tokens.shape[1]
            ids += proposal.window.tokens[0].tolist()
            depths += proposal.window.offsets[0].tolist()
            full = torch.zeros(1 + n + width, 1 + n + width, dtype=torch.bool)
            full[: 1 + n, : 1 + n], full[1 + n :, 1 + n :] = mask, proposal.window.mask[0]
            full[1 + n :, 0] = True
            mask = full
        logits = self._forward([row.tokens[-1], *ids], depths, mask)
        path, node = [], -1
        while True:
            token = int(logits[node + 1].argmax())
            children = [i for i in range(n) if above[i] == node and ids[i] == token]
            if not children:
                break
            node = children[0]
            path.append(node)
        committed = [ids[i] for i in path] + [token]
        self.cache.keep(0, [0, *[i + 1 for i in path]])
        row.tokens += committed
        row.history.commit(committed)
        window_logits = None if proposal.window is None else logits[None, 1 + n :]
        feedback = Feedback(proposal, [committed], [path], window_logits=window_logits)
        self.draft.update([row], feedback)
        return feedback

    def _forward(self, tokens: list[int], offsets: list[int], mask: Tensor | None) -> Tensor:
        positions = torch.tensor([offsets]) + self.cache.lengths[0]
        rows = self.cache.rows([0], len(tokens))
        ids = torch.tensor([tokens])
        logits, _ = self.target.forward(ids, positions, None if mask is None else mask[None], rows)
        assert logits is not None
        return logits[0]
