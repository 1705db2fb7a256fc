"""What rounding a target's weights changes: perplexity and agreement with the target as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target.base import Target


@dataclass(frozen=True)
class Quality:
    """Over the same tokens, each given those before it.

    perplexity, reference_perplexity: of the rounded target and of the other one
    agreement: share of positions where both have the same likeliest token
    divergence: mean Kullback-Leibler divergence of the rounded distribution from the other, in nats
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    agreement: float
    divergence: float


def quality(
    reference: Target, rounded: Target, texts: Sequence[tuple[Sequence[int], int]]
) -> Quality:
    """Compare two targets of one vocabulary on (token ids, tokens of them that are the prompt).

    Raises ValueError where no token follows a prompt.
    """
    count, agree, spent, spent_reference, divergence = 0, 0, 0.0, 0.0, 0.0
    for ids, prompt in texts:
        if prompt < 1 or len(ids) <= prompt:
            continue
        wanted = torch.tensor(ids[prompt:])
        a = _logprobs(reference, ids)[prompt - 1 : -1].cpu()  # shape: [n, V]
        b = _logprobs(rounded, ids)[prompt - 1 : -1].cpu()
        rows = torch.arange(len(wanted))
        count += len(wanted)
        agree += int((a.argmax(dim=-1) == b.argmax(dim=-1)).sum())
        spent_reference -= float(a[rows, wanted].sum())
        spent -= float(b[rows, wanted].sum())
        divergence += float((a.exp() * (a - b)).sum())
    if not count:
        raise ValueError("no text goes on behind its prompt: there is nothing to compare")
    return Quality(
        count,
        math.exp(spent / count),
        math.exp(spent_reference / count),
        agree / count,
        divergence / count,
    )


def _logprobs(target: Target, ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] of what follows each token."""
    cache = target.new_cache(1, len(ids) + 1)
    rows = cache.rows([0], len(ids))
    positions = torch.arange(len(ids))[None]
    logits, _ = target.forward(torch.tensor([list(ids)]), positions, None, rows)
    assert logits is not None
    return logits[0].log_softmax(dim=-1)
