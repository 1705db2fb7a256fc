"""A trained vanilla draft: the module against transformers, drafting against the module.

Independent truth: transformers' LlamaForCausalLM on the same random weights, the module's own
uncached forward for what the cached fast decoder drafts, and the target's greedy text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fake import FakeTarget, FakeTokenizer, make_row
from speculant.drafts import load_draft
from speculant.drafts.vanilla import VanillaDraft, for_target
from speculant.engine import generate_many
from speculant.heads.layers import causal
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.vanilla import VanillaConfig, VanillaHead
from speculant.heads.weights import HeadError, save_head
from speculant.sampling import SamplingParams, to_probs
from speculant.target.base import LoadError
from speculant.target.llama import LlamaConfig, LlamaTarget
from speculant.target.load import load_target
from speculant.train.vanilla import start_from_layers
from test_llama import saved

TOKENS = [5, 9, 3, 17, 2, 80, 30, 11, 4, 6, 90, 1]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def make_head(seed: int = 0, **change: Any) -> VanillaHead:
    """A random head for the targets below, of other layer sizes than theirs."""
    sizes: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 40, "num_heads": 4, "kv_heads": 2, "head_dim": 6,
        "num_layers": 2, "vocab_size": 97, "rope_theta": 5e3, "context_length": 64,
    }  # fmt: skip
    torch.manual_seed(seed)
    head = VanillaHead(VanillaConfig(**sizes | change)).eval()
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.3)
    return head


def logits_of(target: LlamaTarget, head: VanillaHead, tokens: list[int]) -> Tensor:
    """The module's uncached logits [T, V]."""
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        states = head(target.embed(torch.tensor([tokens])), positions, causal)
    return target.unembed(states)[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaTarget:
    folder = tmp_path_factory.mktemp("target")
    saved(folder, "llama")
    return LlamaTarget.from_folder(folder, FakeTokenizer(), "small")


def test_the_module_is_transformers_llama() -> None:
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    head = make_head(3)
    c = head.config
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        HFConfig(
            vocab_size=97, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    theirs = model.state_dict()
    assert set(theirs) - set(head.state_dict()) == {"model.embed_tokens.weight", "lm_head.weight"}
    model.load_state_dict({**theirs, **head.state_dict()})
    ids = torch.tensor([TOKENS[:6], TOKENS[6:]])
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        states = head(embedded, torch.arange(6).expand(2, -1), causal)
        torch.testing.assert_close(model.lm_head(states), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_fast_decoder_computes_the_same(target: LlamaTarget) -> None:
    """What drafting runs, chunk by chunk through its cache, is the training forward."""
    head = make_head(4)
    draft = for_target(target, head)
    assert draft.info.max_nodes == 4
    model = draft.model
    assert model.info.num_layers == 2
    assert model.tokenizer is target.tokenizer
    cache, out = model.new_cache(1, 32), []
    for part in (TOKENS[:5], TOKENS[5:6], TOKENS[6:]):
        start = cache.lengths[0]
        where = torch.arange(start, start + len(part))[None]
        logits, _ = model.forward(torch.tensor([part]), where, None, cache.rows([0], len(part)))
        cache.advance(0, len(part))
        assert logits is not None
        out.append(logits[0])
    torch.testing.assert_close(
        torch.cat(out), logits_of(target, head, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_tokens_come_from_the_training_logits(
    target: LlamaTarget, temperature: float
) -> None:
    head, params = make_head(5), SamplingParams(temperature=temperature)
    draft = for_target(target, head)
    draft.start(1, 64)
    row = make_row(TOKENS, params=params, vocab_size=97)
    draft.open(row)
    draft.prefill(row, 0, None)
    proposal = draft.propose([row])
    assert int(proposal.num_nodes[0]) == 4
    for i, token in enumerate(proposal.tokens[0].tolist()):
        logits = logits_of(target, head, [*TOKENS, *proposal.tokens[0, :i].tolist()])[-1:]
        if proposal.draft_probs is None:
            assert token == int(logits.argmax())
        else:
            want = to_probs(logits, params)[0]
            torch.testing.assert_close(proposal.draft_probs[0, i], want, atol=1e-4, rtol=1e-3)


def test_text_is_the_targets(target: LlamaTarget, tmp_path: Path) -> None:
    """From a folder, in a batch, past the head's context."""
    save_head(make_head(6, context_length=20), tmp_path / "head", torch.float32)
    prompts = [TOKENS, [7], TOKENS[:4], [3] * 18]
    plain = generate_many(target, load_draft("none", target), prompts, GREEDY)
    done = generate_many(target, for_target(target, tmp_path / "head"), prompts, GREEDY, max_rows=3)
    assert [o.token_ids for o in done] == [o.token_ids for o in plain]
    assert all(o.metrics.num_draft_tokens > 0 for o in done)


def test_starting_from_every_layer_is_the_target(tmp_path: Path) -> None:
    """All three layers taken over draft what the target says; two of them do not."""
    saved(tmp_path, "llama untied")
    target = _with_folder(tmp_path)
    sizes = {"intermediate_size": 80, "num_heads": 6, "kv_heads": 2, "head_dim": 8,
             "rope_theta": 10000.0, "norm_eps": 1e-5}  # fmt: skip
    head = make_head(num_layers=3, **sizes)
    assert start_from_layers(head, target, [0, 1, 2])
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(t, tensors[name]) for name, t in head.state_dict().items())
    out = generate_many(target, for_target(target, head, 3), [TOKENS], GREEDY)[0]
    assert out.metrics.num_accepted_tokens == out.metrics.num_draft_tokens
    pair = make_head(num_layers=2, **sizes)
    assert start_from_layers(pair, target, [0, 2])
    assert torch.equal(
        pair.model.layers[1].mlp.up_proj.weight, tensors["model.layers.2.mlp.up_proj.weight"]
    )
    before = make_head(8).state_dict()
    other = make_head(8)
    assert not start_from_layers(other, target, [0, 1])  # other shapes: nothing is touched
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    with pytest.raises(ValueError, match="2 layers to start 3 from"):
        start_from_layers(head, target, [0, 1])


def _with_folder(folder: Path) -> LlamaTarget:
    target = LlamaTarget.from_folder(folder, FakeTokenizer(), "small")
    target.info = replace(target.info, folder=folder)
    return target


def test_heads_that_do_not_fit_are_refused(target: LlamaTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fast decoder only, and target fake"):
        for_target(FakeTarget(), make_head())
    with pytest.raises(ValueError, match="hidden size 32 and vocabulary 97; small has 48 and 97"):
        for_target(target, make_head(hidden_size=32))
    with pytest.raises(ValueError, match="vocabulary 96"):
        for_target(target, make_head(vocab_size=96))
    with pytest.raises(ValueError, match="not both"):
        for_target(target, make_head(), layers=3)
    save_head(MedusaHead(MedusaConfig(48, 97)), tmp_path / "medusa")
    with pytest.raises(ValueError, match="kind 'medusa', not 'vanilla'"):
        for_target(target, tmp_path / "medusa")
    saved(tmp_path / "model", "llama")
    owned = _with_folder(tmp_path / "model")
    with pytest.raises(HeadError, match="another target than small: weights_sha256"):
        for_target(owned, make_head(target={"weights_sha256": "aa"}))
    forced = for_target(owned, make_head(target={"weights_sha256": "aa"}), force=True)
    assert isinstance(forced, VanillaDraft)


def test_layers_must_be_whole(target: LlamaTarget) -> None:
    head = make_head()
    tensors = head.state_dict()
    config = LlamaConfig(
        "llama", 97, 48, 40, 2, 4, 2, 6, 1e-5, 5e3, 64, tied=True, window=None
    )  # fmt: skip
    for change, words in (
        (
            {"model.layers.2.mlp.up_proj.weight": torch.zeros(2)},
            "unexpected tensors: model.layers.2",
        ),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight is \(3,\), expected \(48,\)"),
    ):
        with pytest.raises(LoadError, match=words):
            target.with_layers({**tensors, **change}, config, "it")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(LoadError, match=r"layers.1.self_attn.q_proj.weight is missing"):
        target.with_layers(tensors, config, "it")


@pytest.mark.real
def test_the_bundled_model_takes_a_head() -> None:
    """Embedding rows in a file, packed LM head: two layers of SmolLM2, 7 M parameters."""
    target = load_target("smollm2-135m-instruct")
    head = VanillaHead(VanillaConfig(576, 1536, 9, 3, 64, 2, 49152, 1e-5, 1e5, 8192))
    assert 7.0e6 < sum(p.numel() for p in head.parameters()) < 7.2e6
    assert start_from_layers(head, target, [0, 29])
    prompt = target.tokenizer.encode("The capital of France is")
    done = generate_many(target, for_target(target, head), [prompt], GREEDY)[0]
    assert done.metrics.num_draft_tokens > 0
