"""EAGLE-3 checkpoints: where the layouts differ is in their configs and maps, not in the layer.

| layout | settings | layer ids | an id means |
|---|---|---|---|
| EAGLE's repository | top level | none: (2, n // 2, n - 3) in its code | the state that enters it |
| vLLM | top level | top level, else in `eagle_config` | the state that enters it |
| speculators | `transformer_layer_config` and top level | top level | the state that enters it |
| SGLang, SpecForge | top level | in `eagle_config` | its output |
| TensorRT-LLM | top level | in the serving configuration | its output |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from .folder import ExportError
from .given import Given, Imported, layer_fields, layer_variant, load

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SPECFORGE = (
    "norm_output is on: the normed output is fed back, as vLLM, speculators, SGLang and TensorRT-LLM "
    "read it; SpecForge's trainer (a6b6b02) feeds the raw one back all the same: if it is from there "
    "and accepts little from the second position on, write norm_output false and import it again"
)


def import_eagle3(config: Mapping[str, Any], tensors: dict[str, Tensor], given: Given) -> Imported:
    """A head from an EAGLE-3 config and tensors by our names.

    Raises ExportError for what is missing, and for what our head has no place for.
    """
    speculators = "speculators_model_type" in config
    if speculators and config["speculators_model_type"] != "eagle3":
        raise ExportError(f"speculators_model_type is {config['speculators_model_type']!r}")
    flat = {**config, **(config.get("transformer_layer_config") or {})} if speculators else config
    switches = flags(flat, speculators)
    for name in ("fc.weight", "lm_head.weight"):
        if name not in tensors:
            raise ExportError(f"tensor {name} is missing")
    fields = layer_fields(flat)
    remarks = [SPECFORGE] if switches["norm_output"] and given.noted is None else []
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    size = flat.get("target_hidden_size") or hidden
    trained = size != hidden or bool(flat.get("embed_requires_grad"))
    own, told = given.own_embeddings(tensors, trained)
    variant, more = layer_variant(flat, tensors)
    remarks += [*told, *more, *ids_and_mask(tensors, vocab)]
    count, rest = divmod(tensors["fc.weight"].shape[-1], size)
    if rest:
        width = tensors["fc.weight"].shape[-1]
        raise ExportError(f"fc.weight reads {width} columns: no whole number of states of {size}")
    if given.hidden_size not in (None, size):
        raise ExportError(
            f"it reads states of {size}, the target's have {given.hidden_size}: it is another "
            "target's head (target_hidden_size)"
        )
    taps, where, other = find_taps(config, given, count)
    draft_vocab = len(tensors["lm_head.weight"])
    named = flat.get("draft_vocab_size")
    if named not in (None, draft_vocab):
        raise ExportError(f"lm_head.weight has {draft_vocab} rows, draft_vocab_size is {named}")
    made = {**fields, **variant, **switches, "own_embeddings": own}
    head = Eagle3Head(
        Eagle3Config(
            **made,
            draft_vocab_size=draft_vocab,
            taps=taps,
            target=dict(given.fingerprint),
            target_hidden_size=None if size == hidden else size,
        )
    )
    load(head, tensors)
    remarks.append(f"taps {', '.join(map(str, taps))} ({where})")
    name = "EAGLE-3 in the speculators format" if speculators else "EAGLE-3"
    return Imported(head, name, torch.float32, remarks, other)


def flags(flat: Mapping[str, Any], speculators: bool) -> dict[str, bool]:
    """The switches of a config, what it does not say being off.

    Raises ExportError for what our head does not have.
    """
    nested, out = flat.get("eagle_config") or {}, {}
    for name in FLAGS:
        value = nested.get(name, flat.get(name))
        if value is None and name == "norm_before_residual" and speculators:
            raise ExportError(
                "no norm_before_residual: vLLM takes it as true here, speculators itself as false: "
                "write down which one it was trained with"
            )
        out[name] = bool(value)
    if nested.get("use_aux_hidden_state") is False:
        raise ExportError("eagle_config.use_aux_hidden_state is off: our head reads tapped layers")
    if int(flat.get("num_hidden_layers", 1)) != 1:
        raise ExportError(f"{flat['num_hidden_layers']} layers: our head has one")
    return out


def find_taps(
    config: Mapping[str, Any], given: Given, count: int
) -> tuple[tuple[int, ...], str, tuple[int, ...] | None]:
    """The tapped layers by our convention, where they came from, and their other possible meaning.

    count: how many fc reads
    """
    if given.taps is not None:
        ids, where, convention = list(given.taps), "given", "enter"
    elif given.noted is not None and given.noted[0] == "tensorrt-llm":
        ids, where, convention = list(given.noted[2].taps), "from the export's note", "enter"
    else:
        ids, where, convention = _ids(config, given, count)
    other = None
    if where not in ("given", "from the export's note"):
        if given.noted is not None:
            convention = "output" if given.noted[0] == "sglang" else "enter"
        elif given.convention != "auto":
            convention = given.convention
        elif config.get(IDS) or (config.get("eagle_config") or {}).get(IDS):
            other = _entering(ids, "output" if convention == "enter" else "enter")
    taps = _entering(ids, convention)
    if len(taps) != count or len(set(ids)) != len(ids):
        raise ExportError(f"fc reads {count} layers, the ids are {ids}")
    if taps[0] < 0 or (given.num_layers is not None and taps[-1] >= given.num_layers):
        many = f"; the target has {given.num_layers}" if given.num_layers is not None else ""
        raise ExportError(f"taps {taps} are no layers{many}")
    meaning = {"enter": "an id is the state entering it", "output": "an id is a layer's output"}
    return taps, where if where == "given" else f"{where}; {meaning[convention]}", other


def _ids(config: Mapping[str, Any], given: Given, count: int) -> tuple[list[int], str, str]:
    """Layer ids as written, where, and the convention that place goes with."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    top = config.get(IDS)
    if top is not None and nested is not None and list(top) != list(nested):
        raise ExportError(f"{IDS} stands at the top level and in eagle_config, with other ids: {top} "
                          f"and {nested}: give --taps")  # fmt: skip
    if top is not None:
        return [int(i) for i in top], "from the top level of config.json", "enter"
    if nested is not None:
        return [int(i) for i in nested], "from eagle_config", "output"
    if given.num_layers is None or count != 3:
        raise ExportError("it names no layer ids: give --target, for their usual place, or --taps")
    usual = list(default_taps(given.num_layers))
    return usual, f"usual for {given.num_layers} layers, since it names none", "enter"


