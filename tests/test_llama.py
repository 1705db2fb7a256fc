"""The fast decoder against transformers, on random weights of every architecture it takes.

Independent truth: transformers' own uncached forward of each path, its hidden states, and its
refusal or acceptance of tensors; for the bundled model, `generate` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fake import FakeTokenizer
from speculant.drafts import load_draft
from speculant.engine import generate_many
from speculant.native.library import library
from speculant.sampling import SamplingParams
from speculant.target.base import LAST, LoadError
from speculant.target.linear import Linear
from speculant.target.llama import LlamaConfig, LlamaTarget, fits
from speculant.tree import ancestor_mask, depths

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "head_dim": 8},
    "llama untied": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "llama wide heads": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "mistral": {"sliding_window": None, "head_dim": 8},
    "mistral window": {"sliding_window": 6, "head_dim": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 wide heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}
COMPILED = ("llama wide heads", "qwen2 wide heads", "qwen3")
"""Variants whose layers run in one compiled call, where the library is there."""
LONG, PARENTS = 21, [-1, 0, -1, 2, 2, 0]


def saved(folder: Path, variant: str, **sizes: int) -> Any:
    """A random transformers model of a variant, written to a folder. sizes: other than SIZES'."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(variant))
    config = AutoConfig.for_model(variant.split()[0], **SIZES | VARIANTS[variant] | sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if "bias" in name else 0.15))
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> LlamaTarget:
    return LlamaTarget.from_folder(folder, FakeTokenizer(), folder.name)


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    model = saved(folder, request.param)
    return model, load(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_which_layers_are_compiled(variant: str, tmp_path: Path) -> None:
    saved(tmp_path, variant)
    compiled = load(tmp_path).compiled is not None
    assert compiled == (variant in COMPILED and library() is not None)


@pytest.mark.skipif(library() is None, reason="the compiled library is not here")
@pytest.mark.parametrize(
    ("variant", "weights"),
    [*((variant, "") for variant in COMPILED),
     *(("llama", weights) for weights in
       ("bfloat16", "int8", "int4", "int8-a8", "int4-a8", "bfloat16-a16"))],
)  # fmt: skip
def test_a_block_is_one_token_at_a_time_to_the_last_bit(
    variant: str, weights: str, tmp_path: Path
) -> None:
    """Verifying a draft gives exactly the logits that plain decoding would, near-ties included."""
    whole = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16} if weights else {}
    saved(tmp_path, variant, **whole)
    target = LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x", weights=weights)
    assert all(
        layer.down.own and layer.down.own.form.partition("-")[2] == weights.partition("-")[2]
        for layer in target.layers
    )
    tokens = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(5))
    block, single = target.new_cache(2, 40), target.new_cache(2, 40)
    seen = []
    for start in range(30):
        where = torch.tensor([[start], [start]])
        rows = single.rows([0, 1], 1)
        seen.append(target.forward(tokens[:, start : start + 1], where, None, rows)[0])
        for slot in (0, 1):
            single.advance(slot, 1)
    positions = torch.arange(30).expand(2, -1)
    together, _ = target.forward(tokens, positions, None, block.rows([0, 1], 30))
    alone, _ = target.forward(
        tokens[1:], positions[1:], None, target.new_cache(1, 40).rows([0], 30)
    )
    assert torch.equal(together, torch.cat(seen, dim=1))
    assert torch.equal(alone, together[1:])
    if "-a" in weights:
        return  # a last bit elsewhere moves a code of the inputs: no tolerance would be fair
    target.compiled = None  # the same layers as torch operators
    torch_logits, _ = target.forward(
        tokens, positions, None, target.new_cache(2, 40).rows([0, 1], 30)
    )
    torch.testing.assert_close(torch_logits, together, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(library() is None, reason="the compiled library is not here")
@pytest.mark.parametrize("variant", COMPILED)
def test_a_prompt_is_the_same_however_it_is_cut(variant: str, tmp_path: Path) -> None:
    """To the last bit, cache included: a conversation's earlier turns may still be in the cache, cut
    elsewhere than a prompt that is read whole."""
    saved(tmp_path, variant)
    target = load(tmp_path)
    tokens = torch.randint(0, 97, (1, 150), generator=torch.Generator().manual_seed(6))
    found = []
    for cuts in ([64, 128, 150], [1, 31, 95, 101, 150], [50, 100, 150]):
        cache, start, logits = target.new_cache(1, 160), 0, None
        for end in cuts:
            rows = cache.rows([0], end - start)
            where = torch.arange(start, end)[None]
            logits, _ = target.forward(tokens[:, start:end], where, None, rows)
            cache.advance(0, end - start)
            start = end
        assert logits is not None
        found.append((logits[:, -1], cache.data[:, :, :, :, :150]))
    for logits, data in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(data, found[0][1])


@pytest.mark.skipif(library() is None, reason="the compiled library is not here")
@pytest.mark.parametrize(
    ("variant", "weights"),
    [*((variant, "") for variant in COMPILED), ("llama", "int8-a8"), ("llama", "bfloat16-a16")],
)
def test_a_trees_node_is_its_path_to_the_last_bit(
    variant: str, weights: str, tmp_path: Path
) -> None:
    """Whatever stands between it and what it sees; and so is what is kept of the tree. Where inputs
    are rounded, another last bit would soon be another token."""
    whole = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16} if weights else {}
    saved(tmp_path, variant, **whole)
    target = LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x", weights=weights)
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 97, (1, 50), generator=generator)
    start, count = 29, 20
    parents = [
        int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(count)
    ]
    above = torch.tensor([parents])
    cache = target.new_cache(1, 60)

    def run(ids: list[int], at: int, into: Any) -> Tensor:
        where, rows = torch.arange(at, at + len(ids))[None], into.rows([0], len(ids))
        logits, _ = target.forward(torch.tensor([ids]), where, None, rows)
        into.advance(0, len(ids))
        assert logits is not None
        return logits

    ids = tokens[0].tolist()
    run(ids[:start], 0, cache)
    rows = cache.rows([0], 1 + count)
    new = tokens[:, start : start + 1 + count]
    logits, _ = target.forward(new, start + depths(above), ancestor_mask(above), rows)
    assert logits is not None
    for node in range(count):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain, plain = [ids[start], *(ids[start + 1 + i] for i in path)], target.new_cache(1, 60)
        run(ids[:start], 0, plain)
        want = run(chain, start, plain)
        assert torch.equal(logits[0, 1 + node], want[0, -1])
        if node == count - 1:
            cache.keep(0, [0, *(1 + i for i in path)])
            assert torch.equal(
                run([5], start + len(chain), cache), run([5], start + len(chain), plain)
            )
            assert len(path) > 1


