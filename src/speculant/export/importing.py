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

import torch
from torch import Tensor

from ..heads.eagle1 import Eagle1Config, Eagle1Head
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.vanilla import VanillaConfig, VanillaHead
from ..heads.weights import FORMAT, Head
from .folder import Checkpoint, ExportError
from .given import Given, Imported, layer_fields, load
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
    except ExportError as error:
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
    c, remarks = checkpoint.config, []
    tensors = plain_names(checkpoint.tensors)
    remarks += given.drop_ends(tensors, "embed_tokens.weight", "lm_head.weight")
    remarks += drop_zero_biases(tensors)
    head = Eagle1Head(Eagle1Config(**layer_fields(c), target=dict(given.fingerprint)))
    load(head, tensors)
    return Imported(head, "EAGLE-1", checkpoint.dtype, remarks)


def import_medusa(checkpoint: Checkpoint, given: Given) -> Imported:
    """Medusa: vLLM's names or those of Medusa's repository; its LM heads must be the target's."""
    c, blocks, lm_heads, biases = checkpoint.config, {}, {}, {}
    depth = c.get("medusa_num_layers", c.get("num_hidden_layers", 1))
    for name, tensor in plain_names(checkpoint.tensors).items():
        old, new = MEDUSA_OLD.fullmatch(name), MEDUSA_NEW.fullmatch(name)
        match = new or old
        if MEDUSA_LM.fullmatch(name) or name == "lm_head.weight":
            lm_heads[name] = tensor
        elif match is None:
            raise ExportError(f"unexpected tensor {name}: no head of ours has one")
        elif old and int(old[2]) == depth and old[3] == "weight":
            lm_heads[name] = tensor
        elif match[3] == "bias":
            biases[name] = tensor
        else:
            blocks[f"blocks.{match[1]}.layers.{match[2]}.weight"] = tensor
    remarks = drop_zero_biases(biases)
    heads = 1 + max((int(name.split(".")[1]) for name in blocks), default=-1)
    if not blocks:
        raise ExportError("no weights of a Medusa block")
    for name, tensor in lm_heads.items():
        given.same_end(name, tensor, "LM head")
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
    )
    head = MedusaHead(config)
    load(head, blocks)
    return Imported(head, "Medusa", checkpoint.dtype, remarks)


def import_vanilla(checkpoint: Checkpoint, given: Given) -> Imported:
    """A vanilla draft that we exported: its two ends are the target's."""
    c, tensors = checkpoint.config, dict(checkpoint.tensors)
    if given.noted is None:
        raise ExportError("is a whole model: use it with --draft vanilla --draft-model")
    remarks = given.drop_ends(tensors, "model.embed_tokens.weight", "lm_head.weight")
    layers = int(c.get("num_hidden_layers", 0))
    config = VanillaConfig(**layer_fields(c), num_layers=layers, target=dict(given.fingerprint))
    head = VanillaHead(config)
    load(head, tensors)
    return Imported(head, "a vanilla draft", checkpoint.dtype, remarks)


def drop_zero_biases(tensors: dict[str, Tensor]) -> list[str]:
    """Take biases of zero out of tensors. Raises ExportError for one that does something."""
    names = [name for name in tensors if name.endswith(".bias")]
    for name in names:
        if bool(tensors.pop(name).float().abs().max() > 0):
            raise ExportError(f"tensor {name} is a bias that is not zero: our heads have none")
    return [f"{len(names)} biases of zero left out"] if names else []


def _eagle3(checkpoint: Checkpoint, given: Given) -> Imported:
    tensors = plain_names(checkpoint.tensors)
    tensors = {re.sub(r"^(layers\.0|midlayer\.0)\.", "midlayer.", n): t for n, t in tensors.items()}
    remarks = given.drop_ends(tensors, "embed_tokens.weight")
    remarks += drop_zero_biases(tensors)
    imported = import_eagle3(checkpoint.config, tensors, given)
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    return replace(imported, dtype=dtype, remarks=[*remarks, *imported.remarks])


READERS: dict[str, Callable[[Checkpoint, Given], Imported]] = {
    "eagle3": _eagle3,
    "eagle1": import_eagle1,
    "medusa": import_medusa,
    "vanilla": import_vanilla,
}
"""Kind -> its reader."""
