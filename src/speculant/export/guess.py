"""What a folder without a note of ours is: its format, its kind, and its head's config."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..heads.eagle1 import Eagle1Config
from ..heads.eagle3 import Eagle3Config
from ..heads.medusa import MedusaConfig
from ..heads.vanilla import VanillaConfig
from .folder import Checkpoint, ExportError
from .given import layer_fields, rope_scaling
from .importing import MEDUSA_NEW, MEDUSA_OLD, find_kind, plain_names
from .importing_eagle3 import IDS, flags


def guess(checkpoint: Checkpoint, name: str | None) -> tuple[str, str, Any]:
    """(format, kind, the head's config) by config.json and the tensors' names.

    name: the format, where it is known; else speculators by its own key, and vLLM for all others

    Raises ExportError for what is no head.
    """
    kind = find_kind(checkpoint)
    if name is None:
        name = "speculators" if "speculators_model_type" in checkpoint.config else "vllm"
    flat = {**checkpoint.config, **(checkpoint.config.get("transformer_layer_config") or {})}
    try:
        return name, kind, _config(checkpoint, kind, name, flat)
    except ExportError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ExportError(f"{checkpoint.path}: config.json makes no head ({error})") from None


def _config(checkpoint: Checkpoint, kind: str, name: str, flat: dict[str, Any]) -> Any:
    if kind == "medusa":
        tensors = plain_names(checkpoint.tensors)
        found = {n: MEDUSA_NEW.fullmatch(n) or MEDUSA_OLD.fullmatch(n) for n in tensors}
        blocks = {n: match for n, match in found.items() if match is not None}
        size = tensors[min(blocks)].shape[0]
        return MedusaConfig(
            hidden_size=flat.get("hidden_size") or size,
            vocab_size=flat["vocab_size"],
            num_heads=1 + max(int(match[1]) for match in blocks.values()),
            num_hidden_layers=flat.get("medusa_num_layers", flat.get("num_hidden_layers", 1)),
            fc_bias=_medusa_bias(tensors, flat, name),
            own_lm_heads=False,  # whether they are the target's cannot be seen
        )
    fields = layer_fields(flat)
    if kind == "vanilla":
        return VanillaConfig(**fields, num_layers=int(flat["num_hidden_layers"]))
    attention = bool(flat.get("attention_bias"))
    fields |= {
        "qkv_bias": attention,
        "o_bias": attention,
        "mlp_bias": bool(flat.get("mlp_bias")),
        "rope_scaling": rope_scaling(flat),
    }
    if kind == "eagle1":
        bias = checkpoint.tensors.get("fc.bias")  # SGLang has one whatever the config says
        fields["fc_bias"] = name == "sglang" and bias is not None and bool(bias.any())
        return Eagle1Config(**fields)
    size = flat.get("target_hidden_size") or fields["hidden_size"]
    fields |= {
        **flags(flat, speculators=False),
        "fc_bias": name in ("sglang", "tensorrt-llm") and bool(flat.get("bias")),
        "target_hidden_size": None if size == fields["hidden_size"] else size,
        "own_embeddings": size != fields["hidden_size"],
    }
    ids = flat.get(IDS) or (flat.get("eagle_config") or {}).get(IDS)
    shift = 1 if name == "sglang" else 0
    if ids is None:  # only how many there are can be known, from fc
        fc = checkpoint.tensors.get("fc.weight")
        ids = range(3 if fc is None else max(1, fc.shape[-1] // size))
        shift = 0
    rows = checkpoint.tensors.get("lm_head.weight")
    draft = flat.get("draft_vocab_size") or (fields["vocab_size"] if rows is None else len(rows))
    taps = tuple(sorted({int(i) + shift for i in ids}))
    return Eagle3Config(**fields, draft_vocab_size=draft, taps=taps)


def _medusa_bias(tensors: dict[str, Tensor], flat: dict[str, Any], name: str) -> bool:
    """True where an engine reads biases of Medusa's blocks: by vLLM's flag, else by the file's."""
    if name == "vllm":
        return bool(flat.get("medusa_fc_bias"))
    return any(bool(t.any()) for n, t in tensors.items() if n.endswith(".bias"))
