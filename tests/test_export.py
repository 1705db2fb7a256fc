"""Exports: what is written, that it reads back bit for bit, and that it computes the same.

Independent truth: vLLM's tensors and settings written out from what was observed on it, its EAGLE-3
arithmetic written plainly over an exported folder, and transformers' own Llama.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from exporting import IDS, PAIRS, D, H, I, V, check, end, exported, foreign, make, target
from speculant.export.folder import ExportError, read_checkpoint
from speculant.export.given import Given
from speculant.export.importing import import_head
from speculant.export.keys import LAYOUTS, WHY_NOT
from speculant.export.parts import Wanted, check_plain
from speculant.export.probe import differs, probe
from speculant.export.writing import FORMATS, export_head
from speculant.heads.layers import causal
from speculant.heads.weights import load_head, save_head

SELF_ATTENTION = {"q_proj": 24, "k_proj": 12, "v_proj": 12}
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "norm.weight": (H,),
    **{f"midlayer.self_attn.{name}.weight": (rows, 2 * H) for name, rows in SELF_ATTENTION.items()},
    "midlayer.self_attn.o_proj.weight": (H, 24),
    "midlayer.mlp.gate_proj.weight": (I, H),
    "midlayer.mlp.up_proj.weight": (I, H),
    "midlayer.mlp.down_proj.weight": (H, I),
    "lm_head.weight": (D, H),
    "d2t": (D,),
    "t2d": (V,),
}
EAGLE1 = {
    "fc.weight": (H, 2 * H),
    "layers.0.post_attention_layernorm.weight": (H,),
    **{f"layers.0.self_attn.{name}.weight": (rows, H) for name, rows in SELF_ATTENTION.items()},
    "layers.0.self_attn.o_proj.weight": (H, 24),
    "layers.0.mlp.gate_proj.weight": (I, H),
    "layers.0.mlp.up_proj.weight": (I, H),
    "layers.0.mlp.down_proj.weight": (H, I),
}
BLOCKS = {f"blocks.{h}.layers.{i}.weight": (H, H) for h in range(3) for i in range(2)}
OLD = {f"{h}.{i}.linear.weight": (H, H) for h in range(3) for i in range(2)}
WRITTEN: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("vllm", "eagle3"): EAGLE3,
    ("speculators", "eagle3"): {n.replace("midlayer.", "layers.0."): s for n, s in EAGLE3.items()},
    ("sglang", "eagle3"): EAGLE3,
    ("tensorrt-llm", "eagle3"): EAGLE3,
    ("vllm", "eagle1"): EAGLE1,
    ("sglang", "eagle1"): {**EAGLE1, "fc.bias": (H,)},
    ("vllm", "medusa"): {**BLOCKS, "lm_head.weight": (V, H)},
    ("tensorrt-llm", "medusa"): {
        **OLD,
        **{f"{h}.{i}.linear.bias": (H,) for h in range(3) for i in range(2)},
        **{f"{h}.2.weight": (V, H) for h in range(3)},
    },
}


@pytest.mark.parametrize(("name", "kind"), WRITTEN)
def test_names_shapes_and_dtypes(name: str, kind: str, tmp_path: Path) -> None:
    exported(name, kind, tmp_path / "out")
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert {n: tuple(t.shape) for n, t in tensors.items()} == WRITTEN[name, kind]
    special = {"d2t": torch.int64, "t2d": torch.bool}
    assert {n: t.dtype for n, t in tensors.items()} == {
        n: special.get(n, torch.bfloat16) for n in tensors
    }


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_export_and_import_are_bit_identical(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Config and tensors, as files of ours: also what no engine has a place for."""
    head = exported(name, kind, tmp_path / "out", dtype)
    imported = import_head(read_checkpoint(tmp_path / "out"), Given())
    assert imported.dtype == dtype
    for folder, one in (("a", head), ("b", imported.head)):
        save_head(one, tmp_path / folder, dtype)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert probe(load_head(tmp_path / "b"), dtype) == probe(head, dtype)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_an_export_passes_its_own_check(name: str, kind: str, tmp_path: Path) -> None:
    exported(name, kind, tmp_path / "out")
    checked = check(tmp_path / "out")
    assert checked.passed, [str(f) for f in checked.findings]
    assert checked.findings == []
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "org/target" in readme
    assert ("**Not run**" in readme) == (name in ("sglang", "tensorrt-llm"))


