"""Parts that several heads are made of: a Llama decoder layer's, and the target's LM head on loan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, heads, T, D], new keys and values [B, kv_heads, T, D] -> mixed values, as queries."""


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
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections and rotary embedding around an attention the caller computes.

    width: of its input; EAGLE-3's is 2 H wide, all others H
    """

    def __init__(self, c: Sizes, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.head_dim, self.rope_theta = c.head_dim, c.rope_theta

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, T, width], positions [B, T] -> [B, T, H]."""
        rows, new, _ = x.shape
        cos, sin = rotary(positions, self.head_dim, self.rope_theta, x.dtype)
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # shape: [B, heads, T, D]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, new, -1))
        return out

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, width] -> keys and values [B, kv_heads, T, D], as `forward` makes them."""
        cos, sin = rotary(positions, self.head_dim, self.rope_theta, x.dtype)
        return rotate(self._split(self.k_proj(x)), cos, sin), self._split(self.v_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

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


def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, D] for positions [B, T]."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() / theta ** (steps / dim)  # shape: [B, T, D / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, D], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
