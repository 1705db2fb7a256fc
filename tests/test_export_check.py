"""check-export: every way in which an engine loads a head without a word and accepts less.

The rows are those of the notes on vLLM 0.32 (what is caught, what is silent), each made by spoiling a
good export. A finding must name the tensor or the setting, and what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exporting import D, H, V, check, edit, exported, foreign, make, target
from speculant.drafts import bundled_head
from speculant.export.folder import ExportError
from speculant.export.parts import Wanted
from speculant.export.suspicious import looks_random
from speculant.export.writing import export_head
from speculant.heads.weights import load_head

Config = Callable[[dict[str, Any]], object]
Tensors = Callable[[dict[str, Tensor]], object]


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    """Without some entries; a name that ends in a dot stands for all below it."""

    def change(data: dict[str, Any]) -> None:
        for name in names:
            hit = [key for key in data if key == name or (name[-1] == "." and key.startswith(name))]
            assert hit, name
            for key in hit:
                del data[key]

    return change


def put(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(entries)


def bias(name: str, size: int, value: float = 50.0) -> Tensors:
    return lambda data: data.update({name: torch.full((size,), value).bfloat16()})


def nested(*path: str, value: Any = None) -> Config:
    """Set an entry below another, or delete it when the value is None."""

    def change(data: dict[str, Any]) -> None:
        for part in path[:-1]:
            data = data[part]
        if value is None:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


IDS = "eagle_aux_hidden_state_layer_ids"


def aux(ids: list[int]) -> Config:
    def change(data: dict[str, Any]) -> None:
        data[IDS] = data["eagle_config"][IDS] = ids

    return change


def rename(old: str, new: str) -> Tensors:
    def change(data: dict[str, Tensor]) -> None:
        for name in [name for name in data if name.startswith(old)]:
            data[new + name.removeprefix(old)] = data.pop(name)

    return change


SILENT: dict[str, tuple[str, str, Config | None, Tensors | None, str, str]] = {
    # row: format, kind, config, tensors, subject of the finding, words of its consequence
    "no lm_head": ("vllm", "eagle3", None, drop("lm_head.weight"), "lm_head.weight", "(0/426)"),
    "no fc": ("vllm", "eagle3", None, drop("fc.weight"), "fc.weight", "(44/306)"),
    "norm_before_residual wrong": (
        "vllm", "eagle3", put(norm_before_residual=True), None, "norm_before_residual",
        "without a word",
    ),
    "speculators: flag missing": (
        "speculators", "eagle3", drop("norm_before_residual"), None, "norm_before_residual",
        "takes it as true",
    ),
    "aux ids of other layers": ("vllm", "eagle3", aux([0, 4, 8]), None, IDS, "[2, 6, 9]"),
    "aux ids missing": ("vllm", "eagle3", drop(IDS), None, IDS, "(90/174"),
    "no d2t": ("vllm", "eagle3", None, drop("d2t"), "d2t", "draft id i for target id i"),
    "no rope_parameters": (
        "vllm", "eagle3", drop("rope_parameters"), None, "rope_parameters.rope_theta", "(105/123",
    ),
    "other rope": (
        "vllm", "eagle3", nested("rope_parameters", "rope_theta", value=10000.0), None,
        "rope_parameters.rope_theta", "5000.0",
    ),
    "medusa: no original_lm_head": (
        "vllm", "medusa", drop("original_lm_head"), None, "original_lm_head", "(0/426)",
    ),
    "medusa: no lm_heads": (
        "vllm", "medusa", put(original_lm_head=False), drop("lm_head.weight"), "lm_heads.0.weight",
        "(0/426)",
    ),
    "medusa: no lm_head": ("vllm", "medusa", None, drop("lm_head.weight"), "lm_head.weight", "(0/426)"),
    "aux ids one off": ("vllm", "eagle3", aux([1, 5, 8]), None, IDS, "[2, 6, 9]"),
    "no norm": ("vllm", "eagle3", None, drop("norm.weight"), "norm.weight", "stays at ones"),
    "no post_attention_layernorm": (
        "vllm", "eagle3", None, drop("midlayer.post_attention_layernorm.weight"),
        "midlayer.post_attention_layernorm.weight", "stays at ones",
    ),
    "fc.bias": ("vllm", "eagle3", None, bias("fc.bias", H), "fc.bias", "no effect"),
    "q_proj.bias": (
        "vllm", "eagle3", None, bias("midlayer.self_attn.q_proj.bias", 24),
        "midlayer.self_attn.q_proj.bias", "drops an unknown bias",
    ),
    "EAGLE-1 fc.bias": ("vllm", "eagle1", None, bias("fc.bias", H), "fc.bias", "no effect"),
    "medusa: bias": (
        "vllm", "medusa", None, bias("blocks.0.layers.0.bias", H), "blocks.0.layers.0.bias",
        "no effect",
    ),
    "medusa: unknown name": (
        "vllm", "medusa", None, bias("blocks.0.norm.weight", H), "blocks.0.norm.weight",
        "vLLM ignores names",
    ),
}  # fmt: skip
LOUD: dict[str, tuple[str, str, Config | None, Tensors | None, str]] = {
    "prefix": ("vllm", "eagle3", None, rename("midlayer.", "model.midlayer."), "model.midlayer."),
    "unknown tensor": ("vllm", "eagle3", None, bias("foo", 3), "foo"),
    "no draft_vocab_size": ("vllm", "eagle3", drop("draft_vocab_size"), None, "draft_vocab_size"),
    "rows of lm_head": (
        "vllm", "eagle3", None,
        lambda data: data.update({"lm_head.weight": data["lm_head.weight"][:-1]}), "lm_head.weight",
    ),
    "a wider fc": (
        "vllm", "eagle3", None,
        lambda data: data.update({"fc.weight": data["fc.weight"].repeat(1, 2)}), "fc.weight",
    ),
    "no architectures": ("vllm", "eagle3", drop("architectures"), None, "architectures"),
    "no model_type": ("vllm", "eagle3", drop("model_type"), None, "model_type"),
    "EAGLE-1 input norm": (
        "vllm", "eagle1", None, bias("layers.0.input_layernorm.weight", H),
        "layers.0.input_layernorm.weight",
    ),
    "EAGLE-1 lm_head": (
        "vllm", "eagle1", None,
        lambda data: data.update({"lm_head.weight": torch.ones(V, H).bfloat16()}), "lm_head.weight",
    ),
    "medusa: a head too few": ("vllm", "medusa", None, drop("blocks.2."), "blocks.2.layers.0.weight"),
    "medusa: token_map": ("vllm", "medusa", None, bias("token_map", 3), "token_map"),
}  # fmt: skip


def problems(folder: Path, **options: Any) -> dict[str, str]:
    checked = check(folder, **options)
    assert checked.passed == (not any(f.problem for f in checked.findings))
    found: dict[str, str] = {}
    for finding in checked.findings:
        if finding.problem:
            found[finding.subject] = found.get(finding.subject, "") + finding.text
    return found


@pytest.mark.parametrize("row", SILENT)
def test_what_vllm_loads_without_a_word(row: str, tmp_path: Path) -> None:
    name, kind, config, tensors, subject, words = SILENT[row]
    exported(name, kind, tmp_path / "out")
    edit(tmp_path / "out", config, tensors)
    found = problems(tmp_path / "out")
    assert subject in found, found
    assert words in found[subject]


@pytest.mark.parametrize("row", [row for row, spoilt in SILENT.items() if spoilt[3] is not None])
def test_lost_and_added_tensors_show_without_a_note(row: str, tmp_path: Path) -> None:
    """The files of another program: what is missing or has no effect does not need our note."""
    name, kind, config, tensors, subject, words = SILENT[row]
    exported(name, kind, tmp_path / "out")
    edit(tmp_path / "out", config, tensors)
    found = problems(foreign(tmp_path / "out"))
    assert words in found[subject]


@pytest.mark.parametrize("row", LOUD)
def test_what_vllm_stops_at(row: str, tmp_path: Path) -> None:
    name, kind, config, tensors, subject = LOUD[row]
    exported(name, kind, tmp_path / "out")
    edit(tmp_path / "out", config, tensors)
    assert any(key.startswith(subject) for key in problems(tmp_path / "out"))


@pytest.mark.parametrize(
    "change",
    [
        rename("midlayer.", "layers.0."),
        drop("t2d"),
        lambda data: data.update({"embed_tokens.weight": torch.ones(V, H).bfloat16() * 0.5}),
        lambda data: data.update({"d2t": data["d2t"].int()}),
    ],
    ids=["layers.0", "no t2d", "embeddings", "int32 d2t"],
)
def test_what_is_harmless(change: Tensors, tmp_path: Path) -> None:
    exported("vllm", "eagle3", tmp_path / "out")
    edit(tmp_path / "out", None, change)
    assert problems(foreign(tmp_path / "out")) == {}


def test_a_published_head_passes(tmp_path: Path) -> None:
    """As the EAGLE repository writes it: few settings, whose defaults are then the right ones."""
    exported("vllm", "eagle3", tmp_path / "out")
    kept = ("architectures", "model_type", "hidden_size", "intermediate_size", "head_dim",
            "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
            "draft_vocab_size", "rms_norm_eps")  # fmt: skip
    edit(tmp_path / "out", lambda data: drop(*(set(data) - set(kept)))(data))
    assert problems(foreign(tmp_path / "out")) == {}
    notes = {f.subject for f in check(tmp_path / "out").findings}
    assert {IDS, "norm_before_residual", "rope_parameters.rope_theta"} <= notes


def test_names_of_medusas_repository_pass(tmp_path: Path) -> None:
    """vLLM takes them, with an LM head for every head."""
    exported("tensorrt-llm", "medusa", tmp_path / "out")
    edit(
        tmp_path / "out", None, drop(*(f"{h}.{i}.linear.bias" for h in range(3) for i in range(2)))
    )
    assert problems(foreign(tmp_path / "out"), name="vllm") == {}
    edit(tmp_path / "out", None, drop("1.2.weight"))
    assert "(0/426)" in problems(tmp_path / "out", name="vllm")["lm_heads.1.weight"]


def test_sglang_skips_names_that_others_take(tmp_path: Path) -> None:
    exported("sglang", "eagle3", tmp_path / "out")
    edit(tmp_path / "out", None, rename("midlayer.", "layers.0."))
    found = problems(tmp_path / "out")
    assert "SGLang skips unknown names" in found["layers.0.mlp.up_proj.weight"]
    assert "random numbers" in found["midlayer.mlp.up_proj.weight"]


def test_biases_that_other_engines_insist_on(tmp_path: Path) -> None:
    exported("sglang", "eagle1", tmp_path / "out")
    edit(tmp_path / "out", None, drop("fc.bias"))
    assert "keeps random numbers" in problems(tmp_path / "out")["fc.bias"]
    exported("tensorrt-llm", "medusa", tmp_path / "out")
    edit(tmp_path / "out", None, bias("1.0.linear.bias", H, 0.5))
    assert "must be zeros" in problems(tmp_path / "out")["1.0.linear.bias"]


def test_maps(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def spoilt(change: Tensors) -> str:
        exported("vllm", "eagle3", out)
        edit(out, None, change)
        return problems(foreign(out)).get("d2t", "")

    ids = torch.tensor([1, 2, 5, 8, 9, 20, 21, 30, 38, 39])
    assert "token ids in place of offsets" in spoilt(put(d2t=ids))
    assert "two draft tokens to one" in spoilt(
        lambda data: data["d2t"].__setitem__(1, data["d2t"][0] - 1)
    )
    assert "name different tokens" in spoilt(lambda data: data["t2d"].__setitem__(0, True))
    assert "name different tokens" in spoilt(put(d2t=torch.zeros(D, dtype=torch.int64)))
    exported("vllm", "eagle3", out)
    edit(out, None, put(d2t=torch.zeros(D)))
    assert "float32, not int64" in problems(out)["d2t"]


def test_numbers_that_cannot_be_right(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for value, words in ((0.0, "all zeros, as if never trained"), (torch.nan, "NaN or infinity")):
        exported("vllm", "eagle3", out)
        edit(out, None, lambda data, value=value: data["fc.weight"].fill_(value))  # type: ignore[misc]
        assert words in problems(foreign(out))["fc.weight"]
    exported("vllm", "eagle3", out)
    edit(out, None, lambda data: data["norm.weight"].fill_(1))
    notes = check(foreign(out)).findings
    assert ("norm.weight", False) in {(f.subject, f.problem) for f in notes}


def test_another_tensor_than_was_exported(tmp_path: Path) -> None:
    """One number of 384, in the last place of bfloat16."""
    exported("vllm", "eagle3", tmp_path / "out")
    name = "midlayer.mlp.up_proj.weight"
    edit(tmp_path / "out", None, lambda data: data[name][3, 4].mul_(1.01))
    assert set(problems(tmp_path / "out")) == {name}


def test_a_head_that_computes_something_else(tmp_path: Path) -> None:
    """A setting that no table names: only the read-back head tells."""
    exported("vllm", "eagle3", tmp_path / "out")
    note = tmp_path / "out" / "speculant_export.json"
    text = note.read_text()
    assert '"norm_eps": 2e-05' in text
    note.write_text(text.replace('"norm_eps": 2e-05', '"norm_eps": 0.02'))
    edit(tmp_path / "out", put(rms_norm_eps=0.02))
    assert "does not compute what it did" in problems(tmp_path / "out")["logits"]


def test_the_target(tmp_path: Path) -> None:
    exported("vllm", "eagle3", tmp_path / "out")
    mine = {"architecture": "LlamaForCausalLM", "num_layers": 12, "weights_sha256": "aa"}
    assert problems(tmp_path / "out", target=mine) == {}
    other = problems(tmp_path / "out", target=mine | {"weights_sha256": "bb"})
    assert "weights_sha256 is aa, not bb" in other["target"]
    few = problems(tmp_path / "out", target={"num_layers": 9})
    assert "tap layer 9; the target has 9 layers" in few["layer ids"]


def test_a_note_says_which_engine(tmp_path: Path) -> None:
    exported("sglang", "eagle3", tmp_path / "out")
    with pytest.raises(ExportError, match="exported for sglang, not for vllm"):
        check(tmp_path / "out", name="vllm")
    foreign(tmp_path / "out")
    notes = {f.subject: f.text for f in check(tmp_path / "out").findings}
    assert "one lower" in notes[IDS], "vLLM would read SGLang's ids by its own convention"
    assert problems(tmp_path / "out", name="sglang") == {}


def test_random_numbers_are_told_from_trained_ones(tmp_path: Path) -> None:
    """Fresh layers of torch and normal ones; no matrix of the heads that ship here."""
    torch.manual_seed(0)
    for shape in ((64, 192), (40, 400), (400, 40)):
        assert looks_random(nn.Linear(shape[1], shape[0]).weight.detach())
        assert looks_random(torch.randn(shape).mul(0.02).bfloat16())
    for kind in ("eagle3", "eagle1", "medusa", "vanilla"):
        for name, tensor in load_head(bundled_head(kind)).state_dict().items():
            assert not looks_random(tensor), name
    pattern = torch.outer(torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 192))
    assert not looks_random(torch.randn(64, 192) * 0.1 + pattern)


def test_an_untrained_head_is_not_passed(tmp_path: Path) -> None:
    head = make("eagle3")
    wide = type(head)(type(head.config)(**{**vars(head.config), "hidden_size": 64, "head_dim": 16}))
    wide.set_vocabulary(torch.arange(10))
    export_head("vllm", wide, Wanted(tmp_path / "out", target()))
    found = problems(tmp_path / "out")
    assert "cannot be told from random numbers" in found["fc.weight"]
    assert "cannot be told from random numbers" in found["midlayer.self_attn.o_proj.weight"]