def test_vllm_settings_as_observed(tmp_path: Path) -> None:
    """Section 3 of the notes on vLLM 0.32: every flag explicit, ids where it reads them."""
    exported("vllm", "eagle3", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": D, "vocab_size": V, "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "num_aux_hidden_states": 3, "target_hidden_size": H, "norm_before_residual": False,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False, "attention_bias": False,
        "tie_word_embeddings": False, "rms_norm_eps": 2e-5, "head_dim": 6,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "max_position_embeddings": 64,
    }  # fmt: skip
    assert wanted.items() <= config.items()
    nested = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9], "use_aux_hidden_state": True}
    assert nested.items() <= config["eagle_config"].items()
    serve = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    out = str(tmp_path / "out")
    assert serve == {"method": "eagle3", "model": out, "num_speculative_tokens": 3}


def test_other_engines_count_layers_by_their_outputs(tmp_path: Path) -> None:
    """SGLang and TensorRT-LLM: id i is the output of layer i, which enters layer i + 1."""
    exported("sglang", "eagle3", tmp_path / "g")
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    exported("tensorrt-llm", "eagle3", tmp_path / "t")
    assert "eagle3_layers_to_capture: [1, 5, 8]" in (tmp_path / "t" / "trtllm.yaml").read_text()


def test_medusa_settings_name_heads_once(tmp_path: Path) -> None:
    """vLLM takes every key with "num" and "heads" for num_heads, the last one winning."""
    exported("vllm", "medusa", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]
    assert config["original_lm_head"] is True
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    serve = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert serve["num_speculative_tokens"] == 3
    export_head("vllm", make("medusa"), Wanted(tmp_path / "out", target(), depth=9))
    serve = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert serve["num_speculative_tokens"] == 3, (
        "vLLM stops when asked for more than there are heads"
    )


def test_speculators_settings(tmp_path: Path) -> None:
    exported("speculators", "eagle3", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model_type" not in config, "vLLM would look for it"
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["hidden_size"] == H


def test_a_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    """vLLM has no parameter for d2t there, and stops at one."""
    head = make("eagle3", draft_vocab=V)
    export_head("vllm", head, Wanted(tmp_path / "out", target()))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    assert check(tmp_path / "out").passed
    again = import_head(read_checkpoint(tmp_path / "out"), Given()).head
    assert again.config == head.config
    assert torch.equal(again.target_ids, torch.arange(V))  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "kind"), WHY_NOT)
