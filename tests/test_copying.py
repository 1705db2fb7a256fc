"""Heads that copy: what they are shown, what they look at from the start, and what they leave alone.

Independent truth: places found by plain loops over the text, and the head as it was before.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake import FakeTarget
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.weights import load_head, save_head
from speculant.train.copying import (
    UNSURE,
    can_copy,
    copying_heads,
    copying_loss,
    right_pairs,
    with_copying,
)
from speculant.train.data import Batch, Item
from speculant.train.features import States
from speculant.train.ttt import unroll

HIDDEN, VOCAB, HEADS, DIM = 64, 200, 2, 32
PAD = Item(Path("x"), 0, 0, 0, 0)


class Target:
    """Embeddings, and states that tell the token, its place and something else, as a target's do."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN, generator=g)
        self.told = torch.randn(HIDDEN, 2 * HIDDEN, generator=g) / HIDDEN**0.5
        self.info = FakeTarget().info.__class__(
            name="telling", architecture="x", num_layers=2, hidden_size=HIDDEN, vocab_size=VOCAB,
            kv_heads=1, head_dim=DIM, context_length=512, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def states(self, batch: Batch) -> States:
        g = torch.Generator().manual_seed(1)
        taps = self.table[batch.tokens] @ self.told
        taps = taps + 0.3 * torch.randn(taps.shape, generator=g)
        taps[:, 0] = 50.0 * torch.ones(taps.shape[-1])  # a first token's states are like no other's
        none = torch.zeros(())
        return States(taps[:, :-1], none, none, none)


def batch_of(texts: list[list[int]], prompts: list[int]) -> Batch:
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    answers = [len(text) - prompt for text, prompt in zip(texts, prompts, strict=True)]
    items = tuple(PAD for _ in texts)
    return Batch(tokens, torch.tensor(prompts), torch.tensor(answers), items)


def fitted() -> tuple[Target, Eagle3Head, Eagle3Head]:
    """A target, a head, and that head with copying heads."""
    target = Target()
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config(
        hidden_size=HIDDEN, intermediate_size=96, num_heads=HEADS, kv_heads=1, head_dim=DIM,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, taps=(0, 1), rope_theta=100_000.0,
    ))  # fmt: skip
    g = torch.Generator().manual_seed(2)
    texts = [torch.randint(1, VOCAB, (120,), generator=g).tolist() for _ in range(60)]
    batches = [batch_of(texts, [2] * len(texts))]
    whole: Any = target
    return target, head, with_copying(head, whole, whole, batches)


def attention(target: Target, head: Eagle3Head, batch: Batch) -> Tensor:
    """Step 0's weights of the copying heads [B, h, A, T]."""
    seen: list[Tensor] = []
    embedded, states = target.embed(batch.tokens[:, 1:]), target.states(batch)
    with torch.no_grad():
        unroll(head, embedded, head.fuse(states.taps), batch.bases, 1, lambda k, w: seen.append(w))
    return seen[0][:, HEADS:]


def test_they_look_where_the_last_token_stood_before_from_the_start() -> None:
    """A text of distinct tokens that begins anew: most are found."""
    target, _, head = fitted()
    g = torch.Generator().manual_seed(3)
    order = (torch.randperm(VOCAB - 1, generator=g) + 1).tolist()
    text = [*order[:60], *order[:40], *order[60:90]]
    batch = batch_of([text], [60])
    weights = attention(target, head, batch)[0]  # shape: [h, A, T]
    right, _ = right_pairs(batch, 0, weights.shape[-1])
    copied = list(range(2, 40))  # the first pair is the sink, and never copied from
    on = (weights * right[0]).sum(-1)[:, copied]
    assert float(on.mean()) > 0.6  # of sixty places
    first = weights[:, copied].argmax(-1) == right[0][copied].float().argmax(-1)
    assert float(first.float().mean()) > 0.6


