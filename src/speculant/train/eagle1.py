"""EAGLE-1's objective (Li et al. 2024a, on training its draft): regress the target's next feature.

The output at base t, from the target's feature at t and token t + 1, predicts the feature at t + 1,
from which the target's LM head makes token t + 2:

    token          ... t      t+1         t+2
    feature            f_t    f_t+1  ---> LM head: distribution of token t+2
    output at t               ~f_t+1 ---> LM head: what is drafted as token t+2

    loss = SmoothL1(output, f_t+1) + 0.1 cross-entropy(teacher from f_t+1, LM head(output))

The inputs carry uniform noise, which stands in for the error of the head's own outputs
that it is fed while drafting.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..heads.eagle1 import Eagle1Head
from ..target.base import Target
from .data import Batch
from .features import Features
from .init import layer_tensors
from .losses import Outcome, StepLoss, Teacher, step_loss
from .teaching import Vocabulary, accepted_chains, at_bases, likeliest
from .ttt import unroll

NOISE = 0.1
"""The paper's augmentation: features + U(-0.1, 0.1)."""
CLASSIFICATION = 0.1
"""The paper's weight of the cross-entropy."""


def add_noise(features: Tensor, generator: torch.Generator, reach: float = NOISE) -> Tensor:
    """Features plus U(-reach, reach) in every number, drawn on the generator's device."""
    noise = torch.rand(features.shape, generator=generator, device=generator.device)
    return features + (2 * noise - 1).to(features) * reach


def feature_pairs(
    outputs: Tensor, features: Tensor, bases: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and the features they predict, [n, H] each, at the valid bases: the shift, at one place.

    outputs: [B, A, H] at bases [B, A]; features: [B, T, H] of the target, without noise
    """
    return outputs[valid], at_bases(features, bases + 1, valid)


def eagle1_loss(
    predicted: Tensor,
    features: Tensor,
    logits: Tensor,
    wanted: Teacher,
    classification: float = CLASSIFICATION,
) -> StepLoss:
    """The loss over n bases, a sum like every StepLoss; the regression is a mean over H.

    predicted, features: [n, H], see `feature_pairs`; logits: [n, Vd] of the LM head on `predicted`
    wanted:              the teacher from the same features
    """
    step = step_loss(logits, wanted)
    distance = F.smooth_l1_loss(predicted.float(), features.float(), reduction="none")
    return replace(step, loss=distance.mean(dim=-1).sum() + classification * step.loss)


@torch.no_grad()
def start_from_layer(head: Eagle1Head, target: Target, index: int) -> bool:
    """Start as "the state stays as it is" and one of the target's layers; True where it fits.

    The layer's two output projections start at zero. Its own are made for a residual stream that is
    many times larger than a state after the final norm (SmolLM2: 575 against 45), and a head that
    begins with them spends its first thousand steps on getting small.
    """
    size, layer = head.config.hidden_size, head.layers[0]
    tensors, own = layer_tensors(target, index), dict(layer.named_parameters())
    if any(name not in tensors or tensors[name].shape != to.shape for name, to in own.items()):
        return False
    for name, to in own.items():
        to.copy_(tensors[name])
    own["self_attn.o_proj.weight"].zero_()
    own["mlp.down_proj.weight"].zero_()
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, size:] += torch.eye(size, device=head.fc.weight.device)
    return True


class Eagle1Objective:
    """Implements `Objective` for a head and its target.

    ids:   [Vd] target ids that the cross-entropy is over; None takes the whole vocabulary, whose
           product costs more than the head
    noise: reach of the feature noise
    seed:  of the noise, which depends on it and on the batch alone, so that a run resumes exactly
    """

    def __init__(
        self,
        head: Eagle1Head,
        target: Target,
        features: Features,
        ids: Tensor | None = None,
        noise: float = NOISE,
        seed: int = 0,
    ) -> None:
        self.module: nn.Module = head
        self.head, self.target, self.features = head, target, features
        self.noise, self.seed = noise, seed
        self.vocabulary = Vocabulary.of(target, head.target_ids if ids is None else ids)
        head.bind(target.unembed)

    def begin(self, share: float, step: int) -> None:
        """The objective is the same all along."""

    def loss(self, batch: Batch) -> Outcome:
        """Regression and classification over a batch's answers."""
        states = self.features.states(batch)
        noisy = add_noise(states.last, self._generator(batch), self.noise)
        output = self._unroll(batch, noisy, 1)[0]
        predicted, features = feature_pairs(output, states.last, batch.bases, batch.valid)
        wanted = self.vocabulary.teacher(batch, states)
        step = eagle1_loss(predicted, features, self.vocabulary.logits(predicted), wanted)
        return Outcome(step.loss, step.count, (step,))

    @torch.no_grad()
    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Reached and accepted bases per draft position; see `accepted_chains`."""
        states = self.features.states(batch)
        most = max(0, batch.valid.shape[1] - depth + 1)
        outputs = self._unroll(batch, states.last, depth)
        drafted = [likeliest(out[:, :most], self.head.logits) for out in outputs]
        return accepted_chains(batch, states, drafted)

    def _unroll(self, batch: Batch, features: Tensor, steps: int) -> list[Tensor]:
        embedded = self.target.embed(batch.tokens[:, 1:]).float()
        return unroll(self.head, embedded, features, batch.bases, steps)

    def _generator(self, batch: Batch) -> torch.Generator:
        """The batch's own noise, the same whenever this batch comes."""
        name = repr((self.seed, [(item.path.name, item.index) for item in batch.items]))
        return torch.Generator().manual_seed(zlib.crc32(name.encode()))
