"""Distilling the target into a few decoder layers under its own embedding and LM head.

A language model's shift: the output at position t predicts token t + 1, of which the target's own
state at t gives the distribution. Answer token a is predicted at prompt + a - 1:

    position     ...  prompt-2  prompt-1  prompt   prompt+1
    token                       (prompt)  answer 0  answer 1
    predicts                    answer 0  answer 1  answer 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..heads.layers import causal
from ..heads.vanilla import VanillaHead
from ..target.base import Target
from .data import Batch
from .features import Features
from .init import layer_tensors
from .losses import Outcome, step_loss
from .teaching import Vocabulary, accepted_chains, at_bases, likeliest


def predictions(head: VanillaHead, embedded: Tensor, bases: Tensor, valid: Tensor) -> Tensor:
    """States [n, H] that predict the valid answer tokens, row by row: the shift, at one place.

    embedded: [B, T, H], embedding of token t at index t; bases: [B, A] as in `Batch`: prompt + a - 2
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device).expand(len(embedded), -1)
    return at_bases(head(embedded, positions, causal), bases + 1, valid)


@torch.no_grad()
def start_from_layers(head: VanillaHead, target: Target, indices: Sequence[int]) -> bool:
    """Start as the target with all but these layers left out; True where their shapes fit."""
    if len(indices) != len(head.model.layers):
        raise ValueError(f"{len(indices)} layers to start {len(head.model.layers)} from")
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer, index in zip(head.model.layers, indices, strict=True):
        tensors = layer_tensors(target, index)
        norm = tensors.pop("norm", None)
        own = dict(layer.named_parameters())
        if norm is None or set(own) != set(tensors):  # biases, norms of queries and keys
            return False
        pairs += [(own[name], tensors[name]) for name in own]
        pairs.append((head.model.norm.weight, norm))
    if any(to.shape != wanted.shape for to, wanted in pairs):
        return False
    for to, wanted in pairs:
        to.copy_(wanted)
    return True


class VanillaObjective:
    """Implements `Objective` for the draft and its target.

    ids:  [Vd] target ids that the loss is over; None takes the whole vocabulary
    kind: of `step_loss`; cross-entropy against the teacher has the gradient of their KL divergence
    """

    def __init__(
        self,
        head: VanillaHead,
        target: Target,
        features: Features,
        ids: Tensor | None = None,
        kind: str = "cross_entropy",
    ) -> None:
        self.module: nn.Module = head
        self.head, self.target, self.features, self.kind = head, target, features, kind
        device = next(head.parameters()).device
        whole = torch.arange(target.info.vocab_size, device=device)
        self.vocabulary = Vocabulary.of(target, whole if ids is None else ids)

    def begin(self, share: float, step: int) -> None:
        """The objective is the same all along."""

    def loss(self, batch: Batch) -> Outcome:
        """Distillation over a batch's answers."""
        states = self.features.states(batch)
        predicted = self._predict(batch, batch.valid)
        wanted = self.vocabulary.teacher(batch, states)
        step = step_loss(self.vocabulary.logits(predicted), wanted, self.kind)
        return Outcome(step.loss, step.count, (step,))

    @torch.no_grad()
    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Reached and accepted bases per draft position; see `accepted_chains`.

        One pass does for all depths: as long as a chain is accepted, the draft has read the answer.
        """
        states, valid = self.features.states(batch), batch.valid
        chosen = torch.full(valid.shape, -1, dtype=torch.int64, device=states.last.device)
        chosen[valid] = likeliest(self._predict(batch, valid), self.target.unembed)
        most = max(0, valid.shape[1] - depth + 1)
        drafted = [chosen[:, k : k + most] for k in range(depth)]
        return accepted_chains(batch, states, drafted)

    def _predict(self, batch: Batch, valid: Tensor) -> Tensor:
        embedded = self.target.embed(batch.tokens[:, :-1]).float()
        return predictions(self.head, embedded, batch.bases, valid)
