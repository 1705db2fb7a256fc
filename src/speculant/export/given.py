"""What an import is told beside the files, and the steps that all kinds of heads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    fingerprint: of the target, recorded in the head
    embedding:   [V, H] of the target, which a head's own must equal
    lm_head:     [V, H] of the target
    noted:       (format, kind, head's config) where an export of ours left a note
    """

    convention: str = "auto"
    taps: tuple[int, ...] | None = None
    num_layers: int | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    embedding: Tensor | None = None
    lm_head: Tensor | None = None
    noted: tuple[str, str, Any] | None = None

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            choices = ", ".join(CONVENTIONS)
            raise ExportError(f"--tap-convention is {self.convention!r}: choose from {choices}")

    def drop_ends(self, tensors: dict[str, Tensor], *names: str) -> list[str]:
        """Take embeddings and LM heads out of tensors, which must be the target's own."""
        out = []
        for name in names:
            if name in tensors:
                what = "LM head" if "lm_head" in name else "embeddings"
                out += self.same_end(name, tensors.pop(name), what)
        return out

    def same_end(self, name: str, tensor: Tensor, what: str) -> list[str]:
        """Remarks on an end of the target that a checkpoint brings along: it must be the same.

        Embeddings are frozen copies in every published trainer, and taken on trust without a target;
        LM heads are not. Raises ExportError where they differ, or cannot be compared.
        """
        theirs = self.embedding if what == "embeddings" else self.lm_head
        if theirs is None:
            if what == "embeddings" or self.noted is not None:
                return [f"{name} left out, taken for the target's own (--target compares them)"]
            raise ExportError(
                f"{name} must be the target's own LM head: give --target to compare them"
            )
        if tensor.shape != theirs.shape or not torch.equal(tensor, theirs.to(tensor.dtype)):
            raise ExportError(
                f"{name} differs from the target's {what}: this head has its own, which ours cannot"
            )
        return [f"{name} left out: it is the target's"]


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
    """The base of plain RoPE. Raises ExportError for any other kind."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ExportError(f"RoPE of type {kind!r}: our heads have the plain one")
    return float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0)


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