def test_the_loss_teaches_where_there_is_nothing_to_copy() -> None:
    """A few steps on random repetitions: what is new then looks at the sink, what is not is found."""
    target, _, head = fitted()
    g = torch.Generator().manual_seed(5)

    def repetition() -> list[int]:
        order = (torch.randperm(VOCAB - 1, generator=g) + 1).tolist()
        return [*order[:60], *order[:40], *order[60:90]]

    def looked(batch: Batch) -> tuple[float, float]:
        """The loss, and what new tokens give to the sink."""
        weights = attention(target, head, batch)
        return float(copying_loss(weights, batch, 0)), float(weights[0, :, 42:69, 0].mean())

    test = batch_of([repetition()], [60])
    loss, fresh = looked(test)
    mine = [p for n, p in head.named_parameters() if "q_proj" in n or "k_proj" in n]
    optimizer = torch.optim.Adam(mine, lr=2e-3)
    for _ in range(100):
        batch, seen = batch_of([repetition() for _ in range(8)], [60] * 8), []
        watch = seen.append
        embedded, features = target.embed(batch.tokens[:, 1:]), head.fuse(target.states(batch).taps)
        unroll(head, embedded, features, batch.bases, 1, lambda _, w, to=watch: to(w))
        copying_loss(seen[0][:, HEADS:], batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert looked(test)[0] < 0.7 * loss
    assert looked(test)[1] > 1.5 * fresh


def test_a_copy_lifts_its_own_token() -> None:
    """Behind a repeated token, what followed it gains on all others against the head as it was."""
    target, old, new = fitted()
    g = torch.Generator().manual_seed(4)
    order = (torch.randperm(VOCAB - 1, generator=g) + 1).tolist()
    batch = batch_of([[*order[:60], *order[:40]]], [61])
    states, embedded = target.states(batch), target.embed(batch.tokens[:, 1:])
    with torch.no_grad():
        before, after = (
            head.logits(unroll(head, embedded, head.fuse(states.taps), batch.bases, 1)[0])[0]
            for head in (old, new)
        )
    gain = (after - before).log_softmax(-1)  # constants of a row do not count
    wanted = batch.tokens[0, 61:]
    ranks = (gain > gain.gather(1, wanted[:, None])).sum(-1)
    assert float((ranks < 3).float().mean()) > 0.6  # of two hundred tokens


def test_everything_else_is_as_it_was() -> None:
    """Without what the new heads say, outputs are the old head's; there is one group more."""
    target, old, new = fitted()
    assert (new.config.num_heads, new.config.kv_heads) == (2 * HEADS, 2)
    whole: Any = target
    assert copying_heads(new, whole) == HEADS
    assert copying_heads(old, whole) == 0
    with torch.no_grad():
        new.midlayer.self_attn.o_proj.weight[:, HEADS * DIM :] = 0
    batch = batch_of([[5, 9, 3, 5, 9, 3, 7], [1, 2, 3, 4, 0, 0, 0]], [3, 2])
    states, embedded = target.states(batch), target.embed(batch.tokens[:, 1:])
    with torch.no_grad():
        mine, theirs = (
            unroll(head, embedded, head.fuse(states.taps), batch.bases, 3) for head in (new, old)
        )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_they_are_saved_and_loaded(tmp_path: Path) -> None:
    _, _, new = fitted()
    save_head(new, tmp_path / "head")
    other = load_head(tmp_path / "head")
    assert isinstance(other, Eagle3Head)
    assert other.config.num_heads == new.config.num_heads


def test_heads_that_are_too_narrow_are_left_alone() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "kv_heads": 1,
             "vocab_size": 9, "draft_vocab_size": 9, "taps": (0,)}  # fmt: skip
    assert not can_copy(Eagle3Head(Eagle3Config(head_dim=8, **sizes)))  # type: ignore[arg-type]
    assert can_copy(Eagle3Head(Eagle3Config(head_dim=16, **sizes)))  # type: ignore[arg-type]


texts = st.lists(st.integers(1, 4), min_size=4, max_size=14)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(texts, st.integers(2, 3)), min_size=1, max_size=3), st.integers(0, 3))
def test_right_places_are_those_of_plain_loops(
    rows: list[tuple[list[int], int]], step: int
) -> None:
    batch = batch_of([text for text, _ in rows], [prompt for _, prompt in rows])
    pairs = batch.tokens.shape[1] - 1
    right, known = right_pairs(batch, step, pairs)
    for b, (text, prompt) in enumerate(rows):
        for a in range(batch.valid.shape[1]):
            at = prompt + a + step  # the token that step's pair predicts
            assert bool(known[b, a]) == (at < len(text))
            if at >= len(text):
                continue
            base = prompt + a - 2
            want = [
                0 < j <= base and text[j] == text[at - 1] and text[j + 1] == text[at]
                for j in range(pairs)
            ]
            assert right[b, a].tolist() == want


def test_the_loss_is_of_what_is_looked_at() -> None:
    """One row of two answers: of the first, pair 1 is right; of the second none, so the sink is."""
    batch = batch_of([[9, 5, 6, 5, 6, 8]], [4])
    weights = torch.tensor([[[[0.2, 0.5, 0.3, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1, 0.0]]]])
    right, known = right_pairs(batch, 0, 5)
    assert right[0, 0].nonzero().tolist() == [[1]]
    assert not bool(right[0, 1].any())
    assert bool(known.all())
    want = -(math.log(0.5 + UNSURE * 0.2) + math.log(0.7)) / 2
    assert float(copying_loss(weights, batch, 0)) == pytest.approx(want, rel=1e-5)
    both = torch.cat(
        [weights, weights.roll(1, -1)], dim=1
    )  # heads are averaged, after the logarithm
    other = float(copying_loss(weights.roll(1, -1), batch, 0))
    assert float(copying_loss(both, batch, 0)) == pytest.approx((want + other) / 2, rel=1e-5)
