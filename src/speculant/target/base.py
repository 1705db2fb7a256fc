"""What the loop needs of a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..cache import CacheRows, KVCache

LAST = -1
"""Tap id of the hidden state after the final norm; tap i >= 0 is the state that *enters* layer i."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    eos_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the tokenizer's own leading tokens (BOS), if any."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation and the opening of the assistant's turn."""
        ...

    def fingerprint(self) -> str:
        """Hash of the vocabulary and of how text becomes tokens."""
        ...


@dataclass(frozen=True)
class TargetInfo:
    """Sizes of a target."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_heads: int
    head_dim: int
    context_length: int
    dtype: torch.dtype
    device: torch.device
    folder: Path | None = None  # where the weights lie, for the fingerprint
    weights: str = ""  # what the matrices are held in, where that is not `dtype`


class Target(Protocol):
    """The model whose distribution is kept."""

    info: TargetInfo
    tokenizer: Tokenizer

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] int64 -> input embeddings [..., H], as the first layer gets them."""
        ...

    def unembed(self, hidden: Tensor) -> Tensor:
        """States after the final norm [..., H] (tap LAST) -> logits [..., V] float32: the LM head."""
        ...

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int] = (),
        need_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One forward of new tokens behind each row's cached prefix.

        tokens:    [B, T] int64
        positions: [B, T] int64, rotary or learned positions
        mask:      [B, T, T] bool, which new tokens each new token sees, itself included; None is
                   causal. The cached prefix is always visible (a sliding window aside)
        cache:     rows of the cache; K/V are written behind the rows' lengths, which stay as they
                   are: the caller keeps what it wants (`KVCache.keep`)
        taps:      layer ids or LAST, see there

        Returns logits [B, T, V] float32 (None unless needed) and the tapped states concatenated,
        [B, T, len(taps) * H] (None without taps).
        """
        ...


class LoadError(Exception):
    """A model that cannot be loaded; the message is one line for the user."""


class UnknownModelError(LoadError, ValueError):
    """A name, path, backend, dtype or device that means nothing: a mistake in the command."""
