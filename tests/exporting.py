"""Small random heads, and their exports, for the tests of exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.export.checking import Checked, check_export
from speculant.export.folder import NOTE, read_checkpoint
from speculant.export.keys import LAYOUTS
from speculant.export.parts import FromTarget, Wanted
from speculant.export.writing import export_head
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.vanilla import VanillaConfig, VanillaHead
from speculant.heads.weights import save_head

H, I, V, D = 16, 24, 40, 10  # noqa: E741
LAYER: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": I, "num_heads": 4, "kv_heads": 2, "head_dim": 6,
    "rope_theta": 5000.0, "norm_eps": 2e-5, "context_length": 64, "vocab_size": V,
}  # fmt: skip
OWNER: dict[str, Any] = {
    "target": {"architecture": "LlamaForCausalLM", "num_layers": 12, "weights_sha256": "aa"},
    "training": {"tokens": 5},
}
RANKS = ((0.5, 0.2), (0.3, 0.1), (0.2, 0.2))
IDS = torch.tensor([1, 2, 5, 8, 9, 20, 21, 30, 38, 39])
PAIRS = [(name, kind) for name, kinds in LAYOUTS.items() for kind in kinds]


def make(kind: str, seed: int = 0, draft_vocab: int = D) -> Any:
    """A random head of a kind, its numbers exact in bfloat16."""
    head: Any
    if kind == "eagle1":
        head = Eagle1Head(Eagle1Config(**LAYER, **OWNER))
    elif kind == "medusa":
        head = MedusaHead(MedusaConfig(H, V, 3, 2, accuracies=RANKS, **OWNER))
    elif kind == "vanilla":
        head = VanillaHead(VanillaConfig(**LAYER, num_layers=2, **OWNER))
    else:
        config = Eagle3Config(**LAYER, draft_vocab_size=draft_vocab, taps=(2, 6, 9), **OWNER)
        head = Eagle3Head(config)
        head.set_vocabulary(IDS if draft_vocab == D else torch.arange(draft_vocab))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            values = torch.randn(p.shape, generator=random) * (0.5 if p.ndim > 1 else 0.1)
            p.copy_((values + (p.ndim == 1)).bfloat16())
    return head.eval()


def end(seed: int) -> Tensor:
    """An embedding or LM head [V, H] of a target."""
    return torch.randn(V, H, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def target(**more: Any) -> FromTarget:
    """What a small untied target lends."""
    files = {"tokenizer.json": b"{}"}
    ends = {"embedding": end(1), "lm_head": end(2)}
    return FromTarget("org/target", **{**ends, "files": files, **more})


def exported(
    name: str, kind: str, out: Path, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> Any:
    """Export a random head, over whatever is there; returns the head."""
    head = make(kind)
    shutil.rmtree(out, ignore_errors=True)
    export_head(name, head, Wanted(out, target(**more), dtype))
    return head


def saved(kind: str, folder: Path) -> Path:
    """A random head in a folder of ours."""
    save_head(make(kind), folder)
    return folder


def edit(
    folder: Path,
    config: Callable[[dict[str, Any]], object] | None = None,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
) -> None:
    """Change an export's config or tensors in place, its note left as it was."""
    if config is not None:
        data = json.loads((folder / "config.json").read_text())
        config(data)
        (folder / "config.json").write_text(json.dumps(data))
    if tensors is not None:
        path = next(folder.glob("*.safetensors"))
        found = load_file(path)
        tensors(found)
        save_file({name: t.contiguous() for name, t in found.items()}, path)


def foreign(folder: Path) -> Path:
    """The same folder as if another program had written it: without our note."""
    (folder / NOTE).unlink()
    return folder


def check(folder: Path, **options: Any) -> Checked:
    """Check a folder as it lies."""
    return check_export(read_checkpoint(folder), **options)
