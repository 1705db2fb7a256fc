"""What the objectives of all heads share: the vocabulary they learn over, the teacher, the score.

Answer token a of a row is token `prompt + a`. Everything about it has one index, a:

    base                    prompt + a - 2    `Batch.bases`; where EAGLE and Medusa predict it from
    position before it      prompt + a - 1    whose state gives the target's distribution of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target.base import Target
from .data import Batch
from .features import CHUNK, States
from .losses import Teacher, lm_head_rows, teacher


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a head learns to predict.

    ids:    [Vd] int64, target ids, ascending
    weight: [Vd, H], the LM head's rows of them
    place:  [V] int64, their draft ids; -1 for a token that is not among them
    """

    ids: Tensor
    weight: Tensor
    place: Tensor

    @staticmethod
    def of(target: Target, ids: Tensor) -> Vocabulary:
        """Of some target ids [Vd]."""
        ids = ids.unique()
        place = torch.full((target.info.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return Vocabulary(ids, lm_head_rows(target, ids), place)

    def logits(self, hidden: Tensor) -> Tensor:
        """States after a final norm [..., H] -> logits [..., Vd] float32, with a gradient."""
        return (hidden @ self.weight.T).float()

    @torch.no_grad()
    def teacher(self, batch: Batch, states: States) -> Teacher:
        """The target's distribution of every answer token, row by row: n of them."""
        last = at_bases(states.last, batch.bases + 1, batch.valid)
        log_mass, best = states.log_mass[batch.valid], self.place[states.best[batch.valid]]
        return teacher(last, self.weight, log_mass, best)


def at_bases(x: Tensor, bases: Tensor, valid: Tensor) -> Tensor:
    """x [B, T, ...] at the valid ones of bases [B, A], row by row: [n, ...]."""
    rows = torch.arange(len(valid), device=valid.device)[:, None].expand(valid.shape)
    return x[rows[valid], bases[valid]]


def head_pairs(valid: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """What a Medusa head or an EAGLE-3 step learns from what, [m] int64 each: the shift, at one place.

    valid: [B, A] bool, answer token a exists; its n entries are numbered row by row. Returns the
    numbers of the bases and of the answer tokens, `head` further on in the same row.
    """
    number = valid.reshape(-1).cumsum(0).view(valid.shape) - 1
    ahead = valid[:, head:]  # an answer has no gaps: where a + head exists, so does a
    return number[:, : ahead.shape[1]][ahead], number[:, head:][ahead]


def answer_tokens(batch: Batch) -> Tensor:
    """[B, A] int64: answer token a of every row; no meaning where it is not valid."""
    return batch.tokens.gather(1, (batch.bases + 2).clamp(max=batch.tokens.shape[1] - 1))


def likeliest(hidden: Tensor, unembed: Callable[[Tensor], Tensor]) -> Tensor:
    """States [..., H] -> the likeliest tokens [...] over the whole vocabulary, a chunk at a time."""
    shape, flat = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    if not len(flat):
        return torch.zeros(shape, dtype=torch.int64, device=flat.device)
    best = [unembed(part).argmax(dim=-1) for part in flat.split(CHUNK)]
    return torch.cat(best).view(shape)


def accepted_chains(
    batch: Batch, states: States, drafted: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Reached and accepted bases per draft position, [depth] each, of greedy chains.

    drafted: of position k, [B, A'] tokens proposed as answer token a + k, A' = A - depth + 1 at least

    A base counts where the answer goes on for `depth` tokens and each is the target's own likeliest:
    there, drafting behind the answer so far sees exactly this.
    """
    depth, token = len(drafted), answer_tokens(batch)
    reached, accepted = torch.zeros(depth), torch.zeros(depth)
    most = token.shape[1] - depth + 1
    if most < 1:
        return reached, accepted
    own = batch.valid & (states.best == token)  # [B, A]
    alive = torch.stack([own[:, k : k + most] for k in range(depth)]).all(dim=0)
    for k, tokens in enumerate(drafted):
        reached[k] = int(alive.sum())
        alive = alive & (tokens[:, :most] == token[:, k : k + most])
        accepted[k] = int(alive.sum())
    return reached, accepted
