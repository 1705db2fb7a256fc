"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused target features.

Position t pairs the target's features at t with token t + 1 and predicts token t + 2:

    features f_t = fc([low_t ; middle_t ; high_t])            tapped states, in ascending layer order
    layer input    [norm(embedding of token t+1) ; norm(h_t)]  with h_t = f_t, or the head's own output
    layer output g_t, before the final norm, is what the next draft step takes as its h
    logits         lm_head(norm(g_t)) over the draft vocabulary; draft id + d2t = target id

Parameter names are vLLM's, so that export copies tensors and renames none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, heads, T, D], new keys and values [B, kv_heads, T, D] -> mixed values, as queries."""


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and switches of a head, and what it belongs to.

    taps:     target layers whose entering state is read, ascending; vLLM's convention
    target:   fingerprint of the target (`target.load.target_fingerprint`)
    training: how it was made: command, versions, data sizes, final metrics
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    context_length: int = 2048
    target: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}: must be from 1 to the target's "
                f"{self.vocab_size}"
            )
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps are {self.taps}: layer ids, ascending, each once")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not share {self.kv_heads} K/V heads evenly"
            )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """vLLM's default for a target of n layers: (2, n // 2, n - 3)."""
    if num_layers < 6:
        raise ValueError(
            f"a target of {num_layers} layers is too shallow for default taps: name three"
        )
    return 2, num_layers // 2, num_layers - 3


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
    """Projections of the head's attention; its input is embedding and hidden state, 2 H wide."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.config = c

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, T, 2 H], positions [B, T] -> [B, T, H]."""
        rows, new, _ = x.shape
        shape, dim = (rows, new, -1, self.config.head_dim), self.config.head_dim
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = rotary(positions, dim, self.config.rope_theta, x.dtype)
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # shape: [B, heads, T, D]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, new, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """embedded, hidden [B, T, H] -> [B, T, H]; the residual is the raw hidden state."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(x, positions, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The head. `d2t` holds offsets: target id = draft id + d2t[draft id]; `t2d` is a mask."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(c.vocab_size) < c.draft_vocab_size)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target id of every draft id, ascending."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Draft only these target ids [Vd], distinct; they are kept in ascending order."""
        ids = target_ids.unique()
        c = self.config
        if len(ids) != c.draft_vocab_size or len(target_ids) != len(ids):
            raise ValueError(
                f"{len(ids)} distinct ids for a draft vocabulary of {c.draft_vocab_size}"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= c.vocab_size:
            raise ValueError(f"draft ids must be within 0..{c.vocab_size - 1}")
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped states [..., len(taps) * H] -> features [..., H]."""
        out: Tensor = self.fc(taps)
        return out

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """One pass: embeddings of the next tokens and features or own outputs -> outputs [B, T, H]."""
        out: Tensor = self.midlayer(embedded, hidden, positions, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] -> logits [..., Vd] in float32."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out.float()


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
