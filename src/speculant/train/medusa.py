"""Medusa's objective (Cai et al. 2024, section 2.2.1): every head learns its own distance ahead.

Head h predicts token t + 2 + h from the target's last state at t. With the base of answer token a,
t = prompt + a - 2, that is answer token a + h. For an answer of 4 tokens and 3 heads:

    base of token   0  1  2  3
    head 0 -> token 0  1  2  3
    head 1 -> token 1  2  3  .       nothing there to learn from
    head 2 -> token 2  3  .  .

    loss = sum over heads of 0.8^h times the head's cross-entropy
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..heads.medusa import MedusaHead
from ..target.base import Target
from .data import Batch
from .features import CHUNK, Features
from .losses import LOSSES, Outcome, StepLoss, Teacher, step_loss
from .teaching import (
    Vocabulary,
    accepted_chains,
    answer_tokens,
    at_bases,
    head_pairs,
    likeliest,
)

DECAY = 0.8
"""The paper's weight of head h is 0.8^h."""
KINDS = ("tokens", *LOSSES)


def medusa_loss(
    hidden: Tensor,
    valid: Tensor,
    vocabulary: Vocabulary,
    wanted: Teacher,
    labels: Tensor,
    kind: str = "cross_entropy",
    decay: float = DECAY,
) -> tuple[Tensor, list[StepLoss]]:
    """The weighted sum of the heads' losses, and the heads' own (sums over their bases).

    hidden: [n, heads, H] the heads' outputs at the bases of the n answer tokens of valid [B, A]
    wanted: the teacher of the n answer tokens; labels: [n] the tokens themselves as draft ids, -1
            outside the draft vocabulary
    kind:   "tokens": cross-entropy against the answer's tokens, as in the paper; else one of
            `step_loss`, against the target's distribution

    A head that no answer is long enough for learns nothing from this batch, and has no entry.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown loss {kind!r}: choose one of {', '.join(KINDS)}")
    total, steps = torch.zeros((), device=hidden.device), []
    for h in range(hidden.shape[1]):
        bases, tokens = head_pairs(valid, h)
        if not len(bases):
            break
        logits = vocabulary.logits(hidden[bases, h])  # shape: [m, Vd]
        mine = Teacher(wanted.probs[tokens], wanted.best[tokens])
        if kind == "tokens":
            step = step_loss(logits.detach(), mine)
            loss = F.cross_entropy(logits, labels[tokens], ignore_index=-1, reduction="sum")
            step = replace(step, loss=loss)
        else:
            step = step_loss(logits, mine, kind)
        total = total + decay**h * step.loss
        steps.append(step)
    return total, steps


def accuracies(hits: Tensor, tried: Tensor) -> tuple[tuple[float, ...], ...]:
    """`MedusaConfig.accuracies` from the summed counts of `rank_hits`, [heads, ranks] and [heads]."""
    shares = hits.double() / tried.double().clamp(min=1)[:, None]
    return tuple(tuple(row) for row in shares.tolist())


class MedusaObjective:
    """Implements `Objective` for the heads and their target.

    ids: [Vd] target ids that the loss is over; None takes the whole vocabulary
    """

    def __init__(
        self,
        head: MedusaHead,
        target: Target,
        features: Features,
        ids: Tensor | None = None,
        kind: str = "cross_entropy",
        decay: float = DECAY,
    ) -> None:
        self.module: nn.Module = head
        self.head, self.target, self.features = head, target, features
        self.kind, self.decay = kind, decay
        device = next(head.parameters()).device
        whole = torch.arange(target.info.vocab_size, device=device)
        self.vocabulary = Vocabulary.of(target, whole if ids is None else ids)
        head.bind(target.unembed)

    def begin(self, share: float, step: int) -> None:
        """The objective is the same all along."""

    def loss(self, batch: Batch) -> Outcome:
        """Every head's loss over a batch's answers."""
        states, valid = self.features.states(batch), batch.valid
        hidden = self.head(at_bases(states.last, batch.bases, valid))  # shape: [n, heads, H]
        labels = self.vocabulary.place[answer_tokens(batch)[valid]]
        wanted = self.vocabulary.teacher(batch, states)
        parts = (self.vocabulary, wanted, labels, self.kind, self.decay)
        total, steps = medusa_loss(hidden, valid, *parts)
        return Outcome(total, steps[0].count, tuple(steps))

    @torch.no_grad()
    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Reached and accepted bases per draft position of the heads' first choices, a chain.

        Positions beyond the heads are not drafted. See `accepted_chains`.
        """
        states, heads = self.features.states(batch), len(self.head.blocks)
        most = max(0, batch.valid.shape[1] - depth + 1)
        rows = torch.arange(len(batch.valid), device=states.last.device)[:, None]
        hidden = self.head(states.last[rows, batch.bases[:, :most]], depth)
        chosen = likeliest(hidden, self.target.unembed)  # shape: [B, A', min(heads, depth)]
        none = chosen.new_full(chosen.shape[:2], -1)
        drafted = [chosen[..., k] if k < heads else none for k in range(depth)]
        return accepted_chains(batch, states, drafted)

    @torch.no_grad()
    def rank_hits(self, batch: Batch, ranks: int) -> tuple[Tensor, Tensor]:
        """How often each head's choice of each rank was the answer's token, and of how many.

        Returns counts [heads, ranks] and [heads], to be summed over held-out batches: `accuracies`
        makes of them what the draft's tree is built from.
        """
        states, valid = self.features.states(batch), batch.valid
        tokens = answer_tokens(batch)[valid]
        base_states = at_bases(states.last, batch.bases, valid)
        heads = len(self.head.blocks)
        hits, tried = torch.zeros(heads, ranks), torch.zeros(heads)
        for h, block in enumerate(self.head.blocks):
            bases, ahead = head_pairs(valid, h)
            tried[h] = len(bases)
            for some, token in zip(bases.split(CHUNK), tokens[ahead].split(CHUNK), strict=True):
                logits = self.target.unembed(block(base_states[some]))
                top = logits.topk(ranks, dim=-1).indices  # shape: [m, ranks]
                hits[h] += (top == token[:, None]).sum(dim=0).cpu()
        return hits, tried
