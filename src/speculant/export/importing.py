"""A published checkpoint -> a head of ours: EAGLE's repository, vLLM, speculators, SGLang, SpecForge,
TensorRT-LLM, Medusa's repository, and our own exports.

Nothing is guessed that would only show as low acceptance: what the file does not say is asked for, and
what our heads have no place for is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..heads.eagle1 import Eagle1Config, Eagle1Head
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.vanilla import VanillaConfig, VanillaHead
from ..heads.weights import FORMAT, Head
from .folder import Checkpoint, ExportError
from .given import Given, Imported, layer_fields, layer_variant, load, rope_scaling
from .importing_eagle3 import import_eagle3
from .writing import parse_note

PREFIXES = ("draft_model.", "module.", "model.")
MEDUSA_OLD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
MEDUSA_NEW = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
MEDUSA_LM = re.compile(r"lm_heads\.(\d+)\.weight")


def import_head(checkpoint: Checkpoint, given: Given) -> Imported:
    """The head that a checkpoint holds.

    Raises ExportError for what is missing, unexpected, misshaped or has no place in a head of ours.
    """
    if checkpoint.config.get("format") == FORMAT:
        raise ExportError(f"{checkpoint.path}: is a head of ours already: use it as it is")
    kind = find_kind(checkpoint)
    if checkpoint.note is not None:
        given = replace(given, noted=parse_note(checkpoint.note))
    try:
        imported = READERS[kind](checkpoint, given)
    except ValueError as error:  # also of a config that makes no head
        raise ExportError(f"{checkpoint.path}: {error}") from None
    if given.noted is None:
        return imported
    return replace(imported, head=with_note(checkpoint, imported.head, given.noted[2]))


def find_kind(checkpoint: Checkpoint) -> str:
    """The kind of a checkpoint by its tensors' names. Raises ExportError for none of ours."""
    names = plain_names(checkpoint.tensors)
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if any(MEDUSA_NEW.fullmatch(name) or MEDUSA_OLD.fullmatch(name) for name in names):
        return "medusa"
    if any("embed_tokens" in name for name in checkpoint.tensors) and "norm.weight" in names:
        if "fc.weight" not in names:
            return "vanilla"
        return "eagle3" if checkpoint.config.get("draft_vocab_size") else "eagle1"
    if "fc.weight" in names:
        return "eagle3" if {"norm.weight", "d2t"} & set(names) else "eagle1"
    shown = ", ".join(sorted(checkpoint.tensors)[:3])
    raise ExportError(
        f"{checkpoint.path}: no EAGLE-3, EAGLE-1, Medusa or vanilla head (its tensors: {shown}, ..)"
    )


def plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without the prefixes of trainers, the one layer of an EAGLE head as `midlayer.`."""
    out = {}
    for name, tensor in tensors.items():
        plain = name
        for prefix in PREFIXES:
            plain = plain.removeprefix(prefix)
        out[plain] = tensor
    return out


def with_note(checkpoint: Checkpoint, head: Any, noted: Any) -> Head:
    """The head with the config that its export noted: fingerprint, training, accuracies.

    Raises ExportError where the folder's own config says otherwise: it was edited.
    """
    unsaid: dict[str, Any] = {"target": {}, "training": {}}
    if isinstance(noted, MedusaConfig):
        unsaid["accuracies"] = ()
    mine, theirs = replace(head.config, **unsaid), replace(noted, **unsaid)
    for name, value in vars(theirs).items():
        if getattr(mine, name) != value:
            raise ExportError(
                f"{checkpoint.path}: config.json says {name} {getattr(mine, name)}, its export was "
                f"made with {value}: one of them was edited (check-export tells more)"
            )
    head.config = noted
    out: Head = head
    return out


def import_eagle1(checkpoint: Checkpoint, given: Given) -> Imported:
    """EAGLE-1: `layers.0.`, fc over [embedding ; state], no norms but one, the target's LM head."""
    c, tensors = checkpoint.config, plain_names(checkpoint.tensors)
    remarks = given.drop_ends(tensors, "lm_head.weight")
    own, told = given.own_embeddings(tensors, trained=False)
    variant, more = layer_variant(c, tensors)
    fields = layer_fields(c) | variant | {"own_embeddings": own}
    head = Eagle1Head(Eagle1Config(**fields, target=dict(given.fingerprint)))
    load(head, tensors)
    return Imported(head, "EAGLE-1", checkpoint.dtype, [*remarks, *told, *more])


