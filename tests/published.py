"""Random heads with the switches of published ones, for the tests of heads and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from exporting import IDS, LAYER, OWNER, RANKS, D, H, V, target
from speculant.export.parts import Wanted
from speculant.export.writing import export_head
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.medusa import MedusaConfig, MedusaHead

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
SHARED: dict[str, dict[str, Any]] = {
    "qkv": {"qkv_bias": True},
    "o": {"o_bias": True},
    "attention": {"qkv_bias": True, "o_bias": True},
    "mlp": {"mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": LINEAR},
    "embeddings": {"own_embeddings": True},
}
EAGLE3: dict[str, dict[str, Any]] = {
    **SHARED,
    "residual": {"norm_before_residual": True},
    "before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "both": {"fc_norm": True, "norm_before_fc": True},
    "output": {"norm_output": True},
    "narrow": {"target_hidden_size": 24, "own_embeddings": True},
    "all": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "qkv_bias": True,
            "o_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3, "own_embeddings": True,
            "target_hidden_size": 24},
}  # fmt: skip
MEDUSA: dict[str, dict[str, Any]] = {
    "bias": {"fc_bias": True},
    "lm_heads": {"own_lm_heads": True},
    "all": {"fc_bias": True, "own_lm_heads": True},
}
FC = {"fc": {"fc_bias": True}}  # which vLLM has not
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": EAGLE3 | FC, "eagle1": SHARED | FC, "medusa": MEDUSA,
}  # fmt: skip
REFUSALS: dict[tuple[str, str], dict[str, str]] = {
    # format, kind -> case: what it is refused for; "" for all: there is no such format
    ("vllm", "eagle3"): {"fc": "fc_bias"},
    ("vllm", "eagle1"): {"fc": "fc_bias"},
    ("speculators", "eagle3"): {"fc": "fc_bias", "both": "norm_before_fc"},
    ("speculators", "eagle1"): {"": ""},
    ("speculators", "medusa"): {"": ""},
    ("sglang", "eagle3"): {
        "residual": "norm_before_residual", "all": "norm_before_residual",
        "before_fc": "norm_before_fc", "both": "norm_before_fc", "qkv": "qkv_bias",
        "attention": "qkv_bias", "mlp": "mlp_bias", "embeddings": "own_embeddings",
    },
    ("sglang", "eagle1"): {"mlp": "mlp_bias", "embeddings": "own_embeddings"},
    ("sglang", "medusa"): {"": ""},
    ("tensorrt-llm", "eagle3"): {
        "residual": "norm_before_residual", "all": "norm_before_residual",
        "both": "norm_before_fc", "embeddings": "own_embeddings",
    },
    ("tensorrt-llm", "eagle1"): {"": ""},
}  # fmt: skip
CASES = [(kind, name) for kind, names in TABLES.items() for name in names]


def make(kind: str, seed: int = 0, **on: Any) -> Any:
    """A random head with switches on, its numbers exact in bfloat16."""
    head: Any
    if kind == "eagle1":
        head = Eagle1Head(Eagle1Config(**LAYER, **OWNER, **on))
    elif kind == "medusa":
        head = MedusaHead(MedusaConfig(H, V, 3, 2, accuracies=RANKS, **OWNER, **on))
    else:
        head = Eagle3Head(Eagle3Config(**LAYER, **OWNER, draft_vocab_size=D, taps=(2, 6, 9), **on))
        head.set_vocabulary(IDS)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            values = torch.randn(p.shape, generator=random) * 0.5
            p.copy_((values * 0.4 + 1 if "norm" in name else values).bfloat16())
    return head.eval()


def written(name: str, kind: str, head: Any, out: Path) -> Path:
    export_head(name, head, Wanted(out, target()))
    return out
