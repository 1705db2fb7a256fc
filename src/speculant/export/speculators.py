"""The speculators format of EAGLE-3, which vLLM serves without further settings.

Read: speculators c05b95b (models/eagle3/config.py, config.py, proposals/greedy.py); vLLM 0.32 runs it.
The layer is `layers.0.` here. There is no top-level `model_type`: vLLM would look for it.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from torch import Tensor

from ..heads.weights import Head
from .keys import VLLM_EAGLE3
from .parts import Made, Wanted, llama_config, own_tensors, zero_biases
from .vllm import CONFIG_FILE
from .vllm import launch as launch_vllm

VERSION = "0.7.0"
"""Of the format, as the library of that version writes it."""


def config(kind: str, c: Any, wanted: Wanted) -> dict[str, Any]:
    """config.json of an EAGLE-3 head with this config."""
    layer = llama_config(c, 1, wanted.dtype_name)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": wanted.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": wanted.target.name,
                "architectures": [wanted.target.architecture],
            },
        },
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(c.taps)},
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.state_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": wanted.dtype_name,
    }


def tensors(head: Head, wanted: Wanted) -> dict[str, Tensor]:
    """All tensors under the names of this format."""
    own = own_tensors(head, wanted.dtype) | zero_biases(VLLM_EAGLE3, head.config, wanted.dtype)
    return {name.replace("midlayer.", "layers.0."): t for name, t in own.items()}


def make(kind: str, head: Head, wanted: Wanted) -> Made:
    """A head in the speculators format."""
    settings = {
        "method": "eagle3",
        "model": str(wanted.out.resolve()),
        "num_speculative_tokens": wanted.depth,
    }
    text = json.dumps(settings)
    alone = f"""\
    vllm serve {shlex.quote(str(wanted.out))}

serves the target of `speculators_config` with this head. With everything named:

"""
    return Made(
        config=config(kind, head.config, wanted),
        tensors=tensors(head, wanted),
        files={CONFIG_FILE: text + "\n"},
        launch=alone + launch_vllm(wanted, text),
    )
