"""What heads can have and an engine cannot: it would load the rest, answer, and accept less."""

from __future__ import annotations

from typing import Any

RAW = "whose residual is the raw state whatever a flag says: little is accepted (47/291 with vLLM)"
NO_FC_BIAS = "vLLM has no bias in fc and drops one without a word: every feature is off by it"
REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("vllm", "eagle3"): {"fc_bias": NO_FC_BIAS},
    ("vllm", "eagle1"): {"fc_bias": NO_FC_BIAS},
    ("speculators", "eagle3"): {"fc_bias": NO_FC_BIAS},
    ("sglang", "eagle3"): {
        "norm_before_residual": f"SGLang has no such flag, {RAW}",
        "norm_before_fc": "SGLang has no norm there and skips its weights without a word",
        "qkv_bias": "SGLang has none in an EAGLE-3 layer and skips it without a word",
        "mlp_bias": "SGLang has none there and skips it without a word",
    },
    ("sglang", "eagle1"): {
        "mlp_bias": "SGLang has none there and skips it without a word",
        "own_embeddings": "SGLang puts the target's embeddings in their place",
    },
    ("tensorrt-llm", "eagle3"): {
        "norm_before_residual": f"TensorRT-LLM has no such flag, {RAW}",
    },
}
"""(format, kind) -> switch of the head's config -> what the engine does with it."""


def refused(name: str, kind: str, c: Any) -> dict[str, str]:
    """The switches of a head's config that a format has no place for, and what they would cost."""
    out = {
        switch: why
        for switch, why in REFUSED.get((name, kind), {}).items()
        if getattr(c, switch, False)
    }
    if kind != "eagle3":
        return out
    engine = {"sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}.get(name)
    if engine and c.own_embeddings and c.state_size == c.hidden_size:
        out["own_embeddings"] = (
            f"{engine} puts the target's embeddings in their place where the widths are the same"
        )
    if c.norm_before_fc and c.fc_norm and name in ("speculators", "tensorrt-llm"):
        does = "refuses" if name == "speculators" else "runs fc_norm alone of"
        out["norm_before_fc"] = f"{engine or 'the library'} {does} both norms, this one and fc_norm"
    return out