@pytest.mark.skipif(library() is None, reason="the compiled library is not here")
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("variant", [*COMPILED, "llama"])
def test_padding_is_not_computed_and_changes_nothing(
    variant: str, tree: bool, tmp_path: Path
) -> None:
    """Rows of 1 to 7 new tokens together: each to the last bit what it is alone, in cache too."""
    saved(tmp_path, variant)
    target = load(tmp_path)
    generator = torch.Generator().manual_seed(3)
    counts, lengths, slots = [7, 1, 4, 1], [12, 3, 20, 0], [1, 0, 3, 4]
    width = max(counts)
    parents = torch.tensor([PARENTS if tree else range(-1, width - 2)]).expand(4, -1)
    mask = ancestor_mask(parents) if tree else None
    new = torch.randint(0, 97, (4, width), generator=generator)
    positions = torch.tensor(lengths)[:, None] + depths(parents)
    taps = (0, 2, LAST)

    def filled() -> Any:
        cache = target.new_cache(5, 40)
        for slot, length in zip(slots, lengths, strict=True):
            if length:
                ids = torch.arange(slot, slot + length)[None]
                where = torch.arange(length)[None]
                target.forward(ids, where, None, cache.rows([slot], length), need_logits=False)
                cache.advance(slot, length)
        return cache

    cache, sizes = filled(), []
    if target.compiled is not None:
        embedding = target.embedding

        def counted(tokens: torch.Tensor) -> torch.Tensor:
            sizes.append(tokens.numel())
            return embedding(tokens)

        target.embedding = counted  # type: ignore[assignment]
    rows = cache.rows(slots, width, counts=counts)
    logits, tapped = target.forward(new, positions, mask, rows, taps)
    assert logits is not None
    assert tapped is not None
    assert logits.shape == (4, width, 97)
    assert tapped.shape == (4, width, 3 * 48)
    assert bool(logits.isfinite().all())
    if target.compiled is not None:
        assert sizes == [sum(counts)]
    for b, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        alone = filled()
        mine = None if mask is None else mask[b : b + 1, :count, :count]
        parts = (new[b : b + 1, :count], positions[b : b + 1, :count], mine)
        want, states = target.forward(*parts, alone.rows([slot], count), taps)
        assert want is not None
        assert states is not None
        if target.compiled is not None:
            assert torch.equal(logits[b, :count], want[0])
            assert torch.equal(tapped[b, :count], states[0])
            end = lengths[b] + count
            assert torch.equal(cache.data[:, :, slot, :, :end], alone.data[:, :, slot, :, :end])
        else:
            torch.testing.assert_close(logits[b, :count], want[0], atol=1e-4, rtol=1e-4)


