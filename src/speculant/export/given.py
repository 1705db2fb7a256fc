"""What an import is told beside the files, and the steps that all kinds of heads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.rope import SCALINGS
from ..heads.weights import Head
from .folder import ExportError

CONVENTIONS = ("auto", "enter", "output")
"""Meaning of a layer id i: the state that enters layer i (vLLM, ours) or its output (SGLang,
SpecForge, TensorRT-LLM); auto decides by where the ids stand."""


@dataclass(frozen=True)
class Given:
    """What the user and the target say about a checkpoint.

    convention:  one of CONVENTIONS
    taps:        layers by our convention, which overrule the file's
    num_layers:  of the target
    hidden_size: of the target
    fingerprint: of the target, recorded in the head
    embedding:   [V, H] of the target, which a head's own must equal
    lm_head:     [V, H] of the target
    noted:       (format, kind, head's config) where an export of ours left a note
    """

    convention: str = "auto"
    taps: tuple[int, ...] | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    embedding: Tensor | None = None
    lm_head: Tensor | None = None
    noted: tuple[str, str, Any] | None = None

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            choices = ", ".join(CONVENTIONS)
            raise ExportError(f"--tap-convention is {self.convention!r}: choose from {choices}")

    def drop_ends(self, tensors: dict[str, Tensor], *names: str) -> list[str]:
        """Take LM heads and embeddings out of tensors, which must be the target's own."""
        out = []
        for name in names:
            if name in tensors:
                what = "LM head" if "lm_head" in name else "embeddings"
                out += self.same_end(name, tensors.pop(name), what)
        return out

    def same_end(self, name: str, tensor: Tensor, what: str) -> list[str]:
        """Remarks on an end of the target that a checkpoint brings along: it must be the same.

        Raises ExportError where they differ, or cannot be compared.
        """
        same = self.is_targets(tensor, what)
        if same is None:
            if what == "embeddings" or self.noted is not None:
                return [f"{name} left out, taken for the target's own (--target compares them)"]
            raise ExportError(
                f"{name} must be the target's own LM head: give --target to compare them"
            )
        if not same:
            raise ExportError(
                f"{name} differs from the target's {what}: this kind of head cannot have its own"
            )
        return [f"{name} left out: it is the target's"]

    def is_targets(self, tensor: Tensor, what: str) -> bool | None:
        """True when a tensor is that end of the target, None where no target is known."""
        theirs = self.embedding if what == "embeddings" else self.lm_head
        if theirs is None:
            return None
        return tensor.shape == theirs.shape and torch.equal(tensor, theirs.to(tensor.dtype))

    def own_embeddings(self, tensors: dict[str, Tensor], trained: bool) -> tuple[bool, list[str]]:
        """True where a head's embeddings are its own and stay, with what to say about them.

        trained: the checkpoint says that they were trained, or are of another width than the target's

        Frozen copies of the target's are what every published trainer makes, and are taken for it
        without a target to compare with.
        """
        name = "embed_tokens.weight"
        if name not in tensors:
            return False, []
        same = self.is_targets(tensors[name], "embeddings")
        if self.noted is not None:
            trained = self.noted[2].own_embeddings
        if trained or same is False:
            told = "they differ from the target's" if same is False else "as its config says"
            return True, [f"{name} kept as the head's own: {told}"]
        return False, self.drop_ends(tensors, name)


@dataclass(frozen=True)
class Imported:
    """A head out of a checkpoint.

    layout:    how it was recognised, in words
    dtype:     of its tensors in the file
    remarks:   what a user should know, a line each
    ambiguous: the other meaning of its layer ids, where the file leaves both open
    """

    head: Head
    layout: str
    dtype: torch.dtype
    remarks: list[str]
    ambiguous: tuple[int, ...] | None = None


def layer_fields(c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a head's config that a Llama config names. Raises ExportError for what is missing."""
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in required if not isinstance(c.get(name), int)]
    if missing:
        raise ExportError(f"config.json has no {missing[0]}")
    heads = c["num_attention_heads"]
    return {
        "hidden_size": c["hidden_size"],
        "intermediate_size": c["intermediate_size"],
        "num_heads": heads,
        "kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "vocab_size": c["vocab_size"],
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(c),
        "context_length": c.get("max_position_embeddings", 2048),
    }


def rope_theta(c: Mapping[str, Any]) -> float:
    """The base of RoPE."""
    return float(_rope(c).get("rope_theta") or c.get("rope_theta") or 10000.0)


def rope_scaling(c: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's scaling as our heads have it, {} for the plain one. ExportError for another kind."""
    rope = _rope(c)
    kind = rope.get("rope_type", rope.get("type", "default"))
    turned = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    if turned not in (None, 1.0):
        raise ExportError(f"partial_rotary_factor is {turned}: our heads turn every dimension")
    if kind == "default":
        return {}
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ExportError(f"RoPE of type {kind!r}: our heads have the plain one, {known}")
    missing = [name for name in SCALINGS[kind] if rope.get(name) is None]
    if missing:
        raise ExportError(f"RoPE of type {kind!r} without {missing[0]}")
    return {"rope_type": kind, **{name: rope[name] for name in SCALINGS[kind]}}


def layer_variant(
    c: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Switches of an EAGLE head's layer by its config and the biases among its tensors, and remarks.

    Biases of zero are taken out: they do nothing. Raises ExportError for what our layer cannot do.
    """
    usual = {"hidden_act": "silu", "logit_scale": 1.0}
    for name, value in usual.items():
        if c.get(name) not in (None, value):
            raise ExportError(f"{name} is {c[name]!r}: our heads have {value!r}")
    if "sliding_attention" in (c.get("layer_types") or ()):
        raise ExportError("layer_types has sliding_attention: our head's attention sees everything")
    biased = {n.split(".")[-2] for n in tensors if n.endswith(".bias")}
    for flag, parts in (("attention_bias", ATTENTION), ("mlp_bias", BIASES["mlp_bias"])):
        if c.get(flag) and not biased.intersection(parts):
            raise ExportError(f"{flag} is on, and there is no tensor {parts[0]}.bias")
    out: dict[str, Any] = {"rope_scaling": rope_scaling(c)}
    dropped = 0
    for switch, parts in BIASES.items():
        names = [n for n in tensors if n.endswith(".bias") and n.split(".")[-2] in parts]
        if any(bool(tensors[name].any()) for name in names):
            out[switch] = True
            continue
        dropped += len(names)
        for name in names:
            del tensors[name]
    return out, [f"{dropped} biases of zero left out"] if dropped else []


BIASES = {
    "fc_bias": ("fc",),
    "qkv_bias": ("q_proj", "k_proj", "v_proj"),
    "o_bias": ("o_proj",),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
"""Switch of a head's config -> the projections that have the bias."""
ATTENTION = (*BIASES["qkv_bias"], *BIASES["o_bias"])


def _rope(c: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = c.get("rope_parameters") or c.get("rope_scaling") or {}
    return rope


def load(head: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into a head: all of them, and all that it has. Raises ExportError otherwise."""
    wanted = head.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing:
        raise ExportError(f"tensor {missing[0]} is missing")
    if extra:
        raise ExportError(f"unexpected tensor {extra[0]}: no head of ours has one")
    for name, want in wanted.items():
        if tensors[name].shape != want.shape:
            raise ExportError(
                f"tensor {name} is {tuple(tensors[name].shape)}, its config says {tuple(want.shape)}"
            )
        if not bool(tensors[name].float().isfinite().all()):
            raise ExportError(f"tensor {name} holds NaN or infinity")
        want.copy_(tensors[name])
    head.eval()
