"""What a transformers model must be to serve as a target, by its kind and by trying it out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .base import LoadError, Target

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest logit difference of the self-check, as a share of the largest logit."""
CHECK_WINDOW = 4
"""Sliding windows are shortened to this during the self-check, so that it crosses them."""
MASKABLE = {"full_attention", "sliding_attention"}
LAYER_REASONS = {
    "linear_attention": "recurrent layers, whose state cannot be rolled back",
    "conv": "convolution layers, whose state cannot be rolled back",
    "hybrid": "recurrent layers, whose state cannot be rolled back",
    "hybrid_sliding": "recurrent layers, whose state cannot be rolled back",
    "chunked_attention": "chunked attention, which a tree mask cannot express",
}
ALIBI = ("bloom", "mpt")
TREE_PARENTS = (-1, 0, 0, 1, 2)
"""The self-check's tree: the root, its two children, and a child under each."""


@dataclass(frozen=True)
class Shapes:
    """Sizes learned by running the model, whatever its config calls them."""

    num_layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype


def check_kind(model: PreTrainedModel, name: str) -> None:
    """Raise LoadError when the model is of a kind that speculation cannot drive exactly."""
    config = model.config.get_text_config(decoder=True)
    reason = _reason(model, config)
    if reason is not None:
        raise LoadError(f"{name}: {type(model).__name__} cannot be a target: {reason}")