def test_ragged_rows_chunks_and_trees(pair: Any) -> None:
    """Three rows in slots that are no neighbours, prefilled in chunks, then one tree each."""
    model, target = pair
    generator = torch.Generator().manual_seed(1)
    slots, lengths = [0, 1, 3], [LONG, 5, 12]
    ids = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    cache = target.new_cache(4, 64)
    for slot, tokens in zip(slots, ids, strict=True):
        for start in range(0, len(tokens), 8):
            chunk = torch.tensor([tokens[start : start + 8]])
            where = torch.arange(start, start + chunk.shape[1])[None]
            rows = cache.rows([slot], chunk.shape[1])
            logits, _ = target.forward(chunk, where, None, rows, need_logits=False)
            assert logits is None
            cache.advance(slot, chunk.shape[1])
    parents = torch.tensor([PARENTS]).expand(3, -1)
    new = torch.randint(0, 97, (3, 1 + len(PARENTS)), generator=generator)
    positions = torch.tensor(lengths)[:, None] + depths(parents)
    rows = cache.rows(slots, new.shape[1])
    logits, tapped = target.forward(new, positions, ancestor_mask(parents), rows, (0, 2, LAST))
    assert tapped is not None
    for b in range(3):
        for i in range(new.shape[1]):
            path, node = [], i
            while node:
                path.append(int(new[b, node]))
                node = PARENTS[node - 1] + 1
            sequence = [*ids[b], int(new[b, 0]), *path[::-1]]
            with torch.no_grad():
                want = model(torch.tensor([sequence]), output_hidden_states=True)
            torch.testing.assert_close(logits[b, i], want.logits[0, -1], atol=1e-4, rtol=1e-4)
            states = [want.hidden_states[k][0, -1] for k in (0, 2, -1)]
            torch.testing.assert_close(tapped[b, i], torch.cat(states), atol=1e-4, rtol=1e-4)


def test_kept_branch_continues_as_a_sequence(pair: Any) -> None:
    """After keeping one branch of a tree the cache is that of the plain sequence."""
    model, target = pair
    tokens = [4, 8, 15, 16, 23, 42, 7, 7, 9]
    cache = target.new_cache(1, 64)
    head = torch.tensor([tokens])
    target.forward(head, torch.arange(9)[None], None, cache.rows([0], 9))
    cache.advance(0, 9)
    parents = torch.tensor([PARENTS])
    new = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    rows = cache.rows([0], 7)
    target.forward(new, 9 + depths(parents), ancestor_mask(parents), rows)
    cache.keep(0, [0, 3, 5])  # the root, node 2, and its second child, node 4
    logits, _ = target.forward(torch.tensor([[50]]), torch.tensor([[12]]), None, cache.rows([0], 1))
    with torch.no_grad():
        want = model(torch.tensor([[*tokens, 1, 4, 6, 50]])).logits[0, -1]
    torch.testing.assert_close(logits[0, 0], want, atol=1e-4, rtol=1e-4)


def test_pruned_shares_weights(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    target = load(tmp_path)
    small = target.pruned(2)
    assert small.info.num_layers == 2
    assert small.layers[1] is target.layers[1]
    with pytest.raises(ValueError, match="between 1 and 3"):
        target.pruned(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model type"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "window",
        ),
    ],
)
def test_what_does_not_fit_is_said(change: Mapping[str, Any], words: str) -> None:
    config = {"model_type": "llama", "hidden_act": "silu"}
    assert fits(config) is None
    reason = fits({**config, **change})
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.9.foo.weight": torch.ones(2)}), "unexpected"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "expected"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            "unexpected",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=words):
        load(tmp_path)


