"""Copying: attention heads of EAGLE-3 that find where the last token stood before, and what followed.

A third of what a target says about a text is in that text: the last two tokens have stood there
before, and the next one follows again. A head can copy in a single layer. Pair j holds the embedding
of token j + 1 beside features that tell token j, so a query made from the embedding of the newest
token can meet the pairs whose token j is the same, and their values hold the token behind it:

    query    token t + 1, from the embedding's half of pair t
    key      token j,     from the features' half of pair j <= t
    value    token j + 1, from the embedding's half of pair j, turned into the LM head's row of it

Training from random values does not get there: keys and queries that do not agree yet have nothing to
gain from each other, and the sink takes all. `with_copying` gives a head such attention heads, fitted
by least squares to the features that it has, and `copying_loss` says where they should look. From
there on the drafting loss goes on by itself; the architecture is the published one, with more heads.

Induction heads: Olsson et al. 2022, arXiv 2209.11895.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Head
from ..target.base import Target
from .data import Batch
from .features import Features
from .init import layer_sizes

TELLING = 3 / 8
"""Share of a key's numbers that tell a token: those that RoPE turns least (24 of 64)."""
NARROWEST = 16
"""Numbers of an attention head below which there are too few to tell a token by."""
MATCH, SINK = 20.0, 12.0
"""Scores of the same token, on average, and of the first pair, where those look that find nothing."""
SHARPNESS = (1.0, 0.7, 1.4)
"""Of the query heads that share a key: they begin unlike, so that they can become unlike."""
LIFT = 2.0
"""What a copy adds to its logit at first, in units of the output's root mean square."""
SHARE = 0.2
"""Weight of `copying_loss` beside the drafting loss. AdamW moves the new heads by it at first, since
little else does; on everything else the drafting loss weighs more."""
UNSURE = math.exp(-4.0)
"""What looking at the sink counts where there was something to copy: nobody can know them all."""


def copying_heads(head: Eagle3Head, target: Target) -> int:
    """How many of a head's attention heads copy: those that the target's layers do not have."""
    return max(0, head.config.num_heads - int(layer_sizes(target)["num_heads"]))


def can_copy(head: Eagle3Head) -> bool:
    """True for attention heads that are wide enough to tell tokens apart."""
    return head.config.head_dim >= NARROWEST


