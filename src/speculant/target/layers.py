"""A decoder layer's weights, fused and packed, out of a folder or out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..native.attention import can_attend
from ..native.layers import Layers, LayerWeights
from ..native.layers import fits as fits_compiled
from .base import LoadError
from .linear import Linear

if TYPE_CHECKING:
    from .llama import LlamaConfig


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (heads + 2 kv_heads) * D
    q_norm: Tensor | None  # [D], Qwen3
    k_norm: Tensor | None
    out: Linear  # heads * D -> H
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 I
    down: Linear  # I -> H


class Source(Protocol):
    """Where named tensors come from."""

    def take(
        self, name: str, shape: tuple[int, ...], keep: bool = False, copy: bool = False
    ) -> Tensor:
        """A tensor of the given shape; see `weights.Reader.take`."""
        ...

    def linear(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        keep: bool = False,
        bias: Tensor | None = None,
    ) -> Linear:
        """Matrices one below the other, packed; see `weights.Reader.linear`."""
        ...


class Tensors:
    """Named tensors in memory, taken as `weights.Reader` takes them from a folder."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name, self.left = name, dict(tensors)
        self.dtype, self.device = dtype, device

    def take(
        self, name: str, shape: tuple[int, ...], keep: bool = False, copy: bool = False
    ) -> Tensor:
        """A tensor of the given shape. keep: it will be taken again; copy: no view of the original."""
        if name not in self.left:
            raise LoadError(f"{self.name}: tensor {name} is missing")
        tensor = (self.left[name] if keep else self.left.pop(name)).detach()
        if tensor.shape != shape:
            raise LoadError(
                f"{self.name}: tensor {name} is {tuple(tensor.shape)}, expected {shape}"
            )
        return tensor.to(self.device, self.dtype, copy=copy)

    def linear(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        keep: bool = False,
        bias: Tensor | None = None,
    ) -> Linear:
        """Matrices one below the other, packed as they are."""
        parts = [self.take(*part, keep=keep) for part in zip(names, shapes, strict=True)]
        return Linear(torch.cat(parts), bias)

    def finish(self) -> None:
        """Raise LoadError when a tensor was not taken."""
        if self.left:
            raise LoadError(f"{self.name}: unexpected tensors: {', '.join(sorted(self.left)[:3])}")


def read_layer(reader: Source, config: LlamaConfig, index: int) -> Layer:
    """One layer's tensors, fused and packed. Biases and q/k norms are read where they exist."""
    prefix = f"model.layers.{index}."
    heads, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, mid = config.hidden_size, config.intermediate_size
    sizes = {"q_proj": heads, "k_proj": kv, "v_proj": kv}

    def fused(where: str, parts: Mapping[str, int], inputs: int, biased: bool = False) -> Linear:
        names, shapes = [f"{prefix}{where}.{p}" for p in parts], list(parts.values())
        bias = None
        if biased:
            each = zip(names, shapes, strict=True)
            bias = torch.cat([reader.take(f"{n}.bias", (size,)) for n, size in each])
        weights = [f"{n}.weight" for n in names]
        return reader.linear(weights, [(size, inputs) for size in shapes], bias=bias)

    def norm(name: str, size: int) -> Tensor:
        return reader.take(f"{prefix}{name}.weight", (size,), copy=True)

    qk_norm = config.model_type == "qwen3"
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=fused("self_attn", sizes, hidden, biased=config.model_type == "qwen2"),
        q_norm=norm("self_attn.q_norm", config.head_dim) if qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if qk_norm else None,
        out=fused("self_attn", {"o_proj": hidden}, heads),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=fused("mlp", {"gate_proj": mid, "up_proj": mid}, hidden),
        down=fused("mlp", {"down_proj": hidden}, mid),
    )


def compiled_layers(
    config: LlamaConfig, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device
) -> Layers | None:
    """All layers as one call of the compiled library; None where it cannot run them."""
    sized = fits_compiled(config.hidden_size, config.intermediate_size)
    if dtype is not torch.float32 or not sized or not can_attend(dtype, device, config.head_dim):
        return None
    found = []
    for layer in layers:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        own = [linear.own for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        qkv, out, gate_up, down = own
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        found.append(LayerWeights(*norms, qkv, out, gate_up, down))
    sizes = (config.num_heads, config.kv_heads, config.head_dim, config.intermediate_size)
    return Layers(found, *sizes, config.norm_eps)
