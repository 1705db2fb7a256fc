"""Heads of every kind on disk: names and shapes, exact round trips, and what is refused.

Independent truth: the tensor tables of vLLM and Hugging Face written out, and broken files.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.vanilla import VanillaConfig, VanillaHead
from speculant.heads.weights import (
    FORMAT,
    KINDS,
    HeadError,
    check_target,
    head_kind,
    is_head,
    load_head,
    save_head,
)

H, I, V = 16, 24, 32  # noqa: E741
LAYER = {"hidden_size": H, "intermediate_size": I, "num_heads": 4, "kv_heads": 2, "head_dim": 6}
OWNER = {"target": {"architecture": "x", "weights_sha256": "aa"}, "training": {"tokens": 5}}
ATTENTION = {"q_proj": (24, H), "k_proj": (12, H), "v_proj": (12, H), "o_proj": (H, 24)}
MLP = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}


def layer_table(prefix: str, norms: list[str]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama layer."""
    table: dict[str, tuple[int, ...]] = {f"{prefix}{norm}.weight": (H,) for norm in norms}
    table |= {f"{prefix}self_attn.{name}.weight": size for name, size in ATTENTION.items()}
    return table | {f"{prefix}mlp.{name}.weight": size for name, size in MLP.items()}


TABLES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle1": {"fc.weight": (H, 2 * H), **layer_table("layers.0.", ["post_attention_layernorm"])},
    "medusa": {
        f"blocks.{h}.layers.{i}.weight": (H, H) for h in range(3) for i in range(2)
    },
    "vanilla": {
        "model.norm.weight": (H,),
        **layer_table("model.layers.0.", ["input_layernorm", "post_attention_layernorm"]),
        **layer_table("model.layers.1.", ["input_layernorm", "post_attention_layernorm"]),
    },
}  # fmt: skip


def make(kind: str, seed: int = 0) -> Any:
    """A random head of a kind."""
    torch.manual_seed(seed)
    head: Any
    if kind == "eagle1":
        head = Eagle1Head(Eagle1Config(**LAYER, vocab_size=V, **OWNER))
    elif kind == "medusa":
        ranks = ((0.5, 0.2), (0.3, 0.1), (0.2, 0.2))
        head = MedusaHead(MedusaConfig(H, V, 3, 2, accuracies=ranks, **OWNER))
    elif kind == "vanilla":
        head = VanillaHead(VanillaConfig(**LAYER, num_layers=2, vocab_size=V, **OWNER))
    else:
        head = Eagle3Head(
            Eagle3Config(**LAYER, vocab_size=V, draft_vocab_size=8, taps=(0, 1), **OWNER)
        )
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn_like(p))
    return head


@pytest.mark.parametrize("kind", TABLES)
def test_names_and_shapes(kind: str) -> None:
    assert {name: tuple(t.shape) for name, t in make(kind).state_dict().items()} == TABLES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_are_exact(kind: str, tmp_path: Path) -> None:
    head, folder = make(kind), tmp_path / "head"
    save_head(head, folder, torch.float32)
    again = load_head(folder)
    assert type(again) is type(head)
    assert again.config == head.config
    assert not again.training
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in head.state_dict().items())
    assert (head_kind(folder), is_head(folder), is_head(tmp_path)) == (kind, True, False)
    save_head(head, folder)  # bfloat16, over the old one
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    small = load_head(folder, torch.bfloat16).state_dict()
    for name, t in head.state_dict().items():
        assert torch.equal(small[name], t.to(small[name].dtype)), name


