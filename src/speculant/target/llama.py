"""The fast dense decoder: Llama, SmolLM2, Mistral, Qwen2, Qwen3 in one file.

Fused QKV and gate-up projections, prepacked linears, attention that reads the preallocated cache
in place; and, in float32 on a CPU, all layers in one call of the compiled library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import Reading
from ..cache import CacheRows, KVCache
from ..native.layers import rms_norm
from ..native.memory import Mover
from .base import LAST, LoadError, TargetInfo, Tokenizer
from .graphs import Graphs
from .layers import Layer, Tensors, compiled_layers, read_layer
from .linear import Embedding, Linear
from .weights import Reader

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and switches the decoder needs, from a transformers config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    context_length: int
    tied: bool
    window: int | None

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> LlamaConfig:
        """Read config.json; `fits` must have agreed."""
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        kinds = config.get("layer_types")
        windowed = "sliding_attention" in kinds if kinds else config["model_type"] == "mistral"
        return LlamaConfig(
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            context_length=config.get("max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            window=config.get("sliding_window") if windowed else None,
        )


def fits(config: Mapping[str, Any]) -> str | None:
    """None when this decoder computes the architecture exactly, else the reason it does not."""
    if config.get("model_type") not in MODEL_TYPES:
        return f"model type {config.get('model_type')!r} is not one of {', '.join(MODEL_TYPES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"RoPE type {rope.get('rope_type', rope.get('type'))!r}"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        return "partial rotary embedding"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config.get('hidden_act')!r}"
    if config.get("quantization_config"):
        return "quantised weights"
    if config.get("attention_bias"):
        return "biases in every projection"
    if config.get("mlp_bias"):
        return "biases in the MLP"
    kinds = set(config.get("layer_types") or ())
    if len(kinds) > 1 or (config.get("use_sliding_window") and not kinds):
        return "layers with and without a sliding window"
    return None


class Attends(Protocol):
    """Attention of the new tokens over a cache: `Reading`, or one that a CUDA graph can hold."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Reading.attend`."""
        ...


