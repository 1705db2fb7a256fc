"""Names to machines and model shapes: "4x A100-40G", "meta-llama/Llama-3.1-8B-Instruct"."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..cost import Machine, ModelShape, dense_shape
from .facts import data

MEMORY_SHARE = 0.85  # of the devices' memory, for weights; the rest is K/V cache and buffers
DTYPE_BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "awq": 0.56,
    "gptq": 0.56, "int4": 0.56, "nvfp4": 0.56, "mxfp4": 0.53, "q4_1": 0.625, "q8_0": 1.06,
}  # fmt: skip
"""Bytes of one parameter; 4-bit formats with their scales."""
MOE_NAME = re.compile(r"(?:^|[-_ ])(\d+(?:\.\d+)?)b-a(\d+(?:\.\d+)?)b(?:[-_ ]|$)")


def find_machines(text: str) -> list[Machine]:
    """Every machine that a text names, in its order ("4x ...", "..., TP4" give the count).

    A name inside a longer one ("A100" in "A100-40G") is not another machine.
    """
    lowered = text.lower()
    found: dict[int, tuple[int, dict[str, Any]]] = {}
    for row in data("hardware")["rows"]:
        for word in row["words"]:
            for at in re.finditer(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", lowered):
                if at.start() not in found or len(word) > found[at.start()][0]:
                    found[at.start()] = (len(word), row)
    count = re.search(r"(?<![a-z0-9])(\d+)\s*x(?![a-z0-9])|tp\s?(\d+)", lowered)
    number = max(1, int(count[1] or count[2])) if count else 1
    machines: list[Machine] = []
    end = -1
    for start in sorted(found):
        length, row = found[start]
        if start >= end and all(m.name != row["name"] for m in machines):
            parts = (row["bandwidth_gb_s"], row["tflops"], row["memory_gb"])
            machines.append(Machine(row["name"], *parts, count=number))
        end = max(end, start + length)
    return machines


def known_machines() -> list[str]:
    """Names in the hardware table."""
    return [row["name"] for row in data("hardware")["rows"]]


def find_model(name: str, params: float | None = None) -> tuple[ModelShape | None, bool]:
    """The shape of a model by name, and whether it is exact (in the table) or a plausible one.

    params: its parameters, for a name that the table does not hold
    """
    lowered = name.lower().rsplit("/", 1)[-1]
    words = set(re.split(r"[-_/ ]", lowered))
    best: tuple[int, dict[str, Any]] | None = None
    for row in data("models")["rows"]:
        for needed in row["words"]:
            if set(needed) <= words and (best is None or len(needed) > best[0]):
                best = (len(needed), row)
    width = 1.0 if "fp8" in words else DTYPE_BYTES["nvfp4"] if "nvfp4" in words else None
    if best is not None:
        return shape_of(best[1], width), True
    moe = MOE_NAME.search(lowered)
    if moe:
        total, active = float(moe[1]) * 1e9, float(moe[2]) * 1e9
        if active < total:
            return moe_shape(name, total, active, width), False
    if params:
        shape = dense_shape(name or "target", params)
        return (shape.with_bytes(width) if width else shape), False
    return None, False


def shape_of(row: dict[str, Any], weight_bytes: float | None = None) -> ModelShape:
    """A row of the model table as a shape; routed experts follow from total and active."""
    total = row["params_b"] * 1e9
    sizes = {key: row[key] for key in ("name", "layers", "hidden", "vocab", "kv_width")}
    sizes["weight_bytes"] = weight_bytes or row["weight_bytes"]
    if "active_b" not in row:
        return ModelShape(params=total, **sizes)
    experts, per_token = row["experts"], row["experts_per_token"]
    routed = (total - row["active_b"] * 1e9) / (1 - per_token / experts)
    return ModelShape(
        params=total - routed,
        expert_params=routed,
        experts=experts,
        experts_per_token=per_token,
        **sizes,
    )


def moe_shape(
    name: str,
    total: float,
    active: float,
    weight_bytes: float | None = None,
    experts: int = 128,
    per_token: int = 8,
) -> ModelShape:
    """A plausible mixture of experts of total and active parameters, 8 of 128 experts by default.

    Hidden size and depth are those of a dense model between the two sizes (geometric mean).
    """
    like = dense_shape(name, math.sqrt(total * active))
    routed = min(total * 0.98, (total - active) / (1 - per_token / experts))
    return ModelShape(
        name, like.layers, like.hidden, like.vocab, like.kv_width, total - routed, routed,
        experts, per_token, weight_bytes or 2.0,
    )  # fmt: skip


def shape_from_config(path: Path) -> ModelShape:
    """The shape of a local model from its `config.json` (a folder or the file), dense models.

    Raises OSError for a missing file, ValueError for one without the sizes or with experts.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: line {error.lineno}: not JSON: {error.msg}") from None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
    missing = [k for k in (*keys, "intermediate_size") if not isinstance(config.get(k), int)]
    if missing:
        raise ValueError(f"{file} has no {', '.join(missing)}: give the target's sizes instead")
    if any(config.get(k) for k in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(
            f"{file} is a mixture of experts: give params_b, active_params_b, experts and "
            "experts_per_token of the target"
        )
    layers, hidden, vocab, heads = (config[k] for k in keys)
    size = config.get("head_dim") or hidden // heads
    kv = (config.get("num_key_value_heads") or heads) * size
    layer = 2 * hidden * heads * size + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
    tables = (1 if config.get("tie_word_embeddings") else 2) * vocab * hidden
    name = config.get("_name_or_path") or file.parent.name
    return ModelShape(name, layers, hidden, vocab, kv, float(layers * layer + tables))


def devices_needed(model: ModelShape, machine: Machine) -> int:
    """Devices that hold the weights, a power of two."""
    count = 1
    while model.total_params * model.weight_bytes > MEMORY_SHARE * count * machine.memory_gb * 1e9:
        count *= 2
    return count
