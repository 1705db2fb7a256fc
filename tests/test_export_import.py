"""Imports: published layouts, built here file by file, become the same head; what ours cannot have is
refused by name.

The layouts are those of the trainers' sources: EAGLE's repository (cb7e084), SpecForge (a6b6b02),
speculators (c05b95b), vLLM 0.32, Medusa's repository (e2a5d20).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from exporting import IDS, LAYER, RANKS, D, H, V, end, exported, make
from speculant.export.folder import ExportError, read_checkpoint
from speculant.export.given import Given, Imported
from speculant.export.importing import import_head

LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 1, "vocab_size": V,
    "rms_norm_eps": 2e-5, "rope_theta": 5000.0, "max_position_embeddings": 64,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
NAMED = "eagle_aux_hidden_state_layer_ids"


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """A checkpoint's folder, in one safetensors file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(whole, folder / "model.safetensors")
        return folder
    names, places = sorted(whole), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: whole[name] for name in names[i::shards]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def own(kind: str) -> dict[str, Tensor]:
    """The tensors of the random head, in bfloat16."""
    state = make(kind).state_dict()
    return {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}


def read(folder: Path, **given: Any) -> Imported:
    return import_head(read_checkpoint(folder), Given(**given))


def same(imported: Imported, kind: str, **changed: Any) -> None:
    """The imported head is the random one: every number, and every field that a file can tell."""
    head = make(kind)
    for name, tensor in head.state_dict().items():
        assert torch.equal(imported.head.state_dict()[name], tensor), name
    told = {**vars(head.config), "target": {}, "training": {}, **changed}
    assert vars(imported.head.config) == told
    assert imported.dtype == torch.bfloat16


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {n.replace(old, new, 1) if n.startswith(old) else n: t for n, t in tensors.items()}


def test_eagles_repository(tmp_path: Path) -> None:
    """No layer ids in its config, the embeddings in its file; (2, n // 2, n - 3) for 12 layers."""
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": D}
    tensors = own("eagle3") | {"embed_tokens.weight": end(1).bfloat16()}
    folder = write(tmp_path, config, tensors)
    same(read(folder, num_layers=12, embedding=end(1)), "eagle3")
    same(read(folder, taps=(2, 6, 9)), "eagle3")
    with pytest.raises(ExportError, match="names no layer ids: give --target"):
        read(folder)
    kept = read(folder, num_layers=12, embedding=end(5))
    assert kept.head.config.own_embeddings  # type: ignore[union-attr]
    assert "kept as the head's own: they differ" in " ".join(kept.remarks)
    assert "taken for the target's own" in " ".join(read(folder, taps=(2, 6, 9)).remarks)


def test_specforge_and_sglang(tmp_path: Path) -> None:
    """Ids nested in eagle_config, one lower: outputs of layers."""
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": D,
        "eagle_config": {NAMED: [1, 5, 8], "use_aux_hidden_state": True},
    }
    folder = write(tmp_path / "a", config, own("eagle3"))
    imported = read(folder)
    same(imported, "eagle3")
    assert imported.ambiguous == (1, 5, 8)
    same(read(folder, convention="output"), "eagle3")
    same(read(folder, convention="enter"), "eagle3", taps=(1, 5, 8))
    trainer = {f"draft_model.{name}": tensor for name, tensor in own("eagle3").items()}
    same(read(write(tmp_path / "b", config, trainer, shards=3)), "eagle3")