class LlamaTarget:
    """Implements `Target`; see there for the shapes."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[Layer],
        embedding: Embedding,
        norm: Tensor,
        head: Linear,
        tokenizer: Tokenizer,
        name: str,
    ) -> None:
        self.config, self.layers, self.tokenizer = config, tuple(layers), tokenizer
        self.embedding, self.norm, self.head = embedding, norm, head
        self.info = TargetInfo(
            name=name,
            architecture=config.model_type,
            num_layers=len(self.layers),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context_length=config.context_length,
            dtype=norm.dtype,
            device=norm.device,
        )
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=norm.device)
        self.inv_freq = 1.0 / config.rope_theta ** (steps / config.head_dim)  # shape: [D / 2]
        self.compiled = compiled_layers(config, self.layers, self.info.dtype, self.info.device)
        self.graphs = Graphs(self) if norm.device.type == "cuda" else None

    @staticmethod
    def from_folder(
        folder: Path,
        tokenizer: Tokenizer,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weights: str = "",
    ) -> LlamaTarget:
        """Load config.json and the safetensors of a folder. A missing or extra tensor is an error.

        weights: what the matrices are rounded to, see `Linear`, or "file": the blocks of the GGUF
        file that the folder was made from. The embedding is not rounded.
        """
        try:
            config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError(f"{folder / 'config.json'}: {error!r} is missing or wrong") from None
        with torch.inference_mode():
            reader = Reader(folder, dtype, torch.device(device), weights)
            size = (config.vocab_size, config.hidden_size)
            # the largest tensor first: what packing it takes for a moment is then not the peak
            if config.tied:
                reader.discard("lm_head.weight")
            table = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
            head, mover = reader.linear([table], [size], keep=config.tied), Mover()
            mover.add(head.own)
            layers: list[Layer] = []
            for i in range(config.num_layers):
                layers.append(x := read_layer(reader, config, i))
                mover.add(x.qkv.own, x.out.own, x.gate_up.own, x.down.own)
            mover.finish()
            norm = reader.take("model.norm.weight", (config.hidden_size,), copy=True)
            embedding = reader.rows("model.embed_tokens.weight", size)
            reader.finish()
        return LlamaTarget(config, layers, embedding, norm, head, tokenizer, name)

    def pruned(self, num_layers: int) -> LlamaTarget:
        """The first `num_layers` layers with the same final norm and LM head; weights are shared."""
        if not 1 <= num_layers <= len(self.layers):
            raise ValueError(f"layers is {num_layers}: must be between 1 and {len(self.layers)}")
        name = f"{self.info.name}, first {num_layers} layers"
        layers = self.layers[:num_layers]
        parts = (self.embedding, self.norm, self.head, self.tokenizer, name)
        return LlamaTarget(self.config, layers, *parts)

    def with_layers(
        self, tensors: Mapping[str, Tensor], config: LlamaConfig, name: str
    ) -> LlamaTarget:
        """Other layers and another final norm under this embedding, LM head and tokenizer.

        tensors: `model.layers.{i}...` and `model.norm.weight`, as Hugging Face names them; config:
        theirs, of this hidden size. A missing, extra or misshaped tensor is a LoadError.
        """
        with torch.inference_mode():
            source = Tensors(name, tensors, self.info.dtype, self.info.device)
            layers = [read_layer(source, config, i) for i in range(config.num_layers)]
            norm = source.take("model.norm.weight", (self.config.hidden_size,), copy=True)
            source.finish()
        parts = (self.embedding, norm, self.head, self.tokenizer, name)
        return LlamaTarget(config, layers, *parts)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> input embeddings [..., H]."""
        return self.embedding(tokens.to(self.info.device))

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V] float32."""
        return self.head(hidden.to(self.info.device, self.info.dtype)).float()

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens."""
        i = self.info
        return KVCache(i.num_layers, rows, capacity, i.kv_heads, i.head_dim, i.dtype, i.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: CacheRows,
        taps: Sequence[int] = (),
        need_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `Target.forward`."""
        device = self.info.device
        wrong = [tap for tap in taps if not LAST <= tap < len(self.layers)]
        if wrong:
            raise ValueError(f"tap {wrong[0]}: must be LAST or one of 0..{len(self.layers) - 1}")
        tokens, positions = tokens.to(device), positions.to(device)
        if self.graphs is not None and self.graphs.fits(cache):
            return self.graphs.forward(tokens, positions, mask, cache, taps, need_logits)
        groups = self.config.num_heads // self.config.kv_heads
        reading = Reading(cache, mask, groups, positions, self.config.window)
        inner = [tap for tap in taps if tap != LAST]
        tapped: dict[int, Tensor] = {}
        real = (
            None  # which tokens are computed: all, or [R] of B * T, then in place of [B, T] below
        )
        if self.compiled is not None and reading.kernel is not None:
            real = cache.real()
            if real is not None:
                tokens, positions = tokens.flatten()[real], positions.flatten()[real]
            hidden = self.embedding(tokens).clone()  # shape: [B, T, H]
            angles = positions[..., None].float() * self.inv_freq
            parts = (hidden, angles, cache.cache.data, reading.kernel, inner)
            tapped |= self.compiled(*parts, counts=cache.counts)
        else:
            hidden = self.run_layers(self.embedding(tokens), positions, reading, tapped, inner)
        logits = None
        if need_logits or LAST in taps:
            hidden = rms_norm(hidden, self.norm, self.config.norm_eps)
            tapped[LAST] = hidden
            logits = self.unembed(hidden) if need_logits else None  # shape: [B, T, V]
        found = (logits, _join(tapped, taps))
        if real is None:
            return found
        shape = (len(cache.slots), cache.new_tokens)
        return _spread(logits, real, shape), _spread(found[1], real, shape)

    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        reading: Attends,
        tapped: dict[int, Tensor],
        taps: Sequence[int],
    ) -> Tensor:
        """The layers one operator at a time: what `compiled` does, for any device and precision."""
        rotary = self._rotary(positions)
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped[i] = hidden
            hidden = hidden + self._attend(i, layer, hidden, rotary, reading)
            x = F.rms_norm(hidden, layer.mlp_norm.shape, layer.mlp_norm, self.config.norm_eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)  # shape: [B, T, I] each
            hidden = hidden + layer.down(F.silu(gate) * up)
        return hidden

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, 1, D] for positions [B, T]."""
        angles = positions[..., None].float() * self.inv_freq  # shape: [B, T, D / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, :, None, :]
        dtype = self.info.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        reading: Attends,
    ) -> Tensor:
        """Norm, attention over the cached prefix and the new tokens, output projection: [B, T, H]."""
        config = self.config
        (rows, new, _), dim = hidden.shape, config.head_dim
        x = F.rms_norm(hidden, layer.input_norm.shape, layer.input_norm, config.norm_eps)
        qkv = layer.qkv(x).view(rows, new, -1, dim)  # shape: [B, T, heads + 2 kv_heads, D]
        heads, kv_heads = config.num_heads, config.kv_heads
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, (dim,), layer.q_norm, config.norm_eps)
            k = F.rms_norm(k, (dim,), layer.k_norm, config.norm_eps)
        q, k = _rotate(q, *rotary), _rotate(k, *rotary)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # shape: [B, heads or Hkv, T, D]
        out = reading.attend(index, q, k, v).transpose(1, 2)
        return layer.out(out.reshape(rows, new, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, D], halves convention (Su et al. 2021; Hugging Face)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _spread(x: Tensor | None, real: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """x [R, N] at the flat indices [R] of [B, T]: [B, T, N], 0 elsewhere."""
    if x is None:
        return None
    out = x.new_zeros(shape[0] * shape[1], x.shape[-1])
    out[real] = x
    return out.view(*shape, -1)


def _join(tapped: Mapping[int, Tensor], taps: Sequence[int]) -> Tensor | None:
    return torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
