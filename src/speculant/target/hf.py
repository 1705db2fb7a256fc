"""Any transformers causal language model as a target.

The model's own code runs; what is replaced is its cache (ours: slots, roll-back, no copies of the
prefix), its mask (ours: ragged rows and trees) and its positions. Whatever cannot be rolled back
or masked so is refused at construction, by a list of reasons and by a self-check (`hf_check.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import CacheRows, KVCache
from .base import LAST, LoadError, TargetInfo, Tokenizer
from .hf_check import cache_keyword, check_forward, check_kind, context_length, probe, window_of


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """transformers' cache interface over one run of cache rows: neighbouring slots, one view."""

    def __init__(self, rows: CacheRows) -> None:
        super().__init__(layers=[])
        self.rows, self.batch = rows, len(rows.slots)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, Hkv, T, D]; returns views [B, Hkv, span, D] of all."""
        dtype = self.rows.cache.data.dtype
        self.rows.write(layer_idx, key_states.to(dtype), value_states.to(dtype))
        return self.rows.read(layer_idx, 0, self.batch)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the new tokens, in the longest row."""
        return max(self.rows.starts)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns, first column) of a mask."""
        return self.rows.span(0, self.batch), 0


class HFTarget:
    """Implements `Target`; see there for the shapes."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
        """Raises LoadError, saying why, for a model that does not fit. Puts it into eval mode."""
        check_kind(model, name)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.body: nn.Module = model.base_model
        self.config = model.config.get_text_config(decoder=True)
        shapes = probe(model, self.config, name)
        self.layers = _decoder_layers(self.body, shapes.num_layers, name)
        self.cache_keyword, self.cache_dtype = cache_keyword(model), shapes.dtype
        self.additive = self.config._attn_implementation == "eager"
        self.info = TargetInfo(
            name=name,
            architecture=type(model).__name__,
            num_layers=shapes.num_layers,
            hidden_size=shapes.hidden_size,
            vocab_size=shapes.vocab_size,
            kv_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            context_length=context_length(self.config),
            dtype=model.dtype,
            device=model.device,
        )
        check_forward(self, model, self.config)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> input embeddings [..., H]."""
        with torch.no_grad():
            out: Tensor = self.model.get_input_embeddings()(tokens.to(self.info.device))
        return out

    @torch.no_grad()
    def unembed(self, hidden: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V] float32.

        Raises LoadError for a model that scales its logits outside its LM head.
        """
        reason = _logits_reason(self.config)
        if reason is not None:
            raise LoadError(f"{self.info.name}: {reason}, so its LM head alone gives other logits")
        out: Tensor = self.model.get_output_embeddings()(
            hidden.to(self.info.device, self.info.dtype)
        )
        cap = getattr(self.config, "final_logit_softcapping", None)
        return out.float() if cap is None else cap * torch.tanh(out.float() / cap)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens."""
        i = self.info
        return KVCache(
            i.num_layers, rows, capacity, i.kv_heads, i.head_dim, self.cache_dtype, i.device
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int] = (),
        need_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `Target.forward`. One forward of the model per run of neighbouring slots."""
        wrong = [tap for tap in taps if tap != LAST and not 0 <= tap < self.info.num_layers]
        if wrong:
            raise ValueError(f"tap {wrong[0]}: must be LAST or 0 .. {self.info.num_layers - 1}")
        tokens, positions = tokens.to(self.info.device), positions.to(self.info.device)
        logits, states = [], []
        for a, b in cache.runs():
            seen = cache.visible(a, b, mask)  # shape: [b - a, T, span]
            inputs = {
                "input_ids": tokens[a:b],
                "position_ids": positions[a:b],
                "attention_mask": self._masks(seen, positions[a:b], cache.starts[a:b]),
                self.cache_keyword: SlotCache(cache.select(a, b)),
                "use_cache": True,
            }
            with self._tapping(taps) as tapped:
                out = self.model(**inputs) if need_logits else self.body(**inputs)
            if need_logits:
                logits.append(out.logits.float())  # shape: [b - a, T, V]
            if taps:
                states.append(torch.cat([tapped[tap] for tap in taps], dim=-1))
        return _stack(logits), _stack(states)

    def _masks(
        self, seen: Tensor, positions: Tensor, starts: Sequence[int]
    ) -> Tensor | dict[str, Tensor]:
        """The attention mask of a run, [B, 1, T, span], or one per kind of layer.

        A window counts positions, not columns: cached column c holds position c, and a new token
        of a tree the position that its depth gives it.
        """
        window, kinds = window_of(self.config)
        if window is None:
            return self._encode(seen)
        columns = torch.arange(seen.shape[-1], device=seen.device).expand(len(starts), -1).clone()
        for row, start in enumerate(starts):
            columns[row, start : start + positions.shape[1]] = positions[row]
        near = positions[:, :, None] - columns[:, None, :] < window  # shape: [B, T, span]
        sliding = self._encode(seen & near)
        if kinds == {"sliding_attention"}:
            return sliding
        return {"full_attention": self._encode(seen), "sliding_attention": sliding}

    def _encode(self, seen: Tensor) -> Tensor:
        """[B, T, span] bool as the model's attention takes it: bool for sdpa, added for eager."""
        if not self.additive:
            return seen[:, None]
        mask = torch.zeros(seen.shape, dtype=self.info.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[:, None]

    @contextmanager
    def _tapping(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Within it, a forward puts the tapped states [B, T, H] into the dict."""
        tapped: dict[int, Tensor] = {}

        def entering(index: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                tapped[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def leaving(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tapped[LAST] = output.last_hidden_state

        handles = []
        try:
            for tap in set(taps) - {LAST}:
                hook = entering(tap)
                handles.append(self.layers[tap].register_forward_pre_hook(hook, with_kwargs=True))
            if LAST in taps:
                handles.append(self.body.register_forward_hook(leaving))
            yield tapped
        finally:
            for handle in handles:
                handle.remove()


def _decoder_layers(body: nn.Module, count: int, name: str) -> nn.ModuleList:
    """The model's list of `count` decoder layers: the outermost list of that length."""
    lists = [
        (path.count("."), module)
        for path, module in body.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise LoadError(
            f"{name}: no list of {count} decoder layers found to tap hidden states from"
        )
    return min(lists, key=lambda pair: pair[0])[1]


def _logits_reason(config: Any) -> str | None:
    """What a model does to its logits behind the LM head, or None."""
    for key in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, key, None)
        if value is not None and value != 1:
            return f"{key} is {value}"
    return None


def _stack(parts: Sequence[Tensor]) -> Tensor | None:
    """The runs' results along the batch; None without any."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