def _reason(model: PreTrainedModel, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; only causal decoders can be"
    if getattr(model, "_is_stateful", False):
        return "it has recurrent layers, whose state cannot be rolled back"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in MASKABLE:
            return f"it has {LAYER_REASONS.get(kind, f'layers of kind {kind!r}')}"
    if getattr(config, "attention_chunk_size", None):
        return f"it has {LAYER_REASONS['chunked_attention']}"
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        return "its ALiBi biases count columns, not positions, so a tree's branches get wrong ones"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its local attention counts columns, not positions"
    parameters = inspect.signature(model.base_model.forward).parameters
    for key in ("position_ids", "attention_mask", cache_keyword(model)):
        if key not in parameters:
            return f"its forward takes no {key}"
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attention {attention!r} takes no tree mask; load it with 'sdpa' or 'eager'"
    return None


def cache_keyword(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache; transformers renamed it on the way to 5.24."""
    parameters = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class _Probe(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Notes the keys and values of each layer and stores nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@torch.no_grad()
def probe(model: PreTrainedModel, config: Any, name: str) -> Shapes:
    """Sizes of the model, from one forward of one token; LoadError when the layers differ."""
    cache, one = _Probe(), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    caching = {cache_keyword(model): cache, "use_cache": True}
    out = _try(model, name, input_ids=one, position_ids=one, **caching)
    hidden = model.base_model(input_ids=one, use_cache=False).last_hidden_state
    if getattr(out, "logits", None) is None:
        raise LoadError(f"{name}: {type(model).__name__} has no LM head: load a causal LM")
    layers, cached = config.num_hidden_layers, sorted(cache.seen)
    if cached != list(range(layers)):
        raise LoadError(
            f"{name}: {len(cached)} of {layers} layers keep keys and values of their own; "
            "a target's layers all must"
        )
    shapes = {tuple(tensor.shape) for pair in cache.seen.values() for tensor in pair}
    if len(shapes) > 1:
        raise LoadError(
            f"{name}: keys and values come in several shapes, (heads, size) "
            f"{sorted((s[1], s[3]) for s in shapes)}; one cache cannot hold them"
        )
    ((_, kv_heads, _, head_dim),) = shapes
    dtype = cache.seen[0][0].dtype
    return Shapes(layers, kv_heads, head_dim, hidden.shape[-1], out.logits.shape[-1], dtype)


def window_of(config: Any) -> tuple[int | None, set[str]]:
    """The sliding window in tokens, None where no layer has one, and the kinds of layers."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return (window if "sliding_attention" in kinds else None), kinds


def context_length(config: Any) -> int:
    """Positions the model was made for.

    RoPE that rescales with the longest row seen would make one row's output depend on another's,
    so such a model is kept to the length below which it does not rescale.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(original or longest))
    return longest


@contextmanager
def _short_window(config: Any) -> Iterator[None]:
    """Within it, sliding layers have a window that the self-check's few tokens cross."""
    window, _ = window_of(config)
    if window is None:
        yield
        return
    config.sliding_window = min(CHECK_WINDOW, window)
    try:
        yield
    finally:
        config.sliding_window = window


def check_forward(target: Target, model: PreTrainedModel, config: Any) -> None:
    """Raise LoadError unless our cache, mask and positions give what the model itself computes.

    Two rows of different length, a prefix in two chunks, then a tree; each of its paths is
    compared with the model's own uncached forward over prefix and path.
    """
    name, vocab = target.info.name, target.info.vocab_size
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(vocab, (2, 7), generator=generator)
    nodes = torch.randint(vocab, (2, len(TREE_PARENTS)), generator=generator)
    lengths = (7, 5)
    with _short_window(config):
        try:
            ours = _tree_logits(target, text, nodes, lengths)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise LoadError(f"{name}: the model does not run on our cache ({reason})") from error
        for row, length in enumerate(lengths):
            paths = torch.tensor([[0, 1, 3], [0, 2, 4]])
            prefix = text[row, :length].expand(2, -1)
            whole = torch.cat([prefix, nodes[row][paths]], dim=1)  # shape: [2, length + 3]
            with torch.no_grad():
                out = _try(model, name, input_ids=whole.to(model.device), use_cache=False)
            plain = out.logits[:, length:].float()  # shape: [2, 3, V]
            gap = float((ours[row][paths.to(ours.device)] - plain).abs().max())
            allowed = TOLERANCE.get(target.info.dtype, 8e-2) * float(plain.abs().max())
            if not gap <= allowed:
                raise LoadError(
                    f"{name}: {type(model).__name__} computes other logits under a tree mask than "
                    f"alone (off by {gap:.2g}, allowed {allowed:.2g}): it cannot be a target"
                )


def _tree_logits(target: Target, text: Tensor, nodes: Tensor, lengths: Sequence[int]) -> Tensor:
    """Logits [2, n, V] of the self-check's tree behind `lengths` tokens of text [2, 7]."""
    cache, slots = target.new_cache(rows=2, capacity=16), (0, 1)
    # The second row keeps fewer tokens of each chunk than were written: what is past its length
    # is overwritten by its next chunk, as after a roll-back.
    starts, kept = torch.zeros(2, dtype=torch.int64), ((4, 3), (3, 2))
    for width, keep in zip((4, 3), kept, strict=True):
        steps = starts[:, None] + torch.arange(width)  # shape: [2, width]
        chunk = text.gather(1, steps.clamp(max=text.shape[1] - 1))
        target.forward(chunk, steps, None, cache.rows(slots, width), need_logits=False)
        for slot in slots:
            cache.advance(slot, keep[slot])
        starts += torch.tensor(keep)
    assert tuple(cache.lengths) == tuple(lengths)
    n = len(TREE_PARENTS)
    mask, depth = torch.eye(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    for node, parent in enumerate(TREE_PARENTS[1:], start=1):
        mask[node] |= mask[parent]
        depth[node] = depth[parent] + 1
    positions = torch.tensor(lengths)[:, None] + depth
    rows = cache.rows(slots, n)
    logits, _ = target.forward(nodes, positions, mask.expand(2, n, n), rows)
    assert logits is not None
    return logits


def _try(model: PreTrainedModel, name: str, **inputs: Any) -> Any:
    """A forward of a model we know nothing about: its failure is a reason to refuse it."""
    try:
        return model(**inputs)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise LoadError(
            f"{name}: the model does not run ({type(error).__name__}: {reason})"
        ) from error
