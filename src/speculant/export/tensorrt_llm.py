"""TensorRT-LLM's formats: EAGLE-3, Medusa and a draft model. Read from its sources (`keys`), not run.

Its layer ids are outputs, our tap - 1, and stand in the serving configuration, not in the head. Medusa
is of the older TensorRT backend: a conversion that wants an LM head and a bias for every head.
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
from .folder import ExportError
from .keys import LAYOUTS, TRT_EAGLE3, TRT_MEDUSA
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

SERVE_FILE = "trtllm.yaml"
NOT_RUN = """
**Not run**: TensorRT-LLM needs a GPU that was not at hand. The files were held against its loader's
source, and nothing more.
"""


def config(kind: str, c: Any, wanted: Wanted) -> dict[str, Any]:
    """config.json of a head with this config. Raises ExportError for a tap it cannot make."""
    if isinstance(c, VanillaConfig):
        return vanilla_config(c, wanted)
    if isinstance(c, MedusaConfig):
        return {
            "model_type": "medusa",
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "medusa_num_heads": c.num_heads,
            "medusa_num_layers": c.num_hidden_layers,
            "base_model_name_or_path": wanted.target.name,
            "torch_dtype": wanted.dtype_name,
        }
    assert isinstance(c, Eagle3Config)
    if c.taps[0] == 0:
        raise ExportError("TensorRT-LLM captures outputs of layers; this head taps the embeddings")
    return {
        "architectures": ["LlamaForCausalLM"],
        **llama_config(c, 1, wanted.dtype_name),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.state_size,
        "bias": c.fc_bias,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {"norm_before_fc": c.norm_before_fc},
    }


def tensors(head: Head, wanted: Wanted) -> dict[str, Tensor]:
    """All tensors; Medusa's with an LM head for every head, and biases, of zero where it has none."""
    if isinstance(head, VanillaHead):
        return vanilla_tensors(head, wanted)
    if not isinstance(head, MedusaHead):
        own = own_tensors(head, wanted.dtype)
        return own | zero_biases(TRT_EAGLE3, head.config, wanted.dtype)
    c, out = head.config, {}
    for name, tensor in own_tensors(head, wanted.dtype).items():
        group, h, *rest = name.split(".")  # blocks.h.layers.l.weight, lm_heads.h.weight
        place = (
            f"{rest[1]}.linear.{rest[2]}" if group == "blocks" else f"{c.num_hidden_layers}.weight"
        )
        out[f"{h}.{place}"] = tensor
    if not c.own_lm_heads:
        lm_head = cast({"": wanted.target.unembedding}, wanted.dtype)[""]
        out |= {f"{h}.{c.num_hidden_layers}.weight": lm_head.clone() for h in range(c.num_heads)}
    return out | zero_biases(TRT_MEDUSA, c, wanted.dtype)


def make(kind: str, head: Head, wanted: Wanted) -> Made:
    """A head in TensorRT-LLM's format."""
    made = {"config": config(kind, head.config, wanted), "tensors": tensors(head, wanted)}
    if isinstance(head, MedusaHead):
        return Made(**made, files={}, launch=launch_medusa(head.config, wanted))
    settings = {
        "decoding_type": LAYOUTS["tensorrt-llm"][kind].method,
        "max_draft_len": wanted.depth,
        "speculative_model": str(wanted.out.resolve()),
    }
    lines = [f"  {key}: {json.dumps(value)}" for key, value in settings.items()]
    if isinstance(head, Eagle3Head):
        ids = [tap - 1 for tap in head.config.taps]
        lines.append(f"  eagle3_layers_to_capture: {json.dumps(ids)}")
    text = "\n".join(["speculative_config:", *lines]) + "\n"
    return Made(**made, files={SERVE_FILE: text}, launch=launch(wanted))


def launch(wanted: Wanted) -> str:
    """How to serve with it."""
    target, file = shlex.quote(wanted.target.name), shlex.quote(str(wanted.out / SERVE_FILE))
    return f"""\
    trtllm-serve {target} --config {file}

(`--extra_llm_api_options` in older versions). The layers to capture stand in `{SERVE_FILE}` alone:
without that line TensorRT-LLM takes its own, whichever the head was trained on. Move the folder, and
`speculative_model` must follow.
{NOT_RUN}"""


def launch_medusa(c: MedusaConfig, wanted: Wanted) -> str:
    """How to convert and build, with the chain of every head's first choice."""
    target, out = shlex.quote(wanted.target.name), shlex.quote(str(wanted.out))
    chain = json.dumps([[0] * depth for depth in range(1, c.num_heads + 1)])
    return f"""\
In `examples/medusa` of a TensorRT-LLM that still has its TensorRT backend (1.1 and before):

    python convert_checkpoint.py --model_dir {target} --medusa_model_dir {out} \\
        --output_dir converted --dtype {wanted.dtype_name} --num_medusa_heads {c.num_heads}
    trtllm-build --checkpoint_dir converted --output_dir engine \\
        --gemm_plugin {wanted.dtype_name} --speculative_decoding_mode medusa --max_batch_size 4
    python ../run.py --engine_dir engine --tokenizer_dir {target} --temperature 1.0 \\
        --medusa_choices="{chain}" --input_text "Once upon"

`--medusa_choices` is the chain of every head's first choice; a tree of more choices accepts more.
{NOT_RUN}"""
