"""Losses of a draft against the target's distribution, in float32, and what drafting would see.

Divergences lose 9 to 31 % of their gradient in bfloat16 at high acceptance, so logits are raised
to float32 before any softmax. Everything here is over supervised positions only, one a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..target.base import Target

LOSSES = ("cross_entropy", "overlap", "mixed")


@dataclass(frozen=True)
class Teacher:
    """The target's distributions at n supervised positions, over the draft vocabulary.

    probs: [n, Vd], the whole vocabulary's softmax at the draft's tokens: they sum to the mass that
           the draft vocabulary covers
    best:  [n] int64, the target's likeliest token as a draft id, -1 when it is outside
    """

    probs: Tensor
    best: Tensor


def teacher(last: Tensor, weight: Tensor, log_mass: Tensor, best: Tensor) -> Teacher:
    """The teacher from what was stored, without the whole vocabulary's product.

    last:     [n, H] states after the target's final norm; weight: [Vd, H], the LM head's rows of the
              draft vocabulary; log_mass: [n], logsumexp of all V logits; best: [n] draft ids or -1
    """
    logits = (last @ weight.T).float()  # shape: [n, Vd]
    # last may have been rounded since log_mass was taken: a probability never passes 1
    return Teacher((logits - log_mass[:, None]).exp().clamp(max=1.0), best)


def whole_vocabulary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp and argmax of logits [n, V]: what `teacher` needs of the target, [n] each."""
    return logits.float().logsumexp(dim=-1), logits.argmax(dim=-1)


@dataclass(frozen=True)
class StepLoss:
    """One step's loss, and what drafting would see there.

    loss:  sum over the n positions
    alpha: sum of the overlaps sum over x of min(target, draft): acceptance of one sampled token,
           tokens outside the draft vocabulary counting as never drafted
    top1:  positions where head and target agree on the likeliest token: greedy acceptance
    count: n
    """

    loss: Tensor
    alpha: float
    top1: int
    count: int


def step_loss(logits: Tensor, wanted: Teacher, kind: str = "cross_entropy") -> StepLoss:
    """Loss of one step from the draft's logits [n, Vd].

    kind: "cross_entropy" against the renormalised teacher; "overlap", 1 - sum of min(p, q), the
          acceptance probability itself (LK loss, arXiv 2602.23881); "mixed", their sum: overlap has
          no gradient to speak of while p and q barely meet, cross-entropy always has

    Raises ValueError when nothing is supervised.
    """
    if kind not in LOSSES:
        raise ValueError(f"unknown loss {kind!r}: choose one of {', '.join(LOSSES)}")
    if not len(logits):
        raise ValueError("the loss mask is empty: nothing in this batch is supervised")
    logp = logits.float().log_softmax(dim=-1)  # shape: [n, Vd]
    p = wanted.probs.float()
    loss = torch.zeros((), device=logits.device)
    if kind != "overlap":
        share = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        loss = loss - (share * logp).sum()
    if kind == "cross_entropy":
        with torch.no_grad():
            overlap = torch.minimum(p, logp.exp()).sum()
    else:
        overlap = torch.minimum(p, logp.exp()).sum()
        loss = loss + len(logits) - overlap
    with torch.no_grad():
        top1 = int((logp.argmax(dim=-1) == wanted.best).sum())
    return StepLoss(loss, float(overlap.detach()), top1, len(logits))


def lm_head_rows(target: Target, ids: Tensor) -> Tensor:
    """The LM head's rows [len(ids), H] of some tokens, read through the head itself."""
    size, step = target.info.hidden_size, 64
    out = torch.zeros(len(ids), size, device=ids.device)
    for a in range(0, size, step):
        units = torch.eye(size, device=target.info.device)[a : a + step]
        out[:, a : a + step] = target.unembed(units)[:, ids].T
    return out


@dataclass(frozen=True)
class Outcome:
    """What a batch gave.

    loss:   sum over supervised tokens of the steps' weighted losses, to be divided by `count`
    count:  supervised tokens (answer tokens)
    steps:  one entry a draft position: the raw sums
    """

    loss: Tensor
    count: int
    steps: tuple[StepLoss, ...]