@torch.no_grad()
def with_copying(
    head: Eagle3Head, target: Target, features: Features, batches: Sequence[Batch]
) -> Eagle3Head:
    """The head with one more K/V head, whose query heads copy; else it computes what it did.

    batches: text, some ten thousand tokens, to fit the new weights to; on the CPU
    """
    c = head.config
    normed, embedded, sink = _halves(head, target, features, batches)
    mean = embedded.mean(dim=0)
    tell = _fit(normed, embedded - mean)  # features -> embedding of the pair's own token
    place = _projection(embedded - mean, normed @ tell, round(TELLING * c.head_dim))
    strength = (embedded - mean) @ place.T
    scale = MATCH * math.sqrt(c.head_dim) / float(strength.square().sum(dim=1).mean())
    one = _fit(torch.cat([embedded, normed], dim=1), torch.ones(len(normed), 1)).squeeze(1)
    toward_sink = sink / sink.square().sum()

    size, dim = c.hidden_size, c.head_dim
    query, key = torch.zeros(dim, 2 * size), torch.zeros(dim, 2 * size)
    slow = [d for r in range(dim // 2 - 1, -1, -1) for d in (r, r + dim // 2)]  # slowest turn first
    query[slow[0]] = one
    key[slow[0], size:] = toward_sink * SINK * math.sqrt(dim)
    for row, d in zip(place, slow[2:]):  # noqa: B905  # as many as there are
        query[d, :size] = scale * row
        query[d] -= scale * float(row @ mean) * one
        told = tell @ row
        key[d, size:] = told - float(told @ sink) * toward_sink
    value, out = _values(head, target, dim)
    first = _embedded(head, target, batches[0].tokens[0, 1])
    value[:, size:] -= torch.outer(value[:, :size] @ first, toward_sink)  # the sink is not copied

    group = c.num_heads // c.kv_heads
    new = Eagle3Head(replace(c, num_heads=c.num_heads + group, kv_heads=c.kv_heads + 1))
    weights, attention = dict(head.state_dict()), "midlayer.self_attn."
    sharper = [query * SHARPNESS[i % len(SHARPNESS)] for i in range(group)]
    for name, parts, along in (
        ("q_proj", sharper, 0), ("k_proj", [key], 0), ("v_proj", [value], 0),
        ("o_proj", [out / group] * group, 1),
    ):  # fmt: skip
        old = weights[f"{attention}{name}.weight"]
        weights[f"{attention}{name}.weight"] = torch.cat([old, *(p.to(old) for p in parts)], along)
        if f"{attention}{name}.bias" in weights and along == 0:
            bias = weights[f"{attention}{name}.bias"]
            more = bias.new_zeros(sum(len(p) for p in parts))
            weights[f"{attention}{name}.bias"] = torch.cat([bias, more])
    new.load_state_dict(weights)
    return new.to(head.fc.weight.device)


def copying_loss(weights: Tensor, batch: Batch, step: int) -> Tensor:
    """Mean negative logarithm of what copying heads give to places that are right: [] float32.

    weights: [B, h, A, T + step] of some heads, see `ttt.step_weights`
    A pair is right for a base when the token that it tells is the newest of the base's step, and the
    token behind it is the answer's next. Where there is none, the sink (the first pair) is right.
    """
    right, known = right_pairs(batch, step, weights.shape[-1] - step)
    sink, pairs = weights[..., 0], weights[..., : right.shape[-1]]
    copied = (pairs * right[:, None]).sum(dim=-1) + UNSURE * sink
    found = right.any(dim=-1)[:, None]
    loss = -torch.where(found, copied, sink).clamp(min=1e-9).log()
    return loss.mean(dim=1)[known].mean()


def right_pairs(batch: Batch, step: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Pairs [B, A, T] that the base of every answer token copies from at a step; which exist, [B, A].

    Only step 0's keys up to the base are looked at, and never the sink.
    """
    tokens, bases = batch.tokens, batch.bases
    last = tokens.shape[1] - 1
    newest = tokens.gather(1, (bases + 1 + step).clamp(max=last))[..., None]  # shape: [B, A, 1]
    following = tokens.gather(1, (bases + 2 + step).clamp(max=last))[..., None]
    told, behind = tokens[:, None, :pairs], tokens[:, None, 1 : pairs + 1]  # shape: [B, 1, T]
    index = torch.arange(pairs, device=tokens.device)
    before = (index > 0) & (index <= bases[..., None])
    count = batch.valid.shape[1]
    ahead = torch.arange(count, device=tokens.device) + step < batch.answers[:, None]
    return (told == newest) & (behind == following) & before, ahead


def _halves(
    head: Eagle3Head, target: Target, features: Features, batches: Sequence[Batch]
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed features [n, H], normed embeddings of their own tokens [n, H]; the first pair's [H]."""
    normed, embedded, sinks = [], [], []
    for batch in batches:
        states = features.states(batch)
        told = head.midlayer.hidden_norm(head.fuse(states.taps.float())).cpu()
        own = _embedded(head, target, batch.tokens)
        for b, length in enumerate((batch.prompts + batch.answers).tolist()):
            normed.append(told[b, 1 : length - 1])
            embedded.append(own[b, 1 : length - 1])
            sinks.append(told[b, 0])
    return torch.cat(normed), torch.cat(embedded), torch.stack(sinks).mean(dim=0)


def _embedded(head: Eagle3Head, target: Target, tokens: Tensor) -> Tensor:
    """Normed embeddings [..., H] float32 of tokens [...], as the head's attention reads them."""
    out: Tensor = head.midlayer.input_layernorm(target.embed(tokens).float())
    return out.cpu()


def _fit(inputs: Tensor, wanted: Tensor, ridge: float = 1e-3) -> Tensor:
    """[a, b] that takes inputs [n, a] nearest to wanted [n, b], by ridge regression."""
    gram = inputs.T @ inputs
    gram = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram))
    out: Tensor = torch.linalg.solve(gram, inputs.T @ wanted)
    return out


def _projection(tokens: Tensor, told: Tensor, count: int) -> Tensor:
    """[count, H]: the directions in which tokens [n, H] differ most for the error of what is told.

    Fisher's discriminant: between two tokens a product of projections is then nearly the logarithm
    of how much likelier one is than the other.
    """
    error, spread = told - tokens, tokens.T @ tokens / len(tokens)
    noise = error.T @ error / len(error)
    noise = noise + 1e-3 * noise.diagonal().mean() * torch.eye(len(noise))
    inverse = torch.linalg.inv(torch.linalg.cholesky(noise))
    vectors = torch.linalg.eigh(inverse @ spread @ inverse.T).eigenvectors
    out: Tensor = vectors.flip(1)[:, :count].T @ inverse
    return out


def _values(head: Eagle3Head, target: Target, dim: int) -> tuple[Tensor, Tensor]:
    """v [dim, 2 H] and o [H, dim]: a token's embedding becomes a lift of that token's logit.

    The LM head's rows are much alike; a row over their covariance lifts its own token alone. Of the
    map from embeddings to those, the `dim` largest parts are kept.
    """
    size = head.config.hidden_size
    mine = _embedded(head, target, head.target_ids)
    mine = mine - mine.mean(dim=0)
    rows = (head.lm_head.weight * head.norm.weight).float().cpu()
    rows = rows - rows.mean(dim=0)
    cover = rows.T @ rows / len(rows)
    spread = cover + cover.diagonal().mean() * torch.eye(size)
    wanted = torch.linalg.solve(spread, rows.T).T
    lifted = mine @ _fit(mine, wanted)
    values, vectors = torch.linalg.eigh(cover)
    root = (vectors * values.clamp(min=1e-9).sqrt()) @ vectors.T
    lifted = lifted @ root
    part = torch.linalg.eigh(lifted.T @ lifted).eigenvectors.flip(1)[:, :dim].T  # [dim, H]
    code = _fit(mine, lifted @ part.T)  # embedding -> code [H, dim]
    back = torch.linalg.solve(root, part.T)  # [H, dim]
    lift = float(((mine @ code) @ back.T * rows).sum(dim=1).mean())
    value = torch.zeros(dim, 2 * size)
    norm = float((mine @ code).norm(dim=1).mean())
    value[:, :size] = code.T * math.sqrt(dim) / norm
    return value, back * (LIFT * norm / math.sqrt(dim) / lift)