def test_what_an_engine_has_no_place_for(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"no {name} export of a head of kind {kind}: "):
        exported(name, kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert kind not in LAYOUTS[name]


def test_taps_that_an_engine_cannot_have(tmp_path: Path) -> None:
    config = make("eagle3").config
    wanted = Wanted(tmp_path / "out", target())
    for taps, name, words in (
        ((0, 6, 9), "tensorrt-llm", "taps the embeddings"),
        ((2, 6), "sglang", "reads three layers; this head taps 2"),
    ):
        changed = type(config)(**{**vars(config), "taps": taps})
        with pytest.raises(ExportError, match=words):
            FORMATS[name].config("eagle3", changed, wanted)
    changed = type(config)(**{**vars(config), "taps": (0, 6, 9)})
    nested = FORMATS["sglang"].config("eagle3", changed, wanted)["eagle_config"]
    assert nested["eagle_aux_hidden_state_layer_ids"] == [-1, 5, 8]


def test_medusa_and_vanilla_need_the_target(tmp_path: Path) -> None:
    for name, kind in (("vllm", "medusa"), ("tensorrt-llm", "medusa"), ("vllm", "vanilla")):
        with pytest.raises(ExportError, match="needs the target"):
            exported(name, kind, tmp_path / "out", embedding=None, lm_head=None)
    for config in ({"model_type": "gemma2"}, {"model_type": "granite", "logits_scaling": 8.0}):
        with pytest.raises(ExportError, match="plain Llama"):
            check_plain(config)
    check_plain({"model_type": "llama", "logit_scale": 1.0})


def test_what_is_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    wanted = Wanted(out, target())
    export_head("tensorrt-llm", make("medusa"), wanted)  # an empty folder is free
    export_head("vllm", make("eagle1"), wanted)  # an earlier export is replaced, no file of it left
    assert not check(out).findings
    foreign(out)
    with pytest.raises(ExportError, match="no earlier export"):
        export_head("vllm", make("eagle3"), wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_check_that_fails_leaves_the_earlier_export(tmp_path: Path) -> None:
    exported("vllm", "eagle3", tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_bytes()

    def refuse(folder: Path) -> None:
        assert (folder / "config.json").read_bytes() != before
        raise ExportError("no")

    with pytest.raises(ExportError, match="no"):
        export_head("vllm", make("eagle1"), Wanted(tmp_path / "out", target()), refuse)
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [heads, T, dim] at positions 0 .. T-1, number by number."""
    _, count, dim = x.shape
    out = torch.empty_like(x)
    for t in range(count):
        for i in range(dim // 2):
            angle = t / theta ** (2 * i / dim)
            a, b = x[:, t, i], x[:, t, i + dim // 2]
            out[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, t, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def vllm_eagle3(folder: Path, taps: Tensor, embedded: Tensor) -> Tensor:
    """What vLLM's llama_eagle3.py computes from a folder: logits [T, V] over the target's tokens."""
    c: dict[str, Any] = json.loads((folder / "config.json").read_text())
    w = {n: t.double() if t.is_floating_point() else t for n, t in
         load_file(folder / "model.safetensors").items()}  # fmt: skip
    eps, theta = c["rms_norm_eps"], c["rope_parameters"]["rope_theta"]
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    hidden = taps @ w["fc.weight"].T
    residual = hidden
    x = torch.cat(
        [
            rms(embedded, w["midlayer.input_layernorm.weight"], eps),
            rms(hidden, w["midlayer.hidden_norm.weight"], eps),
        ],
        dim=-1,
    )
    count = len(x)

    def split(name: str, number: int) -> Tensor:
        out = x @ w[f"midlayer.self_attn.{name}.weight"].T
        return out.view(count, number, dim).transpose(0, 1)

    q, k, v = (
        turn(split("q_proj", heads), theta),
        turn(split("k_proj", kv), theta),
        split("v_proj", kv),
    )
    k, v = k.repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
    scores = (q @ k.transpose(1, 2)) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
    x = residual + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    y = rms(x, w["midlayer.post_attention_layernorm.weight"], eps)
    gate = F.silu(y @ w["midlayer.mlp.gate_proj.weight"].T) * (
        y @ w["midlayer.mlp.up_proj.weight"].T
    )
    x = x + gate @ w["midlayer.mlp.down_proj.weight"].T
    logits = rms(x, w["norm.weight"], eps) @ w["lm_head.weight"].T
    out = torch.full((count, c["vocab_size"]), -torch.inf, dtype=torch.float64)
    out[:, torch.arange(c["draft_vocab_size"]) + w["d2t"]] = logits
    return out


def test_vllms_arithmetic_on_an_export_gives_our_logits(tmp_path: Path) -> None:
    head = exported("vllm", "eagle3", tmp_path / "out")
    random = torch.Generator().manual_seed(3)
    taps = torch.randn(7, 3 * H, generator=random)
    embedded = torch.randn(7, H, generator=random)
    theirs = vllm_eagle3(tmp_path / "out", taps.double(), embedded.double())
    with torch.no_grad():
        out = head(embedded[None], head.fuse(taps[None]), torch.arange(7)[None], causal)
        ours = head.logits(out)[0]
    assert torch.allclose(theirs[:, IDS].float(), ours, atol=1e-4)
    rest = torch.ones(V, dtype=torch.bool)
    rest[IDS] = False
    assert bool(theirs[:, rest].isinf().all())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_vanilla_draft(tied: bool, tmp_path: Path) -> None:
    """A plain Hugging Face folder, with the target's ends: the peer's logits are ours."""
    from transformers import LlamaForCausalLM

    lm_head = {"lm_head": None} if tied else {}
    head = exported("vllm", "vanilla", tmp_path / "out", torch.float32, **lm_head)
    model, report = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    tokens = torch.tensor([[3, 17, 0, 39, 22]])
    with torch.no_grad():
        theirs = model(tokens).logits
        states = head(end(1)[tokens], torch.arange(5)[None], causal)
        ours = states @ end(1 if tied else 2).T
    assert torch.allclose(theirs, ours, atol=1e-4)


def test_the_probe_sees_small_differences() -> None:
    for kind in ("eagle3", "eagle1", "medusa", "vanilla"):
        head, other = make(kind), make(kind)
        mine = probe(head, torch.float32)
        assert not differs(mine, probe(other, torch.float32))
        with torch.no_grad():
            list(other.parameters())[-1][0] += 0.05
        assert differs(mine, probe(other, torch.float32)), kind
    assert differs(mine, mine[:-1])