def import_medusa(checkpoint: Checkpoint, given: Given) -> Imported:
    """Medusa: vLLM's names or those of Medusa's repository. LM heads that are the target's are left
    out; others stay, each head's own."""
    c = checkpoint.config
    depth = c.get("medusa_num_layers", c.get("num_hidden_layers", 1))
    blocks, biases, lm_heads = medusa_tensors(checkpoint.tensors, depth)
    if not blocks:
        raise ExportError("no weights of a Medusa block")
    heads = 1 + max(int(name.split(".")[1]) for name in blocks)
    if c.get("medusa_fc_bias") and not biases:
        raise ExportError("medusa_fc_bias is on, and there is no bias of a block")
    remarks, fc_bias = [], any(bool(bias.any()) for bias in biases.values())
    if biases and not fc_bias:
        remarks.append(f"{len(biases)} biases of zero left out")
    if c.get("original_lm_head") and given.lm_head is None and lm_heads:
        lm_heads = {}
        remarks.append("LM head left out, taken for the target's own (--target compares it)")
    own = own_lm_heads(lm_heads, heads, given)
    if own:
        remarks.append(f"{heads} LM heads kept as the heads' own")
    elif lm_heads:
        remarks.append("LM heads left out: they are the target's")
    weight = next(iter(blocks.values()))
    vocab = c.get("vocab_size") or next((len(t) for t in lm_heads.values()), None)
    vocab = vocab or (None if given.lm_head is None else len(given.lm_head))
    if vocab is None:
        raise ExportError("no vocab_size in config.json: give the target (--target)")
    config = MedusaConfig(
        hidden_size=weight.shape[0],
        vocab_size=vocab,
        num_heads=heads,
        num_hidden_layers=depth,
        target=dict(given.fingerprint),
        fc_bias=fc_bias,
        own_lm_heads=own,
    )
    head = MedusaHead(config)
    load(head, blocks | (biases if fc_bias else {}) | (lm_heads if own else {}))
    return Imported(head, "Medusa", checkpoint.dtype, remarks)


def medusa_tensors(
    tensors: dict[str, Tensor], depth: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the blocks, their biases, and LM heads, by our names (a shared one: lm_head.weight).

    depth: residual layers a head, behind which Medusa's repository has the LM head
    """
    blocks: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    lm_heads: dict[str, Tensor] = {}
    for name, tensor in plain_names(tensors).items():
        old, new = MEDUSA_OLD.fullmatch(name), MEDUSA_NEW.fullmatch(name)
        match = new or old
        if MEDUSA_LM.fullmatch(name) or name == "lm_head.weight":
            lm_heads[name] = tensor
        elif match is None:
            raise ExportError(f"unexpected tensor {name}: no head of ours has one")
        elif old and int(old[2]) == depth and old[3] == "weight":
            lm_heads[f"lm_heads.{old[1]}.weight"] = tensor
        else:
            group = blocks if match[3] == "weight" else biases
            group[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
    return blocks, biases, lm_heads


def own_lm_heads(lm_heads: dict[str, Tensor], heads: int, given: Given) -> bool:
    """True where a checkpoint's Medusa heads have LM heads of their own, which are there for each.

    Raises ExportError where it is one for all of them and not the target's.
    """
    if not lm_heads or (given.noted is not None and not given.noted[2].own_lm_heads):
        return False
    if "lm_head.weight" in lm_heads:
        for name, tensor in lm_heads.items():
            given.same_end(name, tensor, "LM head")
        return False
    if all(given.is_targets(tensor, "LM head") for tensor in lm_heads.values()):
        return False
    missing = [h for h in range(heads) if f"lm_heads.{h}.weight" not in lm_heads]
    if missing:
        raise ExportError(f"the LM head of head {missing[0]} is missing")
    return True


def import_vanilla(checkpoint: Checkpoint, given: Given) -> Imported:
    """A vanilla draft that we exported: its two ends are the target's."""
    c, tensors = checkpoint.config, dict(checkpoint.tensors)
    if given.noted is None:
        raise ExportError("is a whole model: use it with --draft vanilla --draft-model")
    remarks = given.drop_ends(tensors, "model.embed_tokens.weight", "lm_head.weight")
    layers = int(c.get("num_hidden_layers", 0))
    if rope_scaling(c):
        raise ExportError("a vanilla draft with a scaling of RoPE: ours have the plain one")
    config = VanillaConfig(**layer_fields(c), num_layers=layers, target=dict(given.fingerprint))
    head = VanillaHead(config)
    load(head, tensors)
    return Imported(head, "a vanilla draft", checkpoint.dtype, remarks)


def _eagle3(checkpoint: Checkpoint, given: Given) -> Imported:
    tensors = plain_names(checkpoint.tensors)
    tensors = {re.sub(r"^(layers\.0|midlayer\.0)\.", "midlayer.", n): t for n, t in tensors.items()}
    return replace(import_eagle3(checkpoint.config, tensors, given), dtype=checkpoint.dtype)


READERS: dict[str, Callable[[Checkpoint, Given], Imported]] = {
    "eagle3": _eagle3,
    "eagle1": import_eagle1,
    "medusa": import_medusa,
    "vanilla": import_vanilla,
}
"""Kind -> its reader."""