def test_vllm(tmp_path: Path) -> None:
    """Ids at the top level, in any order; layers.0. and a model. prefix; RoPE as transformers 5."""
    rope = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | rope
    config |= {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": D, NAMED: [9, 2, 6]}
    tensors = renamed(own("eagle3"), "midlayer.", "layers.0.")
    imported = read(write(tmp_path / "a", config, tensors, shards=2))
    same(imported, "eagle3")
    assert imported.ambiguous == (3, 7, 10)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    same(read(write(tmp_path / "b", config, prefixed)), "eagle3")
    both = config | {"eagle_config": {NAMED: [1, 5, 8]}}
    with pytest.raises(ExportError, match="with other ids"):
        read(write(tmp_path / "c", both, tensors))


def test_speculators(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": D,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        NAMED: [2, 6, 9],
    }
    tensors = renamed(own("eagle3"), "midlayer.", "layers.0.")
    imported = read(write(tmp_path / "a", config, tensors))
    same(imported, "eagle3")
    assert "speculators" in imported.layout
    missing = {k: v for k, v in config.items() if k != "norm_before_residual"}
    with pytest.raises(ExportError, match="vLLM takes it as true here"):
        read(write(tmp_path / "b", missing, tensors))
    with pytest.raises(ExportError, match="speculators_model_type is 'dflash'"):
        read(write(tmp_path / "c", config | {"speculators_model_type": "dflash"}, tensors))


EAGLE3 = LLAMA | {"draft_vocab_size": D, NAMED: [2, 6, 9]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"attention_bias": True}, r"attention_bias is on, and there is no tensor q_proj\.bias"),
        ({"mlp_bias": True}, r"mlp_bias is on, and there is no tensor gate_proj\.bias"),
        ({"fc_norm": True}, r"tensor fc_norm\.0\.weight is missing"),
        ({"eagle_config": {"norm_before_fc": True}}, r"tensor input_norm\.weight is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"layer_types": ["sliding_attention"]}, "attention sees everything"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
        ({"num_hidden_layers": 2}, "2 layers: our head has one"),
        ({"target_hidden_size": 24, NAMED: [2, 6]}, "needs embeddings of its own width"),
        ({"target_hidden_size": 7}, "reads 48 columns: no whole number of states of 7"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor"),
        ({"draft_vocab_size": 9}, "lm_head.weight has 10 rows, draft_vocab_size is 9"),
        ({NAMED: [2, 6]}, "fc reads 3 layers"),
        ({NAMED: [2, 2, 6]}, "fc reads 3 layers"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": 12}, "fc reads 4 layers"),
    ],
)
def test_what_our_eagle3_cannot_have(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=words) as error:
        read(write(tmp_path, EAGLE3 | config, own("eagle3")))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "name", ["fc.weight", "lm_head.weight", "norm.weight", "midlayer.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = own("eagle3")
    del tensors[name]
    with pytest.raises(ExportError, match=f"tensor {name} is missing"):
        read(write(tmp_path, EAGLE3, tensors))


def test_maps(tmp_path: Path) -> None:
    """Missing t2d, token ids in d2t, another order; and what cannot be known is refused."""
    tensors = own("eagle3")

    def tried(name: str, **changed: Tensor | None) -> Imported:
        parts = {k: v for k, v in (tensors | changed).items() if v is not None}
        return read(write(tmp_path / name, EAGLE3, parts))

    same(tried("a", t2d=None), "eagle3")
    imported = tried("b", d2t=IDS)
    same(imported, "eagle3")
    assert "as t2d confirms" in " ".join(imported.remarks)
    order = torch.tensor([3, 1, 0, 2, 9, 4, 5, 6, 8, 7])
    shuffled = {
        "d2t": IDS[order] - torch.arange(D),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    same(tried("c", **shuffled), "eagle3")
    same(tried("d", d2t=tensors["d2t"].int()), "eagle3")
    with pytest.raises(ExportError, match="holds token ids by the look of it"):
        tried("e", d2t=IDS, t2d=None)
    with pytest.raises(ExportError, match="no d2t: which tokens they are cannot be known"):
        tried("f", d2t=None, t2d=None)
    with pytest.raises(ExportError, match="not as t2d says"):
        tried("g", d2t=torch.zeros(D, dtype=torch.int64))
    with pytest.raises(ExportError, match="for 10 draft tokens"):
        tried("h", d2t=tensors["d2t"][:-1])


def test_biases(tmp_path: Path) -> None:
    """EAGLE-1's trainer has one in fc: of zero it is dropped, any other kept."""
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": True}
    tensors = own("eagle1") | {"embed_tokens.weight": end(1).bfloat16()}
    zero = tensors | {"fc.bias": torch.zeros(H).bfloat16()}
    imported = read(write(tmp_path / "a", config, zero), embedding=end(1))
    same(imported, "eagle1")
    assert "1 biases of zero left out" in " ".join(imported.remarks)
    one = tensors | {"fc.bias": torch.ones(H).bfloat16()}
    head = read(write(tmp_path / "b", config, one)).head
    assert head.config.fc_bias  # type: ignore[union-attr]
    assert bool((head.state_dict()["fc.bias"] == 1).all())
    with pytest.raises(ExportError, match="must be the target's own LM head: give --target"):
        read(write(tmp_path / "c", config, tensors | {"lm_head.weight": end(2).bfloat16()}))
    with pytest.raises(ExportError, match=r"unexpected tensor layers\.0\.input_layernorm"):
        read(
            write(
                tmp_path / "d", config, tensors | {"layers.0.input_layernorm.weight": torch.ones(H)}
            )
        )


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
def test_medusas_repository(prefix: str, tmp_path: Path) -> None:
    """Blocks as {head}.{layer}.linear, an LM head behind each: taken when it is the target's."""
    tensors = {}
    for name, tensor in own("medusa").items():
        _, h, _, i, _ = name.split(".")
        tensors[f"{prefix}{h}.{i}.linear.weight"] = tensor
        tensors[f"{prefix}{h}.{i}.linear.bias"] = torch.zeros(H).bfloat16()
        tensors[f"{prefix}{h}.2.weight"] = end(2).bfloat16()
    config = {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "org/target",
    }
    folder = write(tmp_path / "a", config, tensors)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    same(read(folder, lm_head=end(2)), "medusa", accuracies=())
    for given in ({"lm_head": end(5)}, {}):  # of their own, or not to be compared
        head = read(folder, **given).head
        assert head.config.own_lm_heads  # type: ignore[union-attr]
        for h in range(3):
            assert torch.equal(head.state_dict()[f"lm_heads.{h}.weight"], end(2))


def test_medusa_of_vllm(tmp_path: Path) -> None:
    config = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": 3,
              "num_hidden_layers": 2}  # fmt: skip
    heads = {f"lm_heads.{h}.weight": end(2).bfloat16() for h in range(3)}
    same(
        read(write(tmp_path / "a", config, own("medusa") | heads), lm_head=end(2)),
        "medusa",
        accuracies=(),
    )
    shared = own("medusa") | {"lm_head.weight": end(2).bfloat16()}
    said = config | {"original_lm_head": True}  # by its own word the target's
    same(read(write(tmp_path / "c", said, shared)), "medusa", accuracies=())
    with pytest.raises(ExportError, match="differs from the target's LM head"):
        read(tmp_path / "c", lm_head=end(5))
    with pytest.raises(ExportError, match="give --target to compare them"):
        read(write(tmp_path / "d", config, shared))
    two = {name: heads[name] for name in list(heads)[:2]}
    with pytest.raises(ExportError, match="the LM head of head 2 is missing"):
        read(write(tmp_path / "e", config, own("medusa") | two), lm_head=end(5))
    with pytest.raises(ExportError, match="unexpected tensor token_map"):
        read(write(tmp_path / "b", config, own("medusa") | {"token_map": torch.arange(3)}))


def test_our_exports_keep_what_engines_have_no_place_for(tmp_path: Path) -> None:
    exported("vllm", "medusa", tmp_path / "a")
    assert read(tmp_path / "a").head.config.accuracies == RANKS  # type: ignore[union-attr]
    exported("tensorrt-llm", "eagle3", tmp_path / "b")
    head = read(tmp_path / "b").head
    assert head.config == make("eagle3").config


def test_an_edited_export_is_refused(tmp_path: Path) -> None:
    """Its config and its note say different things: neither is taken for granted."""
    exported("vllm", "eagle3", tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    path.write_text(path.read_text().replace("5000.0", "7000.0"))
    with pytest.raises(ExportError, match=r"rope_theta 7000\.0, its export was made with 5000\.0"):
        read(tmp_path / "a")


def test_pickles_are_refused_with_their_cure(tmp_path: Path) -> None:
    """The cure is one line, and it works."""
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    torch.save(own("eagle3"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match="can run code when it is read") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)
    code = str(error.value).split('python -c "', 1)[1].rsplit('"', 1)[0]
    exec(code, {})
    same(read(tmp_path), "eagle3")


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "burst").touch, ())

    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ExportError, match="a pickle"):
        read(tmp_path)
    assert not (tmp_path / "burst").exists()


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no such folder"):
        read(tmp_path / "no")
    with pytest.raises(ExportError, match=r"config\.json: cannot be read"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ExportError, match="not an object"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    with pytest.raises(ExportError, match="no weights"):
        read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ExportError, match="copy it anew"):
        read(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="no EAGLE-3, EAGLE-1, Medusa or vanilla head"):
        read(tmp_path)


def test_shards(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", EAGLE3, own("eagle3"), shards=4)
    same(read(folder), "eagle3")
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ExportError, match=r"model-00002-of-00004\.safetensors, missing"):
        read(folder)


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    tensors = own("vanilla") | {"model.embed_tokens.weight": end(1), "lm_head.weight": end(2)}
    with pytest.raises(ExportError, match="is a whole model: use it with --draft vanilla"):
        read(write(tmp_path, config, tensors), embedding=end(1), lm_head=end(2))


def test_conventions() -> None:
    with pytest.raises(ExportError, match="choose from auto, enter, output"):
        Given(convention="both")
    assert LAYER["vocab_size"] == V