def test_missing_biases_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if not k.endswith("bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"q_proj\.bias is missing"):
        load(tmp_path)


def test_packed_linear_equals_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 48, generator=generator)
    bias = torch.randn(70, generator=generator)
    linear = Linear(weight, bias)
    for rows in (1, 2, 7, 16, 65):
        x = torch.randn(2, rows, 48, generator=generator)
        want = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(linear(x).double(), want, atol=1e-4, rtol=1e-5)


def test_config_without_optional_keys() -> None:
    config = LlamaConfig.from_dict(
        {k: v for k, v in SIZES.items() if "key_value" not in k} | {"model_type": "llama"}
    )
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (6, 8, 10000.0)


def test_all_full_layers_with_a_window_in_the_config(tmp_path: Path) -> None:
    """use_sliding_window with every layer in full attention: no window anywhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}
    config = AutoConfig.for_model("qwen2", **SIZES | extra)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    tokens = torch.arange(1, 21)[None]
    rows = target.new_cache(1, 32).rows([0], 20)
    logits, _ = target.forward(tokens, torch.arange(20)[None], None, rows)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
    old = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}
    assert "window" in str(fits(old))


@pytest.mark.parametrize("variant", ["mistral window", "qwen3"])
def test_through_the_engine(tmp_path: Path, variant: str) -> None:
    """Speculation over a window that prompt and output cross, in a batch: transformers' text."""
    from speculant.target.hf import HFTarget

    model = saved(tmp_path, variant)
    prompts = [[3, 5, 8, 3, 5, 8, 3, 5], [11, 12], [7, 7, 7, 7, 1, 2, 7, 7, 7, 7, 1]]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    wants = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        wants.append(tokens[len(prompt) :])
    for target in (load(tmp_path), HFTarget(model, FakeTokenizer(), "hf")):
        for name in ("none", "ngram", "lookahead"):
            done = generate_many(target, load_draft(name, target), prompts, params, max_rows=2)
            assert [o.token_ids for o in done] == wants


def test_bfloat16_agrees_but_for_near_ties(tmp_path: Path) -> None:
    """Teacher-forced: where speculation takes another token, plain logits are within 0.1."""
    saved(tmp_path, "llama")
    target = LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "x", dtype=torch.bfloat16)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompt = [3, 5, 8, 3, 5, 8, 3, 5]
    ours = generate_many(target, load_draft("ngram", target), [prompt], params)[0].token_ids
    assert len(ours) == 30
    sequence = torch.tensor([prompt + ours])
    rows = target.new_cache(1, 64).rows([0], sequence.shape[1])
    logits, _ = target.forward(sequence, torch.arange(sequence.shape[1])[None], None, rows)
    assert logits is not None
    for i, token in enumerate(ours):
        at = logits[0, len(prompt) - 1 + i]
        assert float(at.max() - at[token]) < 0.1


@pytest.mark.real
def test_bundled_model_equals_transformers(bundled: Path) -> None:
    """Logits within 1e-4 of their scale, and the same 40 greedy tokens from every draft."""
    from transformers import AutoModelForCausalLM

    from speculant import load_target

    model = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    target = load_target("smollm2-135m-instruct")
    assert isinstance(target, LlamaTarget)
    prompts = ["What is the capital of France?", "List three colours, then repeat the list."]
    ids = [target.tokenizer.chat([{"role": "user", "content": p}]) for p in prompts]
    cache = target.new_cache(1, 64)
    tokens = torch.tensor([ids[0]])
    rows = cache.rows([0], tokens.shape[1])
    logits, _ = target.forward(tokens, torch.arange(tokens.shape[1])[None], None, rows)
    with torch.no_grad():
        want = model(tokens).logits
    assert float((logits - want).abs().max()) < 1e-4 * float(want.abs().max())
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for name in ("ngram", "lookahead", "vanilla"):
        done = generate_many(target, load_draft(name, target), ids, params)
        for prompt, out in zip(ids, done, strict=True):
            plain = model.generate(
                torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False
            )
            # transformers forbids EOS before 40 tokens; ours goes on after it
            before = (
                out.token_ids[: out.token_ids.index(2)] if 2 in out.token_ids else out.token_ids
            )
            assert plain[0, len(prompt) : len(prompt) + len(before)].tolist() == before
