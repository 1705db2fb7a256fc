"""EAGLE-1: the layer written out as vLLM runs it, and one computation for training and drafting.

Independent truth: `written_out` is vLLM's `llama_eagle.py` in plain products; `outputs_at` runs the
whole list of pairs anew at every depth, without a cache.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fake import HIDDEN, FakeTarget
from speculant.drafts.eagle import EagleDraft
from speculant.engine import generate_many
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.layers import causal
from speculant.heads.weights import load_head, save_head
from speculant.sampling import SamplingParams
from speculant.target.base import LAST
from speculant.train.ttt import unroll
from test_eagle import GREEDY, PROMPTS, VOCAB, states

HEADS, KV_HEADS, DIM = 4, 2, 6
TOKENS = [5, 9, 3, 17, 2, 8, 30, 11, 4, 6]


def make_head(seed: int = 0, **change: Any) -> Eagle1Head:
    """A random head."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 24, "num_heads": HEADS, "kv_heads": KV_HEADS,
        "head_dim": DIM, "vocab_size": VOCAB,
    }  # fmt: skip
    torch.manual_seed(seed)
    head = Eagle1Head(Eagle1Config(**sizes | change)).eval()
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.3)
    return head


def written_out(head: Eagle1Head, embedded: Tensor, hidden: Tensor) -> Tensor:
    """vLLM's forward over pairs [T, H] at positions 0 .. T-1, one query and one head at a time."""
    w = head.state_dict()
    x = torch.cat([embedded, hidden], dim=1) @ w["fc.weight"].T  # the embedding comes first
    residual, count = x, len(x)
    q, k, v = ((x @ w[f"layers.0.self_attn.{n}_proj.weight"].T).view(count, -1, DIM) for n in "qkv")

    def turned(y: Tensor, t: int) -> Tensor:
        out = y.clone()
        for i in range(DIM // 2):
            angle = t / 10000.0 ** (2 * i / DIM)
            a, b = y[i], y[i + DIM // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    mixed = torch.zeros(count, HEADS, DIM)
    for t in range(count):
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            query = turned(q[t, h], t)
            scores = [float(query @ turned(k[s, kv], s)) / math.sqrt(DIM) for s in range(t + 1)]
            weights = torch.tensor(scores).softmax(0)
            mixed[t, h] = sum(weights[s] * v[s, kv] for s in range(t + 1))
    x = residual + mixed.flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
    normed = x / (x.pow(2).mean(1, keepdim=True) + head.config.norm_eps).sqrt()
    normed = normed * w["layers.0.post_attention_layernorm.weight"]
    gate, up = (normed @ w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T


@torch.no_grad()
def outputs_at(target: FakeTarget, head: Eagle1Head, tokens: list[int], depth: int) -> Tensor:
    """The head's output behind `tokens[: -depth]` and the `depth` tokens it drafted after them."""
    known = len(tokens) - depth
    hidden = states(target, tokens[: known - 1], head.config.taps)  # features of 0 .. known-2
    out = hidden
    for k in range(depth + 1):
        embedded = target.embed(torch.tensor(tokens[1 : known + k]))
        out = written_out(head, embedded, hidden)
        hidden = torch.cat([hidden, out[-1:]])
    return out[-1]


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


@torch.no_grad()
def test_the_forward_is_vllms() -> None:
    head = make_head(3)
    embedded, hidden = torch.randn(2, 7, HIDDEN), torch.randn(2, 7, HIDDEN)
    out = head(embedded, hidden, torch.arange(7).expand(2, -1), causal)
    for b in range(2):
        torch.testing.assert_close(
            out[b], written_out(head, embedded[b], hidden[b]), atol=1e-5, rtol=1e-4
        )


def test_what_it_reads_and_says(target: FakeTarget) -> None:
    head = make_head()
    assert head.config.taps == (LAST,)
    taps = states(target, TOKENS, head.config.taps)
    assert torch.equal(head.fuse(taps), taps)
    assert head.target_ids.tolist() == list(range(VOCAB))
    head.bind(target.unembed)
    assert torch.equal(head.logits(taps), target.unembed(taps))  # the target's states, its logits


@torch.no_grad()
def test_every_unrolled_step_equals_the_uncached_chain(target: FakeTarget) -> None:
    """Training's step k at base t is drafting's depth k behind token t + 1."""
    head, count, steps = make_head(4), len(TOKENS) - 1, 4
    features = states(target, TOKENS, head.config.taps)[None, :-1]
    embedded = target.embed(torch.tensor([TOKENS[1:]]))
    bases = torch.arange(count)[None]
    outputs = unroll(head, embedded, head.fuse(features), bases, steps)
    for k in range(steps):
        for base in range(count - k):
            want = outputs_at(target, head, TOKENS[: base + 2 + k], k)
            torch.testing.assert_close(outputs[k][0, base], want, atol=1e-5, rtol=1e-4)
    assert float((outputs[1][0, 0] - outputs[0][0, 1]).abs().max()) > 1e-2  # no teacher forcing


class Spy(EagleDraft):
    """Checks every greedy proposal against the uncached chain."""

    seen, target = 0, FakeTarget(seed=1)

    def propose(self, rows: Any) -> Any:
        proposal = super().propose(rows)
        head = self.passes.head
        assert isinstance(head, Eagle1Head)
        for b, row in enumerate(rows):
            tokens = list(row.tokens)
            for k in range(int(proposal.num_nodes[b])):
                logits = self.target.unembed(outputs_at(self.target, head, tokens, k))
                assert int(proposal.tokens[b, k]) == int(logits.argmax())
                tokens.append(int(proposal.tokens[b, k]))
                type(self).seen += 1
        return proposal


def test_drafting_equals_the_uncached_chain(target: FakeTarget) -> None:
    """After any ragged history of acceptance, and on features after the final norm."""
    head = make_head()
    head.bind(target.unembed)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    done = generate_many(target, Spy(head, target.embed, VOCAB, 3), PROMPTS, params, max_rows=3)
    assert [o.token_ids for o in done] == [target.greedy(p, 10) for p in PROMPTS]
    assert Spy.seen > 60


def test_a_tree_from_a_loaded_head(target: FakeTarget, tmp_path: Path) -> None:
    """EAGLE-2: the head on disk, drafting trees; the text is the target's own."""
    save_head(make_head(2), tmp_path / "head", torch.float32)
    head = load_head(tmp_path / "head")
    assert isinstance(head, Eagle1Head)
    head.bind(target.unembed)
    draft = EagleDraft(head, target.embed, VOCAB, 3, tree=12, branch=4, name="eagle2")
    done = generate_many(target, draft, PROMPTS, GREEDY, max_rows=2)
    assert [o.token_ids for o in done] == [target.greedy(p, 24) for p in PROMPTS]
    assert sum(o.metrics.num_accepted_tokens for o in done) > 0
