"""A small causal draft under the target's own embedding and LM head, trained by distillation.

A few Llama decoder layers and a final norm: a language model like the target with most of its
layers missing. Embedding, LM head and tokenizer stay the target's and are not stored; for SmolLM2
two layers are 7 M parameters where a whole small model would have 35 M. The output at t predicts
token t + 1. Parameter names are Hugging Face's for Llama.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .layers import MLP, Attend, Attention, RMSNorm, check_sizes


@dataclass(frozen=True)
class VanillaConfig:
    """Sizes of the draft, and the target it belongs to.

    hidden_size: the target's, whose embedding and LM head are used
    target:      fingerprint of the target (`target.load.target_fingerprint`)
    training:    how it was made: command, versions, data sizes, final metrics
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    context_length: int = 2048
    target: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_layers", "vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        check_sizes(self)


class Layer(nn.Module):
    """A Llama decoder layer."""

    def __init__(self, c: VanillaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The layers and the final norm."""

    def __init__(self, c: VanillaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] -> [B, T, H] after the final norm."""
        for layer in self.layers:
            x = layer(x, positions, attend)
        out: Tensor = self.norm(x)
        return out


class VanillaHead(nn.Module):
    """The trained part of the draft. Drafting runs it as a target of its own (`with_layers`)."""

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)

    def forward(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Embeddings [B, T, H] of tokens at positions [B, T] -> states for the LM head [B, T, H].

        attend: of every layer; `layers.causal` for whole sequences
        """
        out: Tensor = self.model(embedded, positions, attend)
        return out
