"""Training-time test (EAGLE-3, Li et al. 2025, section 3.2): train the head on its own outputs.

While drafting, the head sees the target's features only up to the root; deeper it sees its own
outputs. `unroll` computes, for many base positions of a sequence at once, what drafting would
compute at depths 0 .. steps - 1 behind each, with the sequence's own tokens as the drafted ones.

A base t stays the index throughout: step k at base t is the pair at position t + k,

    embedding of token t + 1 + k,  hidden = features[t] for k = 0, else the output of step k - 1 at t,

and predicts token t + 2 + k. Its keys are those of drafting: the step-0 keys up to t (the target's
features), then one key each of steps 1 .. k, its own chain's. For bases 1 and 3 of T = 4, step 2:

         step-0 keys    step 1     step 2
         0 1 2 3        1 3        1 3
    t=1  1 1 . .        1 .        1 .
    t=3  1 1 1 1        . 1        . 1

Only bases whose predictions are supervised are run: an answer's. Behind a prompt, the head's
queries, MLP and LM head would be wasted on the prompt's positions, whose keys alone are needed.

`tests/test_ttt.py` holds every step equal to what the drafting code computes at that depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..heads.eagle3 import Attend

Watch = Callable[[int, Tensor], None]
"""Told of a step k the weights [B, H, A, T + k] float32: of step 0's T keys, then of the steps' own."""


class Unrolled(Protocol):
    """A head that can be unrolled: EAGLE-3's and EAGLE-1's."""

    def __call__(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Pairs [B, T, H] -> outputs [B, T, H]."""
        ...

    def keys_values(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs [B, T, H] -> the keys and values [B, Hkv, T, D] that attention would read."""
        ...


def unroll(
    head: Unrolled,
    embedded: Tensor,
    features: Tensor,
    bases: Tensor,
    steps: int,
    watch: Watch | None = None,
) -> list[Tensor]:
    """Outputs of every step, each [B, A, H], at the bases; `watch` sees each step's attention.

    embedded: [B, T, H], embedding of token t + 1 at index t
    features: [B, T, H], `head.fuse` of the target's tapped states at t
    bases:    [B, A] int64 in 0 .. T - 1. Step k reads the pair at bases + k; where that lies behind
              the last pair, the last one is read and the output means nothing: mask it
    """
    count = embedded.shape[1]
    if steps < 1 or bases.numel() == 0:
        raise ValueError(f"{steps} steps over {bases.numel()} bases: nothing to unroll")
    positions = torch.arange(count, device=embedded.device).expand(len(embedded), -1)
    key, value = head.keys_values(embedded, features, positions)
    keys, values = [key], [value]  # step 0's [B, Hkv, T, D], then one a step [B, Hkv, A, D]
    seen = step_mask(bases, count)
    hidden = _at(features, bases)
    outputs: list[Tensor] = []
    for k in range(steps):
        first = k == 0

        def attend(q: Tensor, new_key: Tensor, new_value: Tensor, first: bool = first) -> Tensor:
            if not first:  # step 0's own keys are among those of all pairs
                keys.append(new_key)
                values.append(new_value)
            weights = step_weights(q, keys, seen)
            if watch is not None:
                watch(len(keys) - 1, weights)
            return step_values(weights.to(q.dtype), values)

        hidden = head(_at(embedded, (bases + k).clamp(max=count - 1)), hidden, bases + k, attend)
        outputs.append(hidden)
    return outputs


def step_weights(queries: Tensor, keys: Sequence[Tensor], seen: Tensor) -> Tensor:
    """What step k = len(keys) - 1 attends to: step 0's keys as `seen`, of later ones the diagonal.

    queries: [B, H, A, D]; keys[0]: [B, Hkv, T, D]; keys[j]: [B, Hkv, A, D]; seen: [B, A, T] bool.
    Returns [B, H, A, T + k] float32.
    """
    rows, heads, bases, dim = queries.shape
    kv_heads = keys[0].shape[1]
    q = queries.reshape(rows, kv_heads, -1, dim) / math.sqrt(dim)  # shape: [B, Hkv, G * A, D]
    scores = q @ keys[0].transpose(-1, -2)  # shape: [B, Hkv, G * A, T]
    scores = scores.view(rows, heads, bases, -1)
    scores = (
        scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, -math.inf)[:, None]
    )
    q = q.view(rows, kv_heads, -1, bases, dim)
    own = [(q * key[:, :, None]).sum(-1).view(rows, heads, bases, 1) for key in keys[1:]]
    return torch.cat([scores, *own], dim=-1).float().softmax(dim=-1)


def step_values(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Values mixed by `step_weights` [B, H, A, T + k]: [B, H, A, D].

    values[0]: [B, Hkv, T, D]; values[j]: [B, Hkv, A, D]
    """
    rows, heads, bases, _ = weights.shape
    kv_heads, split, dim = values[0].shape[1:]
    first = weights[..., :split].reshape(rows, kv_heads, -1, split)
    mixed = (first @ values[0]).view(rows, kv_heads, -1, bases, dim)
    for j, value in enumerate(values[1:]):
        share = weights[..., split + j].view(rows, kv_heads, -1, bases, 1)
        mixed = mixed + share * value[:, :, None]
    return mixed.reshape(rows, heads, bases, dim)


def step_mask(bases: Tensor, count: int) -> Tensor:
    """Which of step 0's `count` keys each base [B, A] sees, at every step: [B, A, count] bool.

    Those up to its own; the drawing above shows bases 1 and 3.
    """
    return torch.arange(count, device=bases.device) <= bases[..., None]


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, H] at index [B, A]: [B, A, H]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
