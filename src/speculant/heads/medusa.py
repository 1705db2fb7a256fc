"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774): residual blocks on the last hidden state.

From the target's state at t (after the final norm; the target itself predicts token t + 1 from it):

    head h (from 0):  x <- x + SiLU(W x)  for each of its layers, then the target's LM head
    predicts token t + 2 + h

The heads do not see each other's tokens. Weights start at zero, so that every head starts as the
target's own LM head (section 2.1.1). The LM head is the target's, frozen (the paper trains a copy a
head; so have published ones: `own_lm_heads`). Parameter names are vLLM's, the LM heads aside, which
export writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Borrowed
from .variants import SWITCH

TAPS = (-1,)  # the state after the target's final norm (`target.base.LAST`)


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads, how good they are, and what they belong to.

    num_hidden_layers: residual layers a head
    accuracies:        [heads][ranks], measured on held-out text: how often a head's choice of that
                       rank is the target's token; the draft's tree is built from them. () where
                       they were never measured: an imported head's
    taps:              always the target's last state
    target:            fingerprint of the target (`target.load.target_fingerprint`)
    training:          how it was made: command, versions, data sizes, final metrics
    fc_bias:           the residual layers have biases
    own_lm_heads:      every head has an LM head of its own in place of the target's
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_hidden_layers: int = 1
    accuracies: tuple[tuple[float, ...], ...] = ()
    taps: tuple[int, ...] = TAPS
    target: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    fc_bias: bool = field(default=False, metadata=SWITCH)
    own_lm_heads: bool = field(default=False, metadata=SWITCH)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.taps != TAPS:
            raise ValueError(f"taps are {self.taps}: Medusa reads the last state, {TAPS}")
        if self.accuracies and len(self.accuracies) != self.num_heads:
            raise ValueError(f"accuracies of {len(self.accuracies)} heads, not {self.num_heads}")
        for h, ranks in enumerate(self.accuracies):
            if not ranks or not all(0 <= a <= 1 for a in ranks) or sum(ranks) > 1 + 1e-6:
                raise ValueError(f"accuracies of head {h} are no shares of one: {ranks}")


class ResidualBlock(nn.Module):
    """One head: x + SiLU(W x), a few times."""

    def __init__(self, hidden_size: int, num_layers: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers)
        )
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """All heads; `bind` lends them the target's LM head before `logits` is called.

    Heads with LM heads of their own take the loan and do not use it.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        c = self.config = config
        self.blocks = nn.ModuleList(
            ResidualBlock(c.hidden_size, c.num_hidden_layers, c.fc_bias) for _ in range(c.num_heads)
        )
        if c.own_lm_heads:
            self.lm_heads = nn.ModuleList(
                nn.Linear(c.hidden_size, c.vocab_size, bias=False) for _ in range(c.num_heads)
            )
        self.unembed = Borrowed()

    def bind(self, unembed: Callable[[Tensor], Tensor]) -> None:
        """Use this LM head: states [..., H] -> logits [..., V] float32."""
        self.unembed.call = unembed

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """States [..., H] -> [..., heads, H], of the first heads (default all)."""
        return torch.stack([block(hidden) for block in self.blocks[:heads]], dim=-2)

    def logits(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """States [..., H] -> logits [..., heads, V] float32.

        Raises RuntimeError before `bind` where the LM head is the target's.
        """
        if not self.config.own_lm_heads:
            return self.unembed(self(hidden, heads))
        count = len(self.blocks[:heads])
        return torch.stack([self.logits_of(hidden, head) for head in range(count)], dim=-2)

    def logits_of(self, hidden: Tensor, head: int) -> Tensor:
        """States [..., H] -> logits [..., V] float32 of one head, as `logits` has them."""
        state = self.blocks[head](hidden)
        if not self.config.own_lm_heads:
            return self.unembed(state)
        out: Tensor = self.lm_heads[head](state).float()
        return out
