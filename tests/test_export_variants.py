"""Switches of published heads: exported, imported and checked.

Independent truth: vLLM's arithmetic written out over the exported folder (`engines`), which reads the
flags from config.json as vLLM does; and for what no engine has, its absence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engines
from exporting import IDS, H, check, edit, end, foreign
from published import CASES, EAGLE3, LLAMA3, MEDUSA, REFUSALS, SHARED, TABLES, make, written
from speculant.export.folder import ExportError, read_checkpoint
from speculant.export.given import Given
from speculant.export.importing import import_head
from speculant.heads.layers import causal


@pytest.mark.parametrize("name", EAGLE3)
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_eagle3_is_vllms(layout: str, name: str, tmp_path: Path) -> None:
    """Two passes: over the target's states, and over what the first one feeds back."""
    if layout == "speculators" and name == "both":
        pytest.skip("speculators refuses both norms")
    head = make("eagle3", **EAGLE3[name])
    folder = engines.Folder(written(layout, "eagle3", head, tmp_path / "out"))
    random = torch.Generator().manual_seed(3)
    taps = torch.randn(7, 3 * head.config.state_size, generator=random)
    embedded = torch.randn(7, H, generator=random)
    first, fed = engines.eagle3(folder, taps.double(), embedded.double())
    second, _ = engines.eagle3(folder, fed, embedded.double().flip(0))
    with torch.no_grad():
        out = head(embedded[None], head.fuse(taps[None]), torch.arange(7)[None], causal)
        again = head(embedded.flip(0)[None], out, torch.arange(7)[None], causal)
        ours = [head.logits(out)[0], head.logits(again)[0]]
    assert torch.allclose(fed.float(), out[0], atol=1e-4)
    for theirs, mine in zip((first, second), ours, strict=True):
        assert torch.allclose(theirs[:, IDS].float(), mine, atol=1e-3)


@pytest.mark.parametrize("name", SHARED)
def test_eagle1_is_vllms(name: str, tmp_path: Path) -> None:
    head = make("eagle1", **SHARED[name])
    folder = engines.Folder(written("vllm", "eagle1", head, tmp_path / "out"))
    random = torch.Generator().manual_seed(3)
    states, embedded = torch.randn(2, 7, H, generator=random)
    theirs = engines.eagle1(folder, states.double(), embedded.double())
    with torch.no_grad():
        ours = head(embedded[None], states[None], torch.arange(7)[None], causal)[0]
    assert torch.allclose(theirs.float(), ours, atol=1e-4)


def test_eagle1s_bias_of_fc_is_sglangs(tmp_path: Path) -> None:
    """SGLang's fc always has one; vLLM's never, and drops it."""
    head = make("eagle1", fc_bias=True)
    folder = engines.Folder(written("sglang", "eagle1", head, tmp_path / "out"))
    states, embedded = torch.randn(2, 7, H, generator=torch.Generator().manual_seed(3))
    theirs = engines.eagle1(folder, states.double(), embedded.double(), fc_bias=True)
    with torch.no_grad():
        ours = head(embedded[None], states[None], torch.arange(7)[None], causal)[0]
    assert torch.allclose(theirs.float(), ours, atol=1e-4)
    with pytest.raises(ExportError, match="fc_bias: vLLM has no bias in fc and drops one"):
        written("vllm", "eagle1", head, tmp_path / "vllm")


@pytest.mark.parametrize("name", MEDUSA)
def test_medusa_is_vllms(name: str, tmp_path: Path) -> None:
    head = make("medusa", **MEDUSA[name])
    folder = engines.Folder(written("vllm", "medusa", head, tmp_path / "out"))
    states = torch.randn(5, H, generator=torch.Generator().manual_seed(3))
    head.bind(lambda hidden: hidden @ end(2).T)
    with torch.no_grad():
        ours = head.logits(states)
    assert torch.allclose(engines.medusa(folder, states.double()).float(), ours, atol=1e-3)
    assert folder.c["original_lm_head"] == (not head.config.own_lm_heads)


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("layout", ["vllm", "speculators", "sglang", "tensorrt-llm"])
def test_there_and_back(layout: str, kind: str, name: str, tmp_path: Path) -> None:
    """Bit for bit, past a check that finds nothing; with the note, and without it where every switch
    can be read from the files. Or refused, by the switch and what it would cost."""
    head, out = make(kind, **TABLES[kind][name]), tmp_path / "out"
    refusals = REFUSALS.get((layout, kind), {})
    if name in refusals or "" in refusals:
        switch = refusals.get(name)
        told = "of kind" if switch is None else f"a head with {switch}: "
        with pytest.raises(ExportError, match=told):
            written(layout, kind, head, out)
        assert not out.exists()
        return
    written(layout, kind, head, out)
    assert [str(f) for f in check(out).findings] == []
    ends = {"embedding": end(1), "lm_head": end(2)}
    read = [import_head(read_checkpoint(out), Given(**ends))]
    if layout in ("vllm", "speculators"):
        found = check(foreign(out), name=layout).findings
        assert not [str(f) for f in found if f.problem]
        read.append(import_head(read_checkpoint(out), Given(**ends)))
    for imported in read:
        for key, tensor in head.state_dict().items():
            assert torch.equal(imported.head.state_dict()[key], tensor), key
        assert set(imported.head.state_dict()) == set(head.state_dict())
        mine, theirs = (dict(vars(h.config)) for h in (head, imported.head))
        for config in (mine, theirs):
            for unsaid in ("target", "training", "accuracies"):
                config.pop(unsaid, None)
        assert mine == theirs


