"""Parts that several heads are made of: a Llama decoder layer's, and the target's LM head on loan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..native.layers import rms_norm
from .rope import rotary, rotate
from .variants import LayerVariant

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, heads, T, D], new keys and values [B, kv_heads, T, D] -> mixed values, as queries."""


PLAIN = LayerVariant()


class Sizes(Protocol):
    """What a decoder layer needs of a head's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...


def check_sizes(c: Sizes) -> None:
    """Raise ValueError for sizes no layer can have."""
    for name in ("hidden_size", "intermediate_size", "num_heads", "kv_heads", "head_dim"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name} is {getattr(c, name)}: it must be at least 1")
    if c.num_heads % c.kv_heads:
        raise ValueError(f"{c.num_heads} heads do not share {c.kv_heads} K/V heads evenly")
    if c.head_dim % 2:
        raise ValueError(f"head_dim is {c.head_dim}: rotary embedding needs an even one")


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and rotary embedding around an attention the caller computes.

    width:   of its input; EAGLE-3's is 2 H wide, all others H
    variant: biases and the scaling of RoPE
    """

    def __init__(self, c: Sizes, width: int, variant: LayerVariant = PLAIN) -> None:
        super().__init__()
        qkv, out = variant.qkv_bias, variant.o_bias
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=qkv)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=qkv)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=qkv)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=out)
        self.head_dim, self.rope_theta = c.head_dim, c.rope_theta
        self.rope_scaling = variant.rope_scaling

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, T, width], positions [B, T] -> [B, T, H]."""
        rows, new, _ = x.shape
        cos, sin = self._turns(positions, x.dtype)
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # shape: [B, heads, T, D]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, new, -1))
        return out

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, width] -> keys and values [B, kv_heads, T, D], as `forward` makes them."""
        cos, sin = self._turns(positions, x.dtype)
        return rotate(self._split(self.k_proj(x)), cos, sin), self._split(self.v_proj(x))

    def _turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, T, D] of positions [B, T]."""
        return rotary(positions, self.head_dim, self.rope_theta, dtype, self.rope_scaling)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Sizes, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Borrowed:
    """The target's LM head in use by a draft head: called, but no parameter, not saved or copied.

    Held by a head as a plain attribute. Training binds one that gradients pass through.
    """

    def __init__(self) -> None:
        self.call: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V] float32."""
        if self.call is None:
            raise RuntimeError(
                "the head has no LM head of its own: call bind(target.unembed) first"
            )
        return self.call(hidden)

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrowed:
        return self  # a copy of a head must not copy the target with it


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`Attend` of a whole sequence from its start: every position sees itself and those before."""
    groups = queries.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=groups > 1
    )
