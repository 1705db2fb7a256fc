"""Sizes and first values of heads: the target's own layer, where its shapes fit."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Head
from ..target.base import LoadError, Target
from ..target.weights import weight_files
from .losses import lm_head_rows


def layer_sizes(target: Target) -> dict[str, Any]:
    """Fields of a head's config that follow from the target: its layers' sizes, RoPE and limits.

    What a target without a config.json does not tell is set as a Llama of its size would have it.
    """
    info, config = target.info, target_config(target)
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {
        "hidden_size": info.hidden_size,
        "intermediate_size": config.get("intermediate_size") or 4 * info.hidden_size,
        "num_heads": config.get("num_attention_heads") or info.hidden_size // info.head_dim,
        "kv_heads": info.kv_heads,
        "head_dim": info.head_dim,
        "vocab_size": info.vocab_size,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": float(theta),
        "context_length": info.context_length,
    }


def target_config(target: Target) -> dict[str, Any]:
    """config.json of the target's folder, or nothing for a target without one."""
    if target.info.folder is None:
        return {}
    try:
        config: dict[str, Any] = json.loads((target.info.folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {**config, **(config.get("text_config") or {})}


@torch.no_grad()
def init_eagle3(head: Eagle3Head, target: Target) -> bool:
    """Start from the target: its LM head's rows, final norm and last layer; True where it could.

    The attention reads [embedding ; hidden]: the hidden half takes the layer's own projections, the
    embedding half keeps its random start. fc starts as the highest tap alone.
    """
    head.lm_head.weight.copy_(lm_head_rows(target, head.target_ids))
    size = head.config.hidden_size
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] += torch.eye(size, device=head.fc.weight.device)
    layer = layer_tensors(target, target.info.num_layers - 1)
    norm = layer.get("norm")
    if norm is not None and norm.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm)
    mid = head.midlayer
    pairs: dict[str, Tensor] = {
        "input_layernorm.weight": mid.hidden_norm.weight,
        "post_attention_layernorm.weight": mid.post_attention_layernorm.weight,
        "self_attn.q_proj.weight": mid.self_attn.q_proj.weight[:, size:],
        "self_attn.k_proj.weight": mid.self_attn.k_proj.weight[:, size:],
        "self_attn.v_proj.weight": mid.self_attn.v_proj.weight[:, size:],
        "self_attn.o_proj.weight": mid.self_attn.o_proj.weight,
        "mlp.gate_proj.weight": mid.mlp.gate_proj.weight,
        "mlp.up_proj.weight": mid.mlp.up_proj.weight,
        "mlp.down_proj.weight": mid.mlp.down_proj.weight,
    }
    if any(name not in layer or layer[name].shape != to.shape for name, to in pairs.items()):
        return False
    for name, to in pairs.items():
        to.copy_(layer[name])
    return True


def layer_tensors(target: Target, index: int) -> dict[str, Tensor]:
    """Tensors of one of the target's layers by their short names, and `norm`; {} without files."""
    from safetensors import safe_open

    if target.info.folder is None:
        return {}
    prefix, out = f"model.layers.{index}.", {}
    try:
        files = weight_files(target.info.folder)
    except (LoadError, OSError):
        return {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                if name.startswith(prefix):
                    out[name.removeprefix(prefix)] = file.get_tensor(name).float()
                elif name == "model.norm.weight":
                    out["norm"] = file.get_tensor(name).float()
    return out