SPOILT: dict[str, tuple[str, str, dict[str, Any], Any, Any, str, str]] = {
    # row: format, kind, switches, config, tensors, subject, words
    "fc_norm flag lost": (
        "vllm", "eagle3", {"fc_norm": True}, {"fc_norm": False}, (), "fc_norm", "True",
    ),
    "fc_norm weight lost": (
        "vllm", "eagle3", {"fc_norm": True}, {}, ("fc_norm.1.weight",), "fc_norm.1.weight", "at ones",
    ),
    "input_norm lost": (
        "vllm", "eagle3", {"norm_before_fc": True}, {}, ("input_norm.weight",), "input_norm.weight",
        "at ones",
    ),
    "norm_output lost": (
        "vllm", "eagle3", {"norm_output": True}, {"norm_output": False}, (), "norm_output", "True",
    ),
    "q bias lost": (
        "vllm", "eagle3", {"qkv_bias": True}, {}, ("midlayer.self_attn.q_proj.bias",),
        "midlayer.self_attn.q_proj.bias", "whatever numbers",
    ),
    "bias of the output that vLLM makes": (
        "vllm", "eagle3", {"qkv_bias": True}, {}, ("midlayer.self_attn.o_proj.bias",),
        "midlayer.self_attn.o_proj.bias", "whatever numbers",
    ),
    "attention_bias lost": (
        "vllm", "eagle1", {"qkv_bias": True}, {"attention_bias": False}, (), "attention_bias", "True",
    ),
    "embeddings lost": (
        "vllm", "eagle3", {"own_embeddings": True}, {}, ("embed_tokens.weight",),
        "embed_tokens.weight", "the target's embeddings",
    ),
    "llama3 lost": (
        "vllm", "eagle3", {"rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}, (),
        "rope_parameters.factor", "turned wrongly",
    ),
    "medusa bias flag lost": (
        "vllm", "medusa", {"fc_bias": True}, {"medusa_fc_bias": False}, (), "medusa_fc_bias", "True",
    ),
    "medusa lm head lost": (
        "vllm", "medusa", {"own_lm_heads": True}, {}, ("lm_heads.1.weight",), "lm_heads.1.weight",
        "(0/426)",
    ),
    "medusa lm head taken for the target's": (
        "vllm", "medusa", {"own_lm_heads": True}, {"original_lm_head": True}, (), "original_lm_head",
        "False",
    ),
    "sglang: bias of fc": (
        "sglang", "eagle3", {"fc_bias": True}, {"bias": False}, (), "bias", "True",
    ),
    "tensorrt: norm in the wrong place": (
        "tensorrt-llm", "eagle3", {"norm_before_fc": True}, {"eagle_config": {}}, (),
        "eagle_config.norm_before_fc", "false is assumed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", SPOILT)
def test_what_engines_lose_without_a_word(row: str, tmp_path: Path) -> None:
    name, kind, on, config, lost, subject, words = SPOILT[row]
    out = written(name, kind, make(kind, **on), tmp_path / "out")
    edit(out, lambda data: data.update(config), lambda data: [data.pop(key) for key in lost])
    found: dict[str, str] = {}
    for finding in check(out).findings:
        if finding.problem:
            found[finding.subject] = found.get(finding.subject, "") + finding.text
    assert subject in found, found
    assert words in found[subject]


def test_what_an_engine_cannot_have_in_a_folder_of_others(tmp_path: Path) -> None:
    """A head that vLLM could serve, checked for SGLang."""
    out = written("vllm", "eagle3", make("eagle3", norm_before_residual=True), tmp_path / "out")
    found = {f.subject: f.text for f in check(foreign(out), name="sglang").findings if f.problem}
    assert "47/291" in found["norm_before_residual"]


def test_specforges_norm_output_is_told(tmp_path: Path) -> None:
    out = written("vllm", "eagle3", make("eagle3", norm_output=True), tmp_path / "out")
    assert not [r for r in import_head(read_checkpoint(out), Given()).remarks if "SpecForge" in r]
    imported = import_head(read_checkpoint(foreign(out)), Given())
    assert "SpecForge" in " ".join(imported.remarks)
    with pytest.raises(ExportError, match="reads states of 16, the target's have 32"):
        import_head(read_checkpoint(out), Given(hidden_size=32))
