"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused target features.

Position t pairs the target's features at t with token t + 1 and predicts token t + 2:

    features f_t = fc([low_t ; middle_t ; high_t])            tapped states, in ascending layer order
    layer input    [norm(embedding of token t+1) ; norm(h_t)]  with h_t = f_t, or the head's own output
    layer output g_t, before the final norm, is what the next draft step takes as its h
    logits         lm_head(norm(g_t)) over the draft vocabulary; draft id + d2t = target id

Published heads differ in switches, all off here: `Eagle3Config` has them under vLLM's names.

Parameter names are vLLM's, so that export copies tensors and renames none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..native.layers import Layers
from .layers import MLP, Attention, RMSNorm, check_sizes
from .layers import Attend as Attend
from .variants import SWITCH, LayerVariant


@dataclass(frozen=True)
class Eagle3Config(LayerVariant):
    """Sizes and switches of a head, and what it belongs to.

    taps:     target layers whose entering state is read, ascending; vLLM's convention
    target:   fingerprint of the target (`target.load.target_fingerprint`)
    training: how it was made: command, versions, data sizes, final metrics

    Switches of published heads, beside those of `LayerVariant`:

    norm_before_residual: the residual is the normed state, not the raw one
    norm_before_fc:       one norm over the tapped states side by side (gpt-oss's heads)
    fc_norm:              a norm for each tapped state (EAGLE 3.1); both: in this order
    norm_output:          the state after the final norm is fed back (EAGLE 3.1)
    target_hidden_size:   width of the target's states where it is not the head's own; such a head
                          has embeddings of its own
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
    norm_before_residual: bool = field(default=False, metadata=SWITCH)
    norm_before_fc: bool = field(default=False, metadata=SWITCH)
    fc_norm: bool = field(default=False, metadata=SWITCH)
    norm_output: bool = field(default=False, metadata=SWITCH)
    target_hidden_size: int | None = field(default=None, metadata=SWITCH)

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}: must be from 1 to the target's "
                f"{self.vocab_size}"
            )
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps are {self.taps}: layer ids, ascending, each once")
        if self.target_hidden_size is not None and self.target_hidden_size < 1:
            raise ValueError(f"target_hidden_size is {self.target_hidden_size}: must be at least 1")
        if self.state_size != self.hidden_size and not self.own_embeddings:
            raise ValueError(
                f"target_hidden_size is {self.state_size}, hidden_size {self.hidden_size}: the head "
                "needs embeddings of its own width (own_embeddings)"
            )
        check_sizes(self)
        self.check_variant()

    @property
    def state_size(self) -> int:
        """Width of the target's states."""
        return self.target_hidden_size or self.hidden_size


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """vLLM's default for a target of n layers: (2, n // 2, n - 3)."""
    if num_layers < 7:  # with 6, two of them would be the same
        raise ValueError(
            f"a target of {num_layers} layers is too shallow for default taps: name three"
        )
    return 2, num_layers // 2, num_layers - 3


class Layer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, 2 * c.hidden_size, c)
        self.mlp = MLP(c, c.mlp_bias)
        self.norm_before_residual = c.norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """embedded, hidden [B, T, H] -> [B, T, H]; the residual is the hidden state, raw or normed."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(x, positions, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[norm(embedding) ; norm(hidden)], [..., 2 H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)


class Eagle3Head(nn.Module):
    """The head. `d2t` holds offsets: target id = draft id + d2t[draft id]; `t2d` is a mask."""

    d2t: Tensor
    t2d: Tensor
    compiled: Layers | None = None
    """Its layer in the compiled library, once packed for drafting."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        width = len(c.taps) * c.state_size
        if c.norm_before_fc:
            self.input_norm = RMSNorm(width, c.norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.state_size, c.norm_eps) for _ in c.taps)
        self.fc = nn.Linear(width, c.hidden_size, bias=c.fc_bias)
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(c.vocab_size) < c.draft_vocab_size)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target id of every draft id, ascending."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    @property
    def own_embedding(self) -> Callable[[Tensor], Tensor] | None:
        """Token ids [...] -> its own input embeddings [..., H]; None where it uses the target's."""
        return self.embed_tokens if self.config.own_embeddings else None

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
        """Tapped states [..., len(taps) * state_size] -> features [..., H]."""
        c = self.config
        if c.norm_before_fc:
            taps = self.input_norm(taps)
        if c.fc_norm:
            parts = zip(self.fc_norm, taps.chunk(len(c.taps), dim=-1), strict=True)
            taps = torch.cat([norm(part) for norm, part in parts], dim=-1)
        out: Tensor = self.fc(taps)
        return out

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """One pass: embeddings of the next tokens and features or own outputs -> outputs [B, T, H]."""
        out: Tensor = self.midlayer(embedded, hidden, positions, attend)
        return self.norm(out) if self.config.norm_output else out

    def keys_values(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs [B, T, H] -> keys and values [B, kv_heads, T, D], without the rest of the pass."""
        x = self.midlayer.attention_input(embedded, hidden)
        return self.midlayer.self_attn.keys_values(x, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] -> logits [..., Vd] in float32."""
        out: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return out.float()
