"""What a table of tensors and settings is made of, and the parts that several engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..heads.eagle3 import Eagle3Config
from ..heads.medusa import MedusaConfig
from ..heads.rope import SCALINGS
from ..heads.vanilla import VanillaConfig

Shape = tuple[str, ...]
"""Sizes by symbol: H hidden, 2H twice that, F intermediate, Q query heads x dim, K key/value heads x
dim, V target's vocabulary, D draft vocabulary, S the target's hidden size, T all taps side by side."""


@dataclass(frozen=True)
class Key:
    """A tensor. {h} and {l} in its name stand for every head (EAGLE-3: every tap) and layer.

    dtype:   "float", "int64" or "bool"
    without: what the engine does when it is missing; "" for one that may be missing
    switch:  of the head's config, by which its numbers are the head's own: without it they are zeros,
             of a bias that the engine insists on
    when:    switches of the head's config, without any of which there is no such tensor; () for always
    lent:    the target's own, whose numbers are not ours to judge
    """

    name: str
    shape: Shape
    without: str = ""
    dtype: str = "float"
    switch: str = ""
    when: tuple[str, ...] = ()
    lent: bool = False


@dataclass(frozen=True)
class Setting:
    """An entry of config.json, by its dotted path.

    without: what the engine does when it is missing
    free:    any value will do
    needed:  missing is a problem in a folder of another program too; else its default may be right
    """

    path: str
    without: str
    free: bool = False
    needed: bool = False


@dataclass(frozen=True)
class Layout:
    """One kind of head in one engine.

    method:    the engine's name for it
    source:    where the table was read
    ran:       that version was run with such a head, not only read
    extra:     what the engine does with a tensor it does not know
    weights:   name of the weights' file
    """

    kind: str
    method: str
    source: str
    ran: bool
    extra: str
    tensors: tuple[Key, ...]
    settings: tuple[Setting, ...]
    weights: str = "model.safetensors"


RANDOM = "it keeps random numbers, and next to nothing is accepted"
ONES = "it stays at ones without a word, and fewer tokens are accepted"
UNSET = "the bias keeps whatever numbers it finds, and fewer tokens are accepted"
REFUSED = "it refuses to start"


def attention(prefix: str, width: str, without: str) -> tuple[Key, ...]:
    """The projections of a Llama layer, its attention reading `width` columns."""
    return (
        Key(f"{prefix}self_attn.q_proj.weight", ("Q", width), without),
        Key(f"{prefix}self_attn.k_proj.weight", ("K", width), without),
        Key(f"{prefix}self_attn.v_proj.weight", ("K", width), without),
        Key(f"{prefix}self_attn.o_proj.weight", ("H", "Q"), without),
        Key(f"{prefix}mlp.gate_proj.weight", ("F", "H"), without),
        Key(f"{prefix}mlp.up_proj.weight", ("F", "H"), without),
        Key(f"{prefix}mlp.down_proj.weight", ("H", "F"), without),
    )


def biases(prefix: str, *names: str, also: str = "o_bias") -> tuple[Key, ...]:
    """Biases of a Llama layer that an engine can have: names out of qkv, o and mlp.

    An engine has one flag for all of the attention's, so that those a head has not are zeros.

    also: a further switch that makes the engine have the attention's
    """
    sizes = {"q": "Q", "k": "K", "v": "K"} if "qkv" in names else {}
    flags = ("qkv_bias", "o_bias", also) if "qkv" in names else ("o_bias", also)
    out = [Key(f"{prefix}self_attn.{n}_proj.bias", (size,), UNSET, switch="qkv_bias", when=flags)
           for n, size in sizes.items()]  # fmt: skip
    if "o" in names:
        name = f"{prefix}self_attn.o_proj.bias"
        out.append(Key(name, ("H",), UNSET, switch="o_bias", when=flags))
    if "mlp" in names:
        for part, size in (("gate", "F"), ("up", "F"), ("down", "H")):
            name = f"{prefix}mlp.{part}_proj.bias"
            out.append(Key(name, (size,), UNSET, switch="mlp_bias", when=("mlp_bias",)))
    return tuple(out)


def eagle3(
    prefix: str,
    fc: str,
    lm_head: str,
    d2t: str,
    embed: str,
    more: tuple[Key, ...],
) -> tuple[Key, ...]:
    """EAGLE-3's tensors, the layer's under `prefix`.

    fc, lm_head, d2t, embed: what the engine does without that tensor; embed: without a head's own
    more: the biases that the engine can have
    """
    return (
        Key("fc.weight", ("H", "T"), fc),
        Key("input_norm.weight", ("T",), ONES, when=("norm_before_fc",)),
        Key("fc_norm.{h}.weight", ("S",), ONES, when=("fc_norm",)),
        Key(f"{prefix}input_layernorm.weight", ("H",), ONES),
        Key(f"{prefix}hidden_norm.weight", ("H",), ONES),
        Key(f"{prefix}post_attention_layernorm.weight", ("H",), ONES),
        Key("norm.weight", ("H",), ONES),
        *attention(prefix, "2H", RANDOM),
        Key("lm_head.weight", ("D", "H"), lm_head),
        Key("d2t", ("D",), d2t, "int64"),
        Key("t2d", ("V",), "", "bool"),
        Key("embed_tokens.weight", ("V", "H"), lent=True),
        Key("embed_tokens.weight", ("V", "H"), embed, when=("own_embeddings",)),
        *more,
    )


FC_BIAS = Key("fc.bias", ("H",), UNSET, switch="fc_bias", when=("fc_bias",))
TARGETS_EMBEDDINGS = "the target's embeddings are taken, which it was not trained on"
EAGLE1 = (
    Key("fc.weight", ("H", "2H"), RANDOM),
    *attention("layers.0.", "H", RANDOM),
    Key("layers.0.post_attention_layernorm.weight", ("H",), ONES),
    Key("embed_tokens.weight", ("V", "H"), lent=True),
    Key("embed_tokens.weight", ("V", "H"), TARGETS_EMBEDDINGS, when=("own_embeddings",)),
)
"""EAGLE-1's but for biases. No input norm, no final norm, no LM head."""

