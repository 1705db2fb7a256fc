"""EAGLE-1's head (Li et al. 2024a, arXiv 2401.15077): one decoder layer that predicts features.

Position t pairs the target's last hidden state at t (after the final norm) with token t + 1:

    x_t = fc([embedding of token t+1 ; h_t])    with h_t the target's state, or the head's own output
    y_t = x_t + attention(x)_t                  no norm before it: the layer's input norm is left out
    g_t = y_t + mlp(norm(y_t))                  the predicted state at t + 1; no final norm
    logits of token t + 2 = the target's LM head on g_t

g_t is fed back as it is. EAGLE-2 (Li et al. 2024b) drafts trees with the same head. Parameter names
are vLLM's (`llama_eagle.py`), so that export copies tensors and renames none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .layers import MLP, Attend, Attention, Borrowed, RMSNorm, check_sizes
from .variants import LayerVariant

TAPS = (-1,)  # the state after the target's final norm (`target.base.LAST`)


@dataclass(frozen=True)
class Eagle1Config(LayerVariant):
    """Sizes of a head, and what it belongs to.

    taps:     always the target's last state
    target:   fingerprint of the target (`target.load.target_fingerprint`)
    training: how it was made: command, versions, data sizes, final metrics

    The switches of `LayerVariant` are those of published heads.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    taps: tuple[int, ...] = TAPS
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    context_length: int = 2048
    target: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.taps != TAPS:
            raise ValueError(f"taps are {self.taps}: EAGLE-1 reads the last state, {TAPS}")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}: it must be at least 1")
        check_sizes(self)
        self.check_variant()

    @property
    def state_size(self) -> int:
        """Width of the target's states: the head's own, since it predicts them."""
        return self.hidden_size


class Layer(nn.Module):
    """A Llama decoder layer without its input norm."""

    def __init__(self, c: Eagle1Config) -> None:
        super().__init__()
        self.self_attn = Attention(c, c.hidden_size, c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c, c.mlp_bias)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] -> [B, T, H]; the residual is the layer's own input."""
        x = x + self.self_attn(x, positions, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle1Head(nn.Module):
    """The head; `bind` lends it the target's LM head before `logits` is called."""

    compiled: None = None
    """Its layer has no norm before it: the library has none like that."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        self.layers = nn.ModuleList([Layer(c)])
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.unembed = Borrowed()

    @property
    def target_ids(self) -> Tensor:
        """[V] int64: the target id of every draft id: the whole vocabulary."""
        return torch.arange(self.config.vocab_size, device=self.fc.weight.device)

    @property
    def own_embedding(self) -> Callable[[Tensor], Tensor] | None:
        """Token ids [...] -> its own input embeddings [..., H]; None where it uses the target's."""
        return self.embed_tokens if self.config.own_embeddings else None

    def bind(self, unembed: Callable[[Tensor], Tensor]) -> None:
        """Use this LM head: states [..., H] -> logits [..., V] float32."""
        self.unembed.call = unembed

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's last states [..., H] are the features."""
        return taps

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Embeddings of the next tokens, features or own outputs -> predicted states [B, T, H]."""
        x = self._fuse_pair(embedded, hidden)
        out: Tensor = self.layers[0](x, positions, attend)
        return out

    def keys_values(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs [B, T, H] -> keys and values [B, kv_heads, T, D], without the rest of the pass."""
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention)
        return attention.keys_values(self._fuse_pair(embedded, hidden), positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] -> logits [..., V] float32. Raises RuntimeError before `bind`."""
        return self.unembed(hidden)

    def _fuse_pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """fc of embedding (first) and state, [B, T, H] each -> [B, T, H]."""
        out: Tensor = self.fc(torch.cat([embedded, hidden], dim=-1))
        return out
