"""EAGLE-3's objective: training-time test over answers, against the target's own distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..heads.eagle3 import Eagle3Head
from ..target.base import Target
from .copying import SHARE as COPYING_SHARE
from .copying import copying_loss
from .data import Batch
from .features import Features, States
from .losses import LOSSES, Outcome, Teacher, step_loss
from .teaching import Vocabulary, accepted_chains, head_pairs
from .ttt import Watch, unroll

GOLDEN = (math.sqrt(5) - 1) / 2


class Eagle3Objective:
    """Implements `Objective` for a head and its target.

    steps:  unrolled draft positions; 1 is no training-time test
    decay:  weight of step k is decay^k, see `begin`
    single: share of the run that is trained on one step: it costs a third of the others, and the head
            has to predict from the target's features before it can from its own outputs
    copying: of the head's attention heads, how many at the end are shown what to copy, see `copying`
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: Target,
        features: Features,
        steps: int = 5,
        decay: float = 0.8,
        kind: str = "cross_entropy",
        single: float = 0.0,
        copying: int = 0,
    ) -> None:
        if steps < 1 or not 0 <= single <= 1 or not 0 < decay <= 1 or kind not in LOSSES:
            raise ValueError(
                f"steps {steps}, single {single}, decay {decay} or loss {kind!r} out of range"
            )
        self.module: nn.Module = head
        self.head, self.target, self.features = head, target, features
        self.steps, self.decay, self.kind, self.single = steps, decay, kind, single
        self.active, self.weight, self.copying = steps, decay, copying
        self.vocabulary = Vocabulary.of(target, head.target_ids)

    def begin(self, share: float, step: int) -> None:
        """The run's next step has this number and comes after `share` of it is done.

        Unrolling k + 1 steps with probability decay^k, each then with weight 1, has the gradient of
        weights decay^k on average, for two thirds of the work of five steps at 0.8. Multiples of the
        golden ratio instead of random numbers: any few steps in a row have nearly the same mix.
        """
        even = (step * GOLDEN + 0.5) % 1
        longest = (
            self.steps
            if even <= 0 or self.decay >= 1
            else 1 + int(math.log(even) / math.log(self.decay))
        )
        self.active = 1 if share < self.single else min(self.steps, longest)
        self.weight = 1.0

    def loss(self, batch: Batch) -> Outcome:
        """Weighted sum of the steps' losses over a batch."""
        states = self.features.states(batch)
        bases, valid = batch.bases, batch.valid
        copied: list[Tensor] = []

        def watch(step: int, weights: Tensor) -> None:
            if self.copying:
                copied.append(copying_loss(weights[:, -self.copying :], batch, step))

        outputs = self._unroll(batch, states, bases, self.active, watch)
        wanted = self.vocabulary.teacher(batch, states)
        total, steps = states.last.new_zeros(()), []
        for k, hidden in enumerate(outputs):
            learns, tokens = head_pairs(valid, k)  # base a predicts answer token a + k at step k
            if not len(learns):
                break
            logits = self.head.logits(hidden[valid][learns])  # shape: [m, Vd]
            part = Teacher(wanted.probs[tokens], wanted.best[tokens])
            step = step_loss(logits, part, self.kind)
            total = total + self.weight**k * step.loss
            if copied:
                total = total + COPYING_SHARE * self.weight**k * len(learns) * copied[k]
            steps.append(step)
        return Outcome(total, int(valid.sum()), tuple(steps))

    @torch.no_grad()
    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Reached and accepted bases per draft position; see `accepted_chains`."""
        states = self.features.states(batch)
        most = max(0, batch.valid.shape[1] - depth + 1)
        outputs = self._unroll(batch, states, batch.bases, depth)
        best = [self.head.logits(out[:, :most]).argmax(dim=-1) for out in outputs]
        return accepted_chains(batch, states, [self.head.target_ids[ids] for ids in best])

    def _unroll(
        self,
        batch: Batch,
        states: States,
        bases: Tensor,
        steps: int,
        watch: Watch | None = None,
    ) -> list[Tensor]:
        embedded = self.target.embed(batch.tokens[:, 1:]).float()
        return unroll(self.head, embedded, self.head.fuse(states.taps), bases, steps, watch)
