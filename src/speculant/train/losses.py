"""Losses of an EAGLE-3 head against the target's distribution, in float32.

Divergences lose 9 to 31 % of their gradient in bfloat16 at high acceptance, so logits are raised
to float32 before any softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepLoss:
    """One unrolled step: the loss to minimise, and what drafting would see there.

    loss:      mean over supervised bases
    alpha:     mean overlap sum of min(target, draft) over the draft vocabulary: the acceptance of
               one sampled token, tokens outside the draft vocabulary counting as never drafted
    top1:      share of bases where head and target agree on the likeliest token: greedy acceptance
    count:     supervised bases
    """

    loss: Tensor
    alpha: float
    top1: float
    count: int


def teacher(last_hidden: Tensor, lm_head: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's probabilities over the draft vocabulary, and whether its argmax is in it.

    last_hidden: [B, T, H] after the target's final norm; lm_head: [V, H]; target_ids: [Vd].
    Returns probabilities [B, T, Vd] of the whole vocabulary's softmax (they sum to the mass that
    the draft vocabulary covers) and [B, T] int64, the argmax as a draft id, -1 when outside it.
    """
    logits = (last_hidden @ lm_head.T).float()  # shape: [B, T, V]
    best = logits.argmax(dim=-1)
    probs = logits.softmax(dim=-1)[..., target_ids]
    place = torch.full((lm_head.shape[0],), -1, dtype=torch.int64, device=best.device)
    place[target_ids] = torch.arange(len(target_ids), device=best.device)
    return probs, place[best]


def step_loss(logits: Tensor, probs: Tensor, best: Tensor, mask: Tensor, kind: str) -> StepLoss:
    """Loss of one step.

    logits: [B, t, Vd] of the head; probs: [B, t, Vd] and best: [B, t] of the teacher for the same
    predicted tokens; mask: [B, t] bool, the bases that are supervised
    kind:   "cross_entropy" against the renormalised teacher, or "overlap", 1 - sum of min(p, q): the
            acceptance probability itself (LK loss, arXiv 2602.23881)

    Raises ValueError for a mask that supervises nothing.
    """
    if kind not in LOSSES:
        raise ValueError(f"unknown loss {kind!r}: choose one of {', '.join(LOSSES)}")
    count = int(mask.sum())
    if not count:
        raise ValueError("the loss mask is empty: nothing in this batch is supervised")
    logp = logits[mask].float().log_softmax(dim=-1)  # shape: [count, Vd]
    p, top = probs[mask].float(), best[mask]
    overlap = torch.minimum(p, logp.exp()).sum(dim=-1)
    if kind == "overlap":
        loss = (1 - overlap).mean()
    else:
        share = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        loss = -(share * logp).sum(dim=-1).mean()
    with torch.no_grad():
        agree = (logp.argmax(dim=-1) == top).float().mean()
    return StepLoss(loss, float(overlap.detach().mean()), float(agree), count)


LOSSES = ("cross_entropy", "overlap")


def unrolled_loss(
    logits: Sequence[Tensor],
    probs: Tensor,
    best: Tensor,
    supervised: Tensor,
    kind: str = "cross_entropy",
    decay: float = 0.8,
) -> tuple[Tensor, list[StepLoss]]:
    """Sum over steps of decay^k times the step's loss, and the steps.

    logits:     of step k, [B, T - 1 - k, Vd] at bases t = 0 .., predicting token t + 2 + k
    probs:      [B, T, Vd] teacher after token t; best: [B, T]; both at index t speak of token t + 1
    supervised: [B, T] bool: token t is one the head should learn to predict (an answer's)

    The shift, at one place: step k at base t predicts token t + 2 + k, whose teacher stands at index
    t + 1 + k and whose supervision at index t + 2 + k. A base whose predicted token lies beyond the
    sequence is not supervised.

        T = 4, step 0:  base 0 -> token 2 (teacher 1, supervised[2]);  base 1 -> token 3;  base 2: none
    """
    total = torch.zeros((), device=probs.device)
    steps = []
    for k, mine in enumerate(logits):
        inside = min(mine.shape[1], supervised.shape[1] - 2 - k)
        part = slice(k + 1, k + 1 + inside)
        mask = supervised[:, k + 2 : k + 2 + inside]
        step = step_loss(mine[:, :inside], probs[:, part], best[:, part], mask, kind)
        total = total + decay**k * step.loss
        steps.append(step)
    return total, steps
