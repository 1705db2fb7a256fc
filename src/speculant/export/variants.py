"""Names and tensors that an engine takes as well as those of its table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .keys import MEDUSA_LM_HEAD, SGLANG_EAGLE3, VLLM_MEDUSA
from .layout import Key, Layout, expand

LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(.+)")
MEDUSA_LM = re.compile(r"(\d+)\.\d+\.(.+)")


def as_read(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Tensors under the names of the layout, renamed as the engine itself does.

    vLLM and TensorRT-LLM take `layers.0.` for `midlayer.`; vLLM takes the names of Medusa's
    repository. SGLang takes nothing but its own.
    """
    return {_renamed(name, layout): tensor for name, tensor in tensors.items()}


def wanted_tensors(
    config: Mapping[str, Any], layout: Layout, c: Any
) -> dict[str, tuple[Key, tuple[int, ...]]]:
    """Name -> key and shape, as `layout.expand` has it.

    Without original_lm_head vLLM wants an LM head for every Medusa head.
    """
    wanted = expand(layout, c)
    if layout is VLLM_MEDUSA and not config.get("original_lm_head"):
        _, shape = wanted.pop("lm_head.weight")
        key = Key("lm_heads.{h}.weight", ("V", "H"), MEDUSA_LM_HEAD, lent=not c.own_lm_heads)
        wanted |= {f"lm_heads.{h}.weight": (key, shape) for h in range(c.num_heads)}
    return wanted


def _renamed(name: str, layout: Layout) -> str:
    if layout is VLLM_MEDUSA:
        plain = name.removeprefix("medusa_heads.")
        block, lm_head = MEDUSA_BLOCK.fullmatch(plain), MEDUSA_LM.fullmatch(plain)
        if block:
            return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        return f"lm_heads.{lm_head[1]}.{lm_head[2]}" if lm_head else plain
    if layout.kind == "eagle3" and layout is not SGLANG_EAGLE3:
        own = next(key.name for key in layout.tensors if "input_layernorm" in key.name)
        return LAYER.sub(own.removesuffix("input_layernorm.weight"), name, count=1)
    return name
