"""Sizes and first values of heads: the target's own layer, where its shapes fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.eagle1 import Eagle1Head
from ..heads.eagle3 import Eagle3Head
from ..target.base import LoadError, Target
from ..target.weights import weight_files
from .data import Batch
from .features import Features
from .losses import lm_head_rows
from .teaching import at_bases


def layer_sizes(target: Target) -> dict[str, Any]:
    """Fields of a head's config that follow from the target: its layers' sizes, RoPE and limits.

    What a target without a config.json does not tell is set as a Llama of its size would have it.
    """
    info, config = target.info, target_config(target)
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {
        "hidden_size": info.hidden_size,
        "intermediate_size": config.get("intermediate_size") or 4 * info.hidden_size,
        "num_heads": config.get("num_attention_heads") or info.hidden_size // info.head_dim,
        "kv_heads": info.kv_heads,
        "head_dim": info.head_dim,
        "vocab_size": info.vocab_size,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": float(theta),
        "context_length": info.context_length,
    }


def target_config(target: Target) -> dict[str, Any]:
    """config.json of the target's folder, or nothing for a target without one."""
    if target.info.folder is None:
        return {}
    try:
        config: dict[str, Any] = json.loads((target.info.folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {**config, **(config.get("text_config") or {})}


@torch.no_grad()
def init_eagle3(head: Eagle3Head, target: Target) -> None:
    """Start from the target's LM head, and from the highest tap passed through.

    Copying the target's last layer into the head's did not help: after 46 k answer tokens the first
    position accepted the same. What did is `condition`.
    """
    head.lm_head.weight.copy_(lm_head_rows(target, head.target_ids))
    size = head.config.hidden_size
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -size:] += torch.eye(size, device=head.fc.weight.device)


@torch.no_grad()
def with_vocabulary(head: Eagle3Head, ids: Tensor, target: Target) -> Eagle3Head:
    """The head with these target ids [Vd] as its draft vocabulary; itself where they are its own.

    The LM head's rows of tokens that it had are kept. Training has turned them away from the
    target's, all in much the same way: the linear map that comes nearest to taking the target's rows
    to the head's, over the tokens that it had, takes the new tokens' there too.
    """
    ids, old = ids.unique().to(head.target_ids.device), head.target_ids
    if torch.equal(ids, old):
        return head
    new = Eagle3Head(replace(head.config, draft_vocab_size=len(ids)))
    own = {n: t for n, t in new.state_dict().items() if n.startswith(("lm_head", "d2t", "t2d"))}
    new.load_state_dict({**head.state_dict(), **own})
    new.set_vocabulary(ids)
    wanted, had = lm_head_rows(target, ids), lm_head_rows(target, old)
    rows = head.lm_head.weight
    gram = had.T @ had
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    new.lm_head.weight.copy_(wanted @ torch.linalg.solve(gram + ridge, had.T @ rows))
    kept = torch.isin(ids, old)
    new.lm_head.weight[kept] = rows[torch.searchsorted(old, ids[kept])]
    return new


class PerChannel(nn.Module):
    """A parametrization of fc: its trained weight is meant for channels of size one."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight for the states as they are, [H, n * H]."""
        return weight / self.scale


def condition(head: Eagle3Head | Eagle1Head, scale: Tensor, fresh: bool) -> None:
    """Train fc as if each of its inputs had the size one; `fold` makes a plain fc of it again.

    A target's hidden states have a few channels that are hundreds of times larger than the others
    (SmolLM2's high tap: a median of 13 and a largest of 1,140). Adam moves every weight alike, so fc
    would learn these few and drown the rest.

    EAGLE-1's fc reads embeddings beside states, and those may be far smaller instead.

    scale: [n * H], see `channel_scale` and `pair_scale`
    fresh: fc's values are first ones, meant for channels of size one; else fc computes the same as
           before
    """
    from torch.nn.utils import parametrize

    if not fresh:
        with torch.no_grad():
            head.fc.weight.mul_(scale)
    parametrize.register_parametrization(head.fc, "weight", PerChannel(scale), unsafe=True)


def fold(head: nn.Module) -> None:
    """Undo `condition` where it was done: the same function, plain tensors."""
    from torch.nn.utils import parametrize

    if isinstance(head, Eagle3Head | Eagle1Head) and parametrize.is_parametrized(head.fc, "weight"):
        parametrize.remove_parametrizations(head.fc, "weight", leave_parametrized=True)


def channel_scale(features: Features, batches: Sequence[Batch]) -> Tensor:
    """Root mean square of every tapped channel [n * H] over the batches' answers.

    Answers only: a prompt's first token is an attention sink of a norm of its own.
    """
    return _root_mean_square(
        at_bases(features.states(batch).taps, batch.bases, batch.valid) for batch in batches
    )


def pair_scale(target: Target, features: Features, batches: Sequence[Batch]) -> Tensor:
    """Root mean square of what EAGLE-1's fc reads, [embedding ; last state], over answers: [2 H]."""
    return _root_mean_square(_pairs(target, features, batch) for batch in batches)


def _pairs(target: Target, features: Features, batch: Batch) -> Tensor:
    last = at_bases(features.states(batch).last, batch.bases, batch.valid)
    embedded = at_bases(target.embed(batch.tokens[:, 1:]).to(last), batch.bases, batch.valid)
    return torch.cat([embedded, last], dim=-1)


def _root_mean_square(parts: Iterable[Tensor]) -> Tensor:
    """Of every column over the rows [n, C] of all parts: [C]."""
    total, count = torch.zeros(()), 0
    for part in parts:
        total = total.to(part) + part.square().sum(dim=0)
        count += len(part)
    sizes = (total / max(1, count)).sqrt()
    return sizes.clamp(min=max(1e-6, 1e-3 * float(sizes.median())))  # a silent channel may wake up


def layer_tensors(target: Target, index: int) -> dict[str, Tensor]:
    """Tensors of one of the target's layers by their short names, and `norm`; {} without files."""
    from safetensors import safe_open

    if target.info.folder is None:
        return {}
    prefix, out = f"model.layers.{index}.", {}
    try:
        files = weight_files(target.info.folder)
    except (LoadError, OSError):
        return {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                if name.startswith(prefix):
                    out[name.removeprefix(prefix)] = file.get_tensor(name).float()
                elif name == "model.norm.weight":
                    out["norm"] = file.get_tensor(name).float()
    return out
