"""From a draft's logits to drafted tokens, one row at a time or many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..proposal import Proposal
from ..sampling import draw
from .base import DraftRow


def sound_rows(logits: Tensor, probs: Tensor) -> list[int]:
    """Rows of logits and probs [b, V] that a token can come from: no NaN or +inf, not all -inf."""
    finite = logits.amax(dim=-1).isfinite()
    if probs is not logits:
        finite = finite & probs.sum(dim=-1).isfinite()
    return finite.nonzero().flatten().tolist()


def draw_tokens(probs: Tensor, rows: Sequence[DraftRow]) -> list[int]:
    """A token a row of probs [b, V], with the row's own random numbers.

    A greedy row's point mass needs none, so its random stream is left alone.
    """
    if not rows:
        return []
    uniforms = [0.0 if row.params.greedy else row.random.take(1)[0] for row in rows]
    at = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)
    tokens: list[int] = draw(probs, at).tolist()
    return tokens


def argmax_tokens(logits: Tensor) -> list[int]:
    """The likeliest token a row of logits [b, V], ties to the lowest id."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def chain_proposal(
    chains: Sequence[Sequence[int]],
    drawn_from: Sequence[tuple[Sequence[int], Tensor]],
    vocab_size: int,
    sampled: bool,
) -> Proposal:
    """A batch of drafted chains. sampled: with draft_probs, else the nodes were chosen.

    drawn_from: per depth, the batch rows that drafted there and their distributions [b, V]
    """
    proposal = Proposal.chains(chains)
    if not sampled or not proposal.width:
        return proposal
    draft_probs = drawn_from[0][1].new_zeros(len(chains), proposal.width, vocab_size)
    for depth, (members, probs) in enumerate(drawn_from[: proposal.width]):
        draft_probs[members, depth] = probs
    chosen = proposal.to(draft_probs.device)  # all of a proposal is on one device
    return Proposal(chosen.tokens, chosen.parents, draft_probs, chosen.lengths)
