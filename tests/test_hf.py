"""HFTarget equals the model itself (ragged rows, trees, chunks, windows, taps) or refuses it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fake import FakeTokenizer
from speculant.target.base import LAST, LoadError
from speculant.target.hf import HFTarget
from speculant.target.hf_check import context_length

VOCAB, HIDDEN, LAYERS = 61, 32, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so large that a wrong mask shows in the logits
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 6, "head_dim": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "head_dim": 8},
    "qwen2": {},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": 7},
    "phi": {"partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gptj": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
}


def build(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split()[0], **{**SIZES, **MODELS.get(kind, {}), **more})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", params=list(MODELS))
def target(request: pytest.FixtureRequest) -> HFTarget:
    return HFTarget(build(request.param), FakeTokenizer(), request.param)


def plain(target: HFTarget, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The model's own logits [n, V] and hidden states of one sequence, uncached and unmasked."""
    with torch.no_grad():
        out = target.model(tokens[None], use_cache=False, output_hidden_states=True)
    return out.logits[0].float(), tuple(state[0] for state in out.hidden_states)


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


SLOTS = (0, 1, 3)  # two runs: (0, 1) and (3,)
LENGTHS = (13, 9, 11)
PARENTS = (-1, 0, 0, 1, 1, 2, 5)
PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5, 6))


def prefill(target: HFTarget, text: Tensor, capacity: int = 40) -> Any:
    """A cache with LENGTHS tokens of text [3, n] in SLOTS, written in two chunks."""
    cache = target.new_cache(rows=4, capacity=capacity)
    done = [0, 0, 0]
    for width, keep in ((7, (7, 5, 6)), (6, (6, 4, 5))):
        steps = torch.tensor(done)[:, None] + torch.arange(width)
        rows = cache.rows(SLOTS, width)
        logits, taps = target.forward(text.gather(1, steps), steps, None, rows, need_logits=False)
        assert logits is None
        assert taps is None
        for row, slot in enumerate(SLOTS):
            cache.advance(slot, keep[row])
            done[row] += keep[row]
    assert tuple(done) == LENGTHS
    return cache


def tree() -> tuple[Tensor, Tensor]:
    """Mask [n, n] and depths [n] of PARENTS."""
    n = len(PARENTS)
    mask, depth = torch.eye(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
            depth[node] = depth[parent] + 1
    return mask, depth


def check(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


def test_tree_behind_a_ragged_prefix_equals_each_path_alone(target: HFTarget) -> None:
    text, nodes = random_tokens(3, 20), random_tokens(3, len(PARENTS), seed=2)
    cache, (mask, depth) = prefill(target, text), tree()
    positions = torch.tensor(LENGTHS)[:, None] + depth
    taps = (0, LAYERS // 2, LAYERS - 1, LAST)
    batch_mask = mask.expand(3, -1, -1)
    rows = cache.rows(SLOTS, len(PARENTS))
    logits, states = target.forward(nodes, positions, batch_mask, rows, taps)
    assert logits is not None
    assert states is not None
    assert logits.dtype == torch.float32
    assert states.shape == (3, len(PARENTS), len(taps) * HIDDEN)
    for row, length in enumerate(LENGTHS):
        for path in PATHS:
            whole = torch.cat([text[row, :length], nodes[row, list(path)]])
            want, hidden = plain(target, whole)
            check(logits[row, list(path)], want[length:])
            tapped = torch.cat([hidden[tap][length:] for tap in taps], dim=-1)
            check(states[row, list(path)], tapped)


def test_rolling_back_across_the_window_leaves_no_trace(target: HFTarget) -> None:
    text, cache = random_tokens(3, 30), prefill(target, random_tokens(3, 30))
    wrong = random_tokens(3, 5, seed=3)
    for _ in range(3):  # each round: five rejected tokens, then two right ones
        starts = torch.tensor([cache.lengths[slot] for slot in SLOTS])
        steps = starts[:, None] + torch.arange(5)
        target.forward(wrong, steps, None, cache.rows(SLOTS, 5), need_logits=False)
        for slot in SLOTS:
            cache.advance(slot, 5)
            cache.truncate(slot, cache.lengths[slot] - 5)
        steps = starts[:, None] + torch.arange(2)
        rows = cache.rows(SLOTS, 2)
        logits, _ = target.forward(text.gather(1, steps), steps, None, rows)
        assert logits is not None
        for row, slot in enumerate(SLOTS):
            cache.advance(slot, 2)
            want, _ = plain(target, text[row, : cache.lengths[slot]])
            check(logits[row], want[-2:])


def test_keeping_a_branch_leaves_its_siblings_out(target: HFTarget) -> None:
    text, nodes = random_tokens(3, 20), random_tokens(3, len(PARENTS), seed=2)
    cache, (mask, depth) = prefill(target, text), tree()
    positions = torch.tensor(LENGTHS)[:, None] + depth
    rows = cache.rows(SLOTS, len(PARENTS))
    target.forward(nodes, positions, mask.expand(3, -1, -1), rows, need_logits=False)
    for slot in SLOTS:
        cache.keep(slot, PATHS[2])
    last = random_tokens(3, 1, seed=4)
    steps = torch.tensor([[cache.lengths[slot]] for slot in SLOTS])
    logits, _ = target.forward(last, steps, None, cache.rows(SLOTS, 1))
    assert logits is not None
    for row, length in enumerate(LENGTHS):
        whole = torch.cat([text[row, :length], nodes[row, list(PATHS[2])], last[row]])
        check(logits[row, -1], plain(target, whole)[0][-1])


def test_garbage_past_a_row_is_never_read(target: HFTarget) -> None:
    cache = target.new_cache(rows=2, capacity=24)
    cache.data.fill_(1e4)  # stale entries may be anything finite; a new cache is zeroed
    text = random_tokens(2, 12)
    for slot, length in ((0, 12), (1, 3)):
        steps = torch.arange(length)[None]
        rows = cache.rows((slot,), length)
        target.forward(text[slot : slot + 1, :length], steps, None, rows, need_logits=False)
        cache.advance(slot, length)
    steps = torch.tensor([[12], [3]])
    new = random_tokens(2, 1, seed=5)
    logits, _ = target.forward(new, steps, None, cache.rows((0, 1), 1))
    assert logits is not None
    for row, length in enumerate((12, 3)):
        check(logits[row, -1], plain(target, torch.cat([text[row, :length], new[row]]))[0][-1])


def test_prefill_without_logits_skips_the_head() -> None:
    target = HFTarget(build("llama"), FakeTokenizer(), "llama")
    calls: list[int] = []
    target.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    steps = torch.arange(4)[None]
    rows = target.new_cache(1, 8).rows((0,), 4)
    logits, states = target.forward(random_tokens(1, 4), steps, None, rows, (1, LAST), False)
    assert logits is None
    assert states is not None
    assert states.shape == (1, 4, 2 * HIDDEN)
    assert calls == []


def test_hooks_go_even_when_the_forward_fails() -> None:
    target = HFTarget(build("llama"), FakeTokenizer(), "llama")
    rows = target.new_cache(1, 8).rows((0,), 2)
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[1, VOCAB]]), torch.tensor([[0, 1]]), None, rows, (1, LAST))
    assert not target.layers[1]._forward_pre_hooks
    assert not target.body._forward_hooks
    with pytest.raises(ValueError, match="tap 4"):
        target.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), None, rows, (4,))


