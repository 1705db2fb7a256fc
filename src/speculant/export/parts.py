"""What an export is asked for, what it takes from the target, and config entries all engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Head
from ..heads.vanilla import VanillaHead
from ..heads.weights import Head
from .folder import ExportError
from .layout import Layout, expand


@dataclass(frozen=True)
class FromTarget:
    """What the target lends an export.

    name:         of the target in launch commands: a folder or a hub id
    architecture: of the target
    embedding:    [V, H], its input embeddings
    lm_head:      [V, H], its LM head; None where it is the embedding
    config:       its config.json
    files:        its tokenizer's files, by name
    """

    name: str
    architecture: str = "LlamaForCausalLM"
    embedding: Tensor | None = None
    lm_head: Tensor | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def unembedding(self) -> Tensor:
        """[V, H], the LM head, tied or not. Raises ExportError where the target lent neither."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        if weight is None:
            raise ExportError("this kind of head uses the target's LM head, and needs the target")
        return weight


@dataclass(frozen=True)
class Wanted:
    """An export to be made.

    out:    the folder
    dtype:  of its floating-point tensors
    depth:  tokens to draft a round, for the launch commands
    """

    out: Path
    target: FromTarget
    dtype: torch.dtype = torch.bfloat16
    depth: int = 3

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ExportError(f"--num-draft-tokens is {self.depth}: it must be at least 1")

    @property
    def dtype_name(self) -> str:
        """Its name in a config: bfloat16, float16 or float32."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Made:
    """An export in memory: what goes into config.json, the weights' file and other files.

    launch: how to start the engine with it: Markdown for the README, which names its own files
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str]
    launch: str


def llama_config(c: Any, layers: int, dtype: str) -> dict[str, Any]:
    """Entries of a Llama config for a head's layer sizes.

    RoPE stands twice: transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5
    `rope_parameters`.
    """
    scaling = dict(getattr(c, "rope_scaling", {}))
    rope = {"rope_theta": c.rope_theta, "rope_type": "default", **scaling}
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": layers,
        "vocab_size": c.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": rope,
        "rope_theta": c.rope_theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "max_position_embeddings": c.context_length,
        "attention_bias": getattr(c, "attention_bias", False),
        "mlp_bias": getattr(c, "mlp_bias", False),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def vanilla_config(c: Any, wanted: Wanted) -> dict[str, Any]:
    """config.json of a whole Llama model: the head's layers between the target's two ends."""
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        **llama_config(c, c.num_layers, wanted.dtype_name),
        "tie_word_embeddings": wanted.target.lm_head is None,
        **{name: wanted.target.config[name] for name in ends if name in wanted.target.config},
    }


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in another precision; the others as they are."""
    return {n: t.to(dtype) if t.is_floating_point() else t.clone() for n, t in tensors.items()}


def own_tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """A head's own tensors, by our names, which are vLLM's."""
    out = cast(head.state_dict(), dtype)
    if isinstance(head, Eagle3Head) and head.config.draft_vocab_size == head.config.vocab_size:
        del out["d2t"], out["t2d"]  # an engine has no map there, and stops at one
    return out


def zero_biases(layout: Layout, c: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Biases that an engine insists on and the head does not have, of zeros."""
    wanted = expand(layout, c).items()
    return {
        name: torch.zeros(shape, dtype=dtype)
        for name, (key, shape) in wanted
        if key.switch and not getattr(c, key.switch)
    }


def vanilla_tensors(head: VanillaHead, wanted: Wanted) -> dict[str, Tensor]:
    """A head's layers with the target's embedding, and its LM head where it is another tensor."""
    target = wanted.target
    if target.embedding is None:
        raise ExportError("a vanilla draft uses the target's embedding, and needs the target")
    check_plain(target.config)
    ends = {"model.embed_tokens.weight": target.embedding}
    if target.lm_head is not None:
        ends["lm_head.weight"] = target.lm_head
    return {**own_tensors(head, wanted.dtype), **cast(ends, wanted.dtype)}


def check_plain(config: Mapping[str, Any]) -> None:
    """Raise ExportError for a target that does more than look up embeddings and multiply logits."""
    scaled = ("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping")
    found = next((key for key in scaled if config.get(key) not in (None, 1.0)), None)
    if found is None and str(config.get("model_type", "")).startswith("gemma"):
        found = "embeddings scaled by its width"
    if found is not None:
        raise ExportError(f"the target has {found}, which a plain Llama model cannot have")
