"""SGLang's formats: EAGLE-3, EAGLE-1 and a draft model. Read from its sources (`keys`), not run.

Layer ids are SGLang's: id i is the *output* of layer i, which is our tap i + 1. It reads them nested
in `eagle_config`. Its loader skips what it does not know and keeps random numbers where it finds
nothing, an EAGLE-1 bias of fc among them, so that one of zeros is written.
"""

from __future__ import annotations

import shlex
from typing import Any

from torch import Tensor

from ..heads.eagle1 import Eagle1Head
from ..heads.eagle3 import Eagle3Config
from ..heads.vanilla import VanillaConfig, VanillaHead
from ..heads.weights import Head
from .folder import ExportError
from .keys import LAYOUTS
from .parts import (
    Made,
    Wanted,
    llama_config,
    own_tensors,
    vanilla_config,
    vanilla_tensors,
    zero_biases,
)


def config(kind: str, c: Any, wanted: Wanted) -> dict[str, Any]:
    """config.json of a head with this config. Raises ExportError for what SGLang has no place for."""
    if isinstance(c, VanillaConfig):
        return vanilla_config(c, wanted)
    common = llama_config(c, 1, wanted.dtype_name)
    if not isinstance(c, Eagle3Config):
        return {"architectures": ["LlamaForCausalLMEagle"], **common}
    if len(c.taps) != 3:
        raise ExportError(f"SGLang's fc reads three layers; this head taps {len(c.taps)}")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **common,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.state_size,
        "bias": c.fc_bias,
        "norm_before_fc": False,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps],
            "use_aux_hidden_state": True,
        },
    }


def tensors(head: Head, wanted: Wanted) -> dict[str, Tensor]:
    """All tensors."""
    if isinstance(head, VanillaHead):
        return vanilla_tensors(head, wanted)
    kind = "eagle1" if isinstance(head, Eagle1Head) else "eagle3"
    zeros = zero_biases(LAYOUTS["sglang"][kind], head.config, wanted.dtype)
    return own_tensors(head, wanted.dtype) | zeros


def make(kind: str, head: Head, wanted: Wanted) -> Made:
    """A head in SGLang's format."""
    return Made(
        config=config(kind, head.config, wanted),
        tensors=tensors(head, wanted),
        files={},
        launch=launch(kind, wanted) + newer(head.config),
    )


def newer(c: Any) -> str:
    """What a head of EAGLE 3.1 needs of SGLang."""
    names = [name for name in ("fc_norm", "norm_output") if getattr(c, name, False)]
    if not names:
        return ""
    return f"""
This head has {" and ".join(names)}: it needs an SGLang with EAGLE 3.1. Older ones, the one checked
against included, load the rest without a word and accept less.
"""


def launch(kind: str, wanted: Wanted) -> str:
    """How to serve with it: a chain; SGLang counts the root among the draft tokens."""
    target, out = shlex.quote(wanted.target.name), shlex.quote(str(wanted.out))
    return f"""\
    python -m sglang.launch_server --model-path {target} \\
        --speculative-algorithm {LAYOUTS["sglang"][kind].method} \\
        --speculative-draft-model-path {out} \\
        --speculative-num-steps {wanted.depth} --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens {wanted.depth + 1} --dtype {wanted.dtype_name}

That drafts a chain; a larger `--speculative-eagle-topk` with more draft tokens drafts a tree.

Whether it works shows only in its acceptance: *accept len* in the log, `sglang:spec_accept_length` in
`/metrics` (with `--enable-metrics`). 1.00 means that nothing is accepted.

**Not run**: SGLang needs a GPU that was not at hand. The files were held against its loader's source,
and nothing more.
"""