def _entering(ids: list[int], convention: str) -> tuple[int, ...]:
    return tuple(sorted(i + (convention == "output") for i in ids))


def ids_and_mask(tensors: dict[str, Tensor], vocab: int) -> list[str]:
    """Make d2t offsets over ascending ids and t2d their mask, in place; what was done, in words.

    Raises ExportError without a map that is needed, and for one that is neither offsets nor ids.
    """
    rows = len(tensors["lm_head.weight"])
    ranks, remarks = torch.arange(rows), []
    mask = tensors.get("t2d")
    d2t = tensors.get("d2t")
    if d2t is None:
        if rows != vocab:
            raise ExportError(
                f"{rows} rows in lm_head.weight for {vocab} tokens and no d2t: which tokens they are "
                "cannot be known"
            )
        ids = ranks
    else:
        if d2t.shape != (rows,) or d2t.is_floating_point():
            raise ExportError(f"d2t is {tuple(d2t.shape)} of {d2t.dtype}, for {rows} draft tokens")
        ids = _target_ids(d2t.long(), mask, vocab)
        if not torch.equal(ids, d2t.long() + ranks):
            remarks.append("d2t held token ids: made offsets, as t2d confirms")
    if bool((ids[1:] < ids[:-1]).any()):
        order = ids.argsort()
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
        remarks.append("draft tokens brought into ascending order")
    wanted = torch.zeros(vocab, dtype=torch.bool)
    wanted[ids] = True
    if mask is not None and not torch.equal(mask.bool(), wanted):
        raise ExportError("d2t and t2d name different tokens")
    if mask is None and d2t is not None:
        remarks.append("t2d was missing: made from d2t")
    tensors["d2t"], tensors["t2d"] = ids - ranks, wanted
    return remarks


def _target_ids(d2t: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    """Target ids [Vd] of a map: offsets, or ids where t2d says so."""
    offsets = d2t + torch.arange(len(d2t))
    good = [ids for ids in (offsets, d2t) if _possible(ids, vocab)]
    if mask is not None:
        named = mask.bool().nonzero().squeeze(1)
        good = [ids for ids in good if torch.equal(ids.sort().values, named)]
    elif good and (good[0] is d2t or (len(d2t) > 1 and bool((d2t[1:] > d2t[:-1]).all()))):
        raise ExportError(
            "d2t holds token ids by the look of it, ascending at every token, not offsets: write "
            "offsets, target id = draft id + d2t, or bring t2d along"
        )
    if not good:
        raise ExportError(
            f"d2t maps outside 0..{vocab - 1}, twice to one token, or not as t2d says"
        )
    return good[0]


def _possible(ids: Tensor, vocab: int) -> bool:
    return bool((ids >= 0).all() and (ids < vocab).all()) and len(ids.unique()) == len(ids)