def test_half_precision_passes_its_own_check() -> None:
    target = HFTarget(build("llama").to(torch.bfloat16), FakeTokenizer(), "half")
    assert target.new_cache(1, 4).data.dtype == torch.bfloat16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "rolled back"),
    "jamba": ({"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, "rolled back"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "rolled back"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "ALiBi"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "gpt_neo": ({"num_heads": 4, "attention_types": [[["global", "local"], 2]]}, "local attention"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_refuses_what_it_cannot_roll_back_or_mask(kind: str) -> None:
    more, reason = REFUSED[kind]
    with pytest.raises(LoadError, match=reason) as error:
        HFTarget(build(kind, **more), FakeTokenizer(), kind)
    assert "\n" not in str(error.value)


def test_refuses_an_encoder_decoder() -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(LoadError, match="encoder-decoder"):
        HFTarget(T5ForConditionalGeneration(config), FakeTokenizer(), "t5")


def test_the_self_check_refuses_a_model_that_ignores_the_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    right = model.model.forward

    @functools.wraps(right)  # the signature tells how this transformers calls its cache
    def deaf(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs | {"attention_mask": None})

    monkeypatch.setattr(model.model, "forward", deaf)
    with pytest.raises(LoadError, match="under a tree mask"):
        HFTarget(model, FakeTokenizer(), "deaf")


def test_a_rescaling_rope_is_kept_to_its_original_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=rope)
    config.rope_parameters["original_max_position_embeddings"] = 32
    assert context_length(config) == 32
    assert context_length(AutoConfig.for_model("llama", **SIZES)) == 64


def test_the_last_state_and_the_lm_head_give_the_logits(target: HFTarget) -> None:
    rows = target.new_cache(1, 8).rows([0], 5)
    logits, last = target.forward(
        random_tokens(1, 5), torch.arange(5)[None], None, rows, taps=(LAST,)
    )
    assert logits is not None
    assert last is not None
    torch.testing.assert_close(target.unembed(last), logits)


def test_logits_scaled_behind_the_lm_head_are_refused() -> None:
    scaled = HFTarget(build("llama"), FakeTokenizer(), "llama")
    scaled.config.logit_scale = 0.5
    with pytest.raises(LoadError, match=r"logit_scale is 0\.5"):
        scaled.unembed(torch.zeros(1, scaled.info.hidden_size))
