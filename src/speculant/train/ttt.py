"""Training-time test (EAGLE-3, Li et al. 2025, section 3.2): train the head on its own outputs.

While drafting, the head sees the target's features only up to the root; deeper it sees its own
outputs. `unroll` computes, for every base position t of a sequence at once, what drafting would
compute at depths 0 .. steps - 1 behind t, with the sequence's own tokens as the drafted ones.

Index t is the base throughout: step k at index t is the pair at position t + k,

    embedding of token t + 1 + k,  hidden = features[t] for k = 0, else the output of step k - 1 at t,

and predicts token t + 2 + k. Its keys are those of drafting: the step-0 keys up to t (the target's
features), then one key each of steps 1 .. k, its own chain's. For T = 4, step 2:

         step-0 keys    step 1     step 2
         0 1 2 3        0 1        0 1
    t=0  1 . . .        1 .        1 .
    t=1  1 1 . .        . 1        . 1

`tests/test_ttt.py` holds every step equal to what the drafting code computes at that depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Head


def unroll(head: Eagle3Head, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Outputs of every step: step k is [B, T - k, H], at bases t = 0 .. T - 1 - k.

    embedded: [B, T, H], embedding of token t + 1 at index t
    features: [B, T, H], `head.fuse` of the target's tapped states at t
    """
    count = embedded.shape[1]
    if not 1 <= steps <= count:
        raise ValueError(f"{steps} steps over a sequence of {count} pairs")
    outputs: list[Tensor] = []
    keys: list[Tensor] = []  # of each step, [B, Hkv, T - k, D]
    values: list[Tensor] = []
    hidden = features
    for k in range(steps):
        bases = count - k
        positions = torch.arange(k, count, device=embedded.device).expand(len(embedded), -1)

        def attend(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return step_attention(q, keys, values)

        hidden = head(embedded[:, k:], hidden[:, :bases], positions, attend)
        outputs.append(hidden)
    return outputs


def step_attention(queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of step k = len(keys) - 1: causal over step 0's keys, diagonal over the later ones.

    queries: [B, H, T - k, D]; keys[j], values[j]: [B, Hkv, T - j, D]. Returns [B, H, T - k, D].
    """
    rows, heads, bases, dim = queries.shape
    kv_heads = keys[0].shape[1]
    q = queries.view(rows, kv_heads, heads // kv_heads, bases, dim) / math.sqrt(dim)
    first = keys[0][:, :, None]  # shape: [B, Hkv, 1, T, D]
    scores = q @ first.transpose(-1, -2)  # shape: [B, Hkv, G, T - k, T]
    scores = scores.masked_fill(~step_mask(bases, keys[0].shape[2]).to(q.device), -math.inf)
    own = [(q * key[:, :, None, :bases]).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(q.dtype)
    split = keys[0].shape[2]
    mixed = weights[..., :split] @ values[0][:, :, None]
    for j, value in enumerate(values[1:]):
        mixed = mixed + weights[..., split + j, None] * value[:, :, None, :bases]
    return mixed.reshape(rows, heads, bases, dim)


def step_mask(bases: int, count: int) -> Tensor:
    """Which of step 0's `count` keys each of `bases` bases sees, [bases, count] bool: up to its own.

    Step k's bases are the first T - k: for T = 4, k = 2 these are the rows drawn above.
    """
    return torch.ones(bases, count, dtype=torch.bool).tril()