def test_files_of_earlier_heads_keep_loading(tmp_path: Path) -> None:
    """The config as the first release of the format wrote it."""
    head, folder = make("eagle3"), tmp_path / "head"
    save_head(head, folder, torch.float32)
    config = {
        "format": "speculant-head-1", "kind": "eagle3", "hidden_size": 16, "intermediate_size": 24,
        "num_heads": 4, "kv_heads": 2, "head_dim": 6, "vocab_size": 32, "draft_vocab_size": 8,
        "taps": [0, 1], "norm_eps": 1e-05, "rope_theta": 10000.0, "context_length": 2048,
        "target": OWNER["target"], "training": OWNER["training"],
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == config
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(folder).config == head.config


@pytest.mark.parametrize("kind", KINDS)
def test_broken_tensors_are_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_head(make(kind), folder, torch.float32)
    file = folder / "model.safetensors"
    whole = load_file(file)
    name = next(name for name, t in whole.items() if t.dim() == 2)
    nan = whole[name].clone()
    nan[0, 0] = math.nan
    rest = {key: t for key, t in whole.items() if key != name}
    for tensors, words in (
        (rest, f"{name} is missing"),
        ({**whole, "foo.bias": torch.zeros(2)}, "unexpected tensor foo.bias"),
        ({**rest, name: whole[name][:-1].clone()}, f"{name} is .* the config says"),
        ({**rest, name: nan}, "NaN"),
    ):
        save_file(tensors, file)
        with pytest.raises(HeadError, match=words) as caught:
            load_head(folder)
        assert "\n" not in str(caught.value)
    file.write_bytes(b"x")
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(folder)


def test_a_kinds_tensors_are_no_other_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_head(make("medusa"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_head(make("eagle1"), folder)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadError, match=r"fc\.weight is missing"):
        load_head(folder)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("medusa", {"format": "other"}, "not a head of this package"),
        ("medusa", {"kind": "hydra"}, "unknown kind of head 'hydra': one of eagle3, eagle1"),
        ("medusa", {"kind": "eagle1"}, "no head's config"),
        ("medusa", {"what": 1}, "no head's config"),
        ("medusa", {"num_heads": 0}, "at least 1"),
        ("medusa", {"accuracies": [[0.5]]}, "accuracies of 1 heads, not 3"),
        ("medusa", {"accuracies": [[0.9, 0.9], [0.1], [0.1]]}, "no shares of one"),
        ("medusa", {"accuracies": [[math.nan], [0.1], [0.1]]}, "no shares of one"),
        ("medusa", {"taps": [2]}, "reads the last state"),
        ("eagle1", {"taps": [0, 1, 2]}, "reads the last state"),
        ("eagle1", {"kv_heads": 3}, "evenly"),
        ("eagle1", {"head_dim": 5}, "even one"),
        ("eagle1", {"vocab_size": 0}, "at least 1"),
        ("vanilla", {"num_layers": 0}, "at least 1"),
        ("vanilla", {"intermediate_size": 0}, "at least 1"),
    ],
)
def test_broken_configs_are_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], words: str
) -> None:
    save_head(make(kind), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HeadError, match=words):
        load_head(tmp_path / "head")


def test_no_config_at_all(tmp_path: Path) -> None:
    for text in (None, "{", "[1]", "{}", json.dumps({"format": FORMAT})):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(HeadError, match=r"config\.json"):
            head_kind(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_another_targets_head_is_refused(kind: str) -> None:
    head = make(kind)
    check_target(head, OWNER["target"], "it")
    with pytest.raises(HeadError, match="another target than it: weights_sha256 differs"):
        check_target(head, OWNER["target"] | {"weights_sha256": "bb"}, "it")


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_the_targets_lm_head_is_borrowed(kind: str) -> None:
    """Unbound it is an error; bound, it is neither a parameter, nor saved, nor copied."""
    head = make(kind)
    with pytest.raises(RuntimeError, match="bind"):
        head.logits(torch.zeros(1, H))
    lm_head = nn.Linear(H, V, bias=False)
    head.bind(lm_head)
    assert set(head.state_dict()) == set(TABLES[kind])
    assert len(list(head.parameters())) == len(TABLES[kind])
    twin = copy.deepcopy(head)
    hidden = torch.randn(3, H)
    lm_head.weight.data.zero_()
    assert float(twin.logits(hidden).detach().abs().max()) == 0