VANILLA = (
    Key("model.embed_tokens.weight", ("V", "H"), REFUSED, lent=True),
    Key("model.layers.{l}.input_layernorm.weight", ("H",), REFUSED),
    Key("model.layers.{l}.post_attention_layernorm.weight", ("H",), REFUSED),
    *attention("model.layers.{l}.", "H", REFUSED),
    Key("model.norm.weight", ("H",), REFUSED),
    Key("lm_head.weight", ("V", "H"), lent=True),
)
"""A whole Llama model, as every engine and transformers read it; no LM head where it is tied."""

SIZES = (
    Setting("hidden_size", "another size is assumed"),
    Setting("intermediate_size", "another size is assumed"),
    Setting("num_attention_heads", "32 heads are assumed"),
    Setting("num_key_value_heads", "as many as there are query heads are assumed"),
    Setting("head_dim", "hidden_size / heads is assumed"),
    Setting("num_hidden_layers", "32 layers are assumed, most of them random", needed=True),
    Setting("vocab_size", "32000 is assumed"),
    Setting("rms_norm_eps", "1e-6 is assumed"),
    Setting(
        "rope_parameters.rope_theta",
        "10000 is assumed, and positions are turned wrongly (105/123 with vLLM)",
    ),
    Setting("rope_parameters.rope_type", "a default is assumed"),
    Setting("max_position_embeddings", "2048 is assumed"),
    Setting("hidden_act", "a default is assumed"),
    *(
        Setting(f"rope_parameters.{name}", "positions are turned wrongly")
        for name in SCALINGS["llama3"]  # where the head has such a scaling
    ),
    Setting("attention_bias", "a default is assumed"),
    Setting("mlp_bias", "a default is assumed"),
    Setting("tie_word_embeddings", "a tied target's flag may be taken over, and the LM head lost"),
)
"""Entries of a Llama config that all EAGLE heads and vanilla drafts need."""

MODEL = (
    Setting("architectures", REFUSED, needed=True),
    Setting("model_type", REFUSED, needed=True),
)
DRAFT_VOCABULARY = Setting(
    "draft_vocab_size", "the whole vocabulary is assumed, and it stops at d2t", needed=True
)
FLAGS = (
    Setting("norm_before_fc", "a default is assumed"),
    Setting("fc_norm", "a default is assumed"),
    Setting("norm_output", "a default is assumed"),
)


def sizes(c: Any) -> dict[str, int]:
    """The symbols of `Shape` for a head's config."""
    h = c.hidden_size
    out = {"H": h, "2H": 2 * h, "V": c.vocab_size}
    if isinstance(c, MedusaConfig):
        return out
    out |= {"F": c.intermediate_size, "Q": c.num_heads * c.head_dim, "K": c.kv_heads * c.head_dim}
    if isinstance(c, Eagle3Config):
        out |= {"D": c.draft_vocab_size, "S": c.state_size, "T": len(c.taps) * c.state_size}
    return out


def expand(layout: Layout, c: Any) -> dict[str, tuple[Key, tuple[int, ...]]]:
    """Every tensor of a head with this config: name -> its key and its shape."""
    known = sizes(c)
    heads, layers = 1, 1
    if isinstance(c, MedusaConfig):
        heads, layers = c.num_heads, c.num_hidden_layers
    elif isinstance(c, Eagle3Config):
        heads = len(c.taps)
    elif isinstance(c, VanillaConfig):
        layers = c.num_layers
    out = {}
    for key in layout.tensors:
        if key.when and not any(getattr(c, switch, False) for switch in key.when):
            continue
        shape = tuple(known[symbol] for symbol in key.shape)
        for h in range(heads):
            for l in range(layers):  # noqa: E741
                out[key.name.format(h=h, l=l, L=layers)] = (key, shape)
    return out


def setting(config: Mapping[str, Any], path: str) -> Any:
    """The entry of a config at a dotted path. Raises KeyError where there is none."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(path)
        value = value[part]
    return value
