"""Switches of published heads: on disk, packed, and drafted with.

Independent truth: transformers' own RoPE, the unpacked head, and a chain computed without a cache.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from exporting import H, V, end
from fake import HIDDEN, FakeTarget
from published import CASES, EAGLE3, LINEAR, LLAMA3, TABLES, make
from speculant.drafts import load_draft
from speculant.drafts.eagle import EagleDraft
from speculant.drafts.eagle_head import CachedHead
from speculant.engine import generate_many
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.layers import causal
from speculant.heads.packed import pack
from speculant.heads.rope import frequencies
from speculant.heads.weights import load_head, save_head
from test_eagle import GREEDY, PROMPTS, plain_chain


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_head_on_disk_and_packed(kind: str, name: str, tmp_path: Path) -> None:
    """Its config names the switches that are on; packed, it computes the same
    but for rounded weights."""
    on = TABLES[kind][name]
    head = make(kind, **on)
    save_head(head, tmp_path / "head")
    data = json.loads((tmp_path / "head" / "config.json").read_text())
    assert {key: data[key] for key in on} == on
    loaded: Any = load_head(tmp_path / "head")
    assert loaded.config == head.config
    wide = {"eagle3": 3 * getattr(head.config, "state_size", 0)}.get(kind, H)
    states = torch.randn(2, 5, wide, generator=torch.Generator().manual_seed(1))
    tokens, positions = torch.tensor([[3, 0, 39, 7, 7], [1, 2, 3, 4, 5]]), torch.arange(5)[None]

    @torch.no_grad()
    def run(it: Any) -> Tensor:
        if kind != "eagle3":
            it.bind(lambda h: h @ end(2).T)
        if kind == "medusa":
            return it.logits(states)
        embedded = (it.own_embedding or nn.Embedding.from_pretrained(end(1)))(tokens)
        return it.logits(it(embedded, it.fuse(states), positions.expand(2, -1), causal))

    want, got = run(loaded), run(pack(copy.deepcopy(loaded)))
    assert float((got - want).norm() / want.norm()) < 0.06, (
        "more than what rounding the weights does"
    )


@pytest.mark.parametrize("name", [*EAGLE3, "fc"])
def test_a_drafting_pass_of_a_packed_head(name: str) -> None:
    """Over the cache, as drafting runs it: what the unpacked head computes but for rounded weights, and
    not what it would compute with the switch lost."""
    on = dict(TABLES["eagle3"][name])
    if "target_hidden_size" in on:
        on["target_hidden_size"] = 96
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "kv_heads": 1,
             "head_dim": 32, "vocab_size": V, "draft_vocab_size": V, "taps": (1, 3, 5)}  # fmt: skip
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config(**sizes, **on)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for key, p in head.named_parameters():
            values = torch.randn_like(p)
            p.copy_(1 + 0.4 * values if "norm" in key else 0.3 * values if p.ndim == 1 else p)
    tokens = torch.tensor([[3, 0, 39, 7, 7], [1, 2, 3, 4, 5]])
    taps = torch.randn(2, 5, 3 * head.config.state_size)
    lent = nn.Embedding(V, 64)

    @torch.inference_mode()
    def run(it: Any) -> Tensor:
        passes = CachedHead(it, lent, V)
        passes.start(2, 16)
        offsets = torch.arange(5)
        out = passes.run([0, 1], tokens, it.fuse(taps), offsets)
        for slot in range(2):
            passes.cache.advance(slot, 5)
        again = passes.run([0, 1], tokens.flip(1), out, offsets)
        return torch.cat([it.logits(out), it.logits(again)])

    want, got = run(head), run(pack(copy.deepcopy(head)))
    error = float((got - want).norm() / want.norm())
    assert error < 0.05, error


def test_heads_without_switches_are_the_files_they_were(tmp_path: Path) -> None:
    """No new key in config.json, no new tensor."""
    for kind in ("eagle3", "eagle1", "medusa"):
        save_head(make(kind), tmp_path / kind)
        data = json.loads((tmp_path / kind / "config.json").read_text())
        new = {"qkv_bias", "o_bias", "mlp_bias", "fc_bias", "own_embeddings", "rope_scaling",
               "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
               "target_hidden_size", "own_lm_heads"}  # fmt: skip
        assert not new & set(data)
        tensors = load_file(tmp_path / kind / "model.safetensors")
        assert not [n for n in tensors if "bias" in n or "embed" in n or "lm_heads" in n]


@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR])
def test_rope_is_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    rope = {"rope_theta": 10000.0, **scaling}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    if scaling["rope_type"] == "llama3":
        theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        assert factor == 1.0
    else:
        theirs = plain / scaling["factor"]
    torch.testing.assert_close(frequencies(plain, scaling), theirs)
    assert not torch.allclose(theirs, plain)


@pytest.mark.parametrize("name", ["output", "residual", "embeddings", "narrow", "llama3", "all"])
def test_drafting_with_switches(name: str) -> None:
    """The drafted chain is the one that an uncached computation over all pairs gives; the text is the
    target's own."""
    on = {**EAGLE3[name]}
    size = 20 if "target_hidden_size" in on else HIDDEN
    if size != HIDDEN:
        on["target_hidden_size"] = HIDDEN
    fake = FakeTarget(seed=1)
    sizes = {"hidden_size": size, "intermediate_size": 24, "num_heads": 4, "kv_heads": 2,
             "head_dim": 6, "vocab_size": 32, "draft_vocab_size": 20, "taps": (0, 1)}  # fmt: skip
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config(**sizes, **on)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for key, p in head.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in key else torch.randn_like(p) * 0.5)
    head.set_vocabulary(torch.randperm(32)[:20])
    lent = copy.copy(fake)
    if head.own_embedding is not None:
        lent.embed = head.own_embedding  # type: ignore[method-assign]
    seen = 0

    class Spy(EagleDraft):
        def propose(self, rows: Any) -> Any:
            nonlocal seen
            proposal = super().propose(rows)
            for b, row in enumerate(rows):
                count = int(proposal.num_nodes[b])
                seen += count
                want = plain_chain(lent, head, row.tokens, count) if count else []
                assert proposal.tokens[b, :count].tolist() == want
            return proposal

    draft = Spy(head, fake.embed, 32, 4)
    done = generate_many(fake, draft, PROMPTS, GREEDY, max_rows=3)
    assert [out.token_ids for out in done] == [fake.greedy(prompt, 24) for prompt in PROMPTS]
    assert seen > 100


def test_a_head_of_another_width_fits_its_target() -> None:
    """The width of the target's states decides, not the head's own."""
    fake = FakeTarget(seed=1)
    sizes = {"hidden_size": 20, "intermediate_size": 24, "num_heads": 4, "kv_heads": 2,
             "head_dim": 6, "vocab_size": 32, "draft_vocab_size": 32, "taps": (0, 1),
             "own_embeddings": True}  # fmt: skip
    for size, fits in ((HIDDEN, True), (HIDDEN + 1, False)):
        head = Eagle3Head(Eagle3Config(**sizes, target_hidden_size=size))  # type: ignore[arg-type]
        if fits:
            load_draft("eagle3", fake, head=head)
        else:
            with pytest.raises(ValueError, match=f"for hidden size {HIDDEN + 1} and"):
                load_draft("eagle3", fake, head=head)


def test_configs_that_make_no_head() -> None:
    for on, words in (
        ({"target_hidden_size": 24}, "needs embeddings of its own width"),
        ({"target_hidden_size": 0}, "must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "known are linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "of type linear has factor"),
        ({"rope_scaling": {**LINEAR, "factor": -1}}, "must be a positive number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above"),
    ):
        with pytest.raises(ValueError, match=words):
            make("eagle3", **on)
