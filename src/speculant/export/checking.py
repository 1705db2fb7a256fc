"""Would an engine load all of a folder, and as it was trained? Every finding names the consequence.

A folder that we exported carries a note of the head's config and of every tensor's hash, and is held
against that. Any other is held against its own config: then whether its flags and layer ids are the
ones it was trained with cannot be known from the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle3 import Eagle3Config
from ..heads.weights import COMPARED
from .folder import Checkpoint, ExportError, digest
from .given import Given
from .guess import guess
from .importing import import_head
from .importing_eagle3 import IDS
from .layout import Key, Layout, setting
from .parts import FromTarget, Wanted
from .probe import differs, probe
from .refused import refused
from .suspicious import all_zero, looks_random
from .variants import as_read, wanted_tensors
from .writing import ENGINES, FORMATS, find_layout, parse_note

LOSS = "{engine} would load it without a word and accept less"

NESTED = (
    "where SGLang and SpecForge mean outputs of layers; vLLM reads it as the states entering them, one "
    "lower: without a word, it accepts less"
)


@dataclass(frozen=True)
class Finding:
    """Something about a tensor or a setting. problem: the folder must not be served like that."""

    subject: str
    text: str
    problem: bool = True

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


@dataclass(frozen=True)
class Checked:
    """What was checked, and what was found."""

    engine: str
    layout: Layout
    findings: list[Finding]
    noted: bool

    @property
    def passed(self) -> bool:
        """True without a problem."""
        return not any(finding.problem for finding in self.findings)


def check_export(
    checkpoint: Checkpoint, name: str | None = None, target: Mapping[str, Any] | None = None
) -> Checked:
    """Hold a folder against what an engine reads.

    name:   the format, where the folder has no note of its own
    target: fingerprint of the target it shall serve

    Raises ExportError for what is no head at all.
    """
    if checkpoint.note is None:
        name, kind, c = guess(checkpoint, name)
    else:
        mine, kind, c = parse_note(checkpoint.note)
        if name not in (None, mine):
            raise ExportError(f"{checkpoint.path}: was exported for {mine}, not for {name}")
        name = mine
    layout, engine = find_layout(name, kind), ENGINES[name]
    findings = check_tensors(checkpoint, layout, c, engine)
    if isinstance(c, Eagle3Config):
        findings += check_map(checkpoint.tensors, c, engine)
    findings += [Finding(switch, why) for switch, why in refused(name, kind, c).items()]
    findings += check_settings(checkpoint, name, layout, c, engine)
    findings += check_target(c, target, engine)
    if checkpoint.note is None:
        findings.append(
            Finding(
                "no note",
                "this is no export of ours: whether flags, layer ids and RoPE are those it was trained "
                "with shows only in a run (--run)",
                problem=False,
            )
        )
    else:
        findings += check_note(checkpoint, engine, stop=any(f.problem for f in findings))
    return Checked(engine, layout, findings, checkpoint.note is not None)


def check_tensors(checkpoint: Checkpoint, layout: Layout, c: Any, engine: str) -> list[Finding]:
    """Missing, unexpected, misshaped, of the wrong type, broken or never trained."""
    wanted, out = wanted_tensors(checkpoint.config, layout, c), []
    tensors = as_read(checkpoint.tensors, layout)
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    whole = isinstance(c, Eagle3Config) and c.draft_vocab_size == c.vocab_size
    for name, (key, shape) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            untied = layout.kind == "vanilla" and name == "lm_head.weight" and not tied
            if untied or (key.without and not (whole and name == "d2t")):
                out.append(Finding(name, f"missing: {key.without or 'it refuses to start'}"))
            continue
        if whole and name in ("d2t", "t2d"):
            out.append(Finding(name, f"{engine} has no map for a whole vocabulary, and may stop"))
        if tuple(tensor.shape) != shape:
            text = f"is {tuple(tensor.shape)}, the sizes say {shape}: {engine} would stop"
            out.append(Finding(name, text))
        elif key.dtype == "float":
            out += check_numbers(name, tensor, key, c, engine)
        elif tensor.dtype != getattr(torch, key.dtype):
            soft = key.dtype == "int64" and tensor.dtype == torch.int32
            out.append(Finding(name, f"is {tensor.dtype}, not {key.dtype}", problem=not soft))
    for name in sorted(set(tensors) - set(wanted)):
        out.append(Finding(name, f"unexpected, and would have no effect: {layout.extra}"))
    return out


def check_numbers(name: str, tensor: Tensor, key: Key, c: Any, engine: str) -> list[Finding]:
    """A tensor of weights: finite, not zero, and trained by the look of it."""
    if not tensor.is_floating_point():
        return [Finding(name, f"is {tensor.dtype}, no floating-point numbers")]
    if not bool(tensor.float().isfinite().all()):
        return [Finding(name, f"holds NaN or infinity: {engine} would accept nothing")]
    if key.switch and not getattr(c, key.switch):
        return [] if all_zero(tensor) else [Finding(name, "must be zeros: the head has no bias")]
    if key.switch:
        return []  # a bias, one part of which may well be zero
    if all_zero(tensor):
        return [Finding(name, f"is all zeros, as if never trained: {LOSS.format(engine=engine)}")]
    if not key.lent and looks_random(tensor):
        text = (
            "cannot be told from random numbers, as if never trained: next to nothing is accepted"
        )
        return [Finding(name, text)]
    if tensor.ndim == 1 and bool((tensor == 1).all()):
        return [Finding(name, "is all ones, as if never trained", problem=False)]
    return []


def check_map(tensors: Mapping[str, Tensor], c: Eagle3Config, engine: str) -> list[Finding]:
    """d2t: offsets to tokens of the vocabulary, each once, those of t2d."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.shape != (c.draft_vocab_size,) or d2t.is_floating_point():
        return []
    ids = d2t.long() + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= c.vocab_size:
        text = f"maps outside 0..{c.vocab_size - 1}: are they token ids in place of offsets? "
        return [Finding("d2t", text + f"{engine} would stop, or draft other tokens")]
    if len(ids.unique()) != len(ids):
        return [Finding("d2t", "maps two draft tokens to one: " + LOSS.format(engine=engine))]
    if t2d is not None and t2d.shape == (c.vocab_size,):
        if torch.equal(t2d.bool().nonzero().squeeze(1), ids.sort().values):
            return []
        return [Finding("d2t", "and t2d name different tokens: one of them is wrong")]
    if not bool(d2t.any()) and c.draft_vocab_size < c.vocab_size:
        text = "is all zeros: draft id i is taken for token i; right only for the first ids"
        return [Finding("d2t", text, problem=False)]
    return []


def check_settings(
    checkpoint: Checkpoint, name: str, layout: Layout, c: Any, engine: str
) -> list[Finding]:
    """Every setting that the engine reads: there, and as the head was trained."""
    out = []
    expected = expected_config(checkpoint, name, layout, c)
    for entry in layout.settings:
        try:
            want = setting(expected, entry.path)
        except KeyError:  # of a switch that is off
            continue
        try:
            value = setting(checkpoint.config, entry.path)
        except KeyError:
            text = f"missing from config.json: {entry.without}"
            nested = (checkpoint.config.get("eagle_config") or {}).get(IDS)
            if entry.path == IDS and nested and checkpoint.note is None:
                text = f"stands in eagle_config alone, {NESTED}"
            out.append(Finding(entry.path, text, entry.needed or checkpoint.note is not None))
            continue
        if not entry.free and value != want:
            text = f"is {value!r}; the head is {want!r}. {LOSS.format(engine=engine)}, or stop"
            if checkpoint.note is None:
                text = f"is {value!r}, usual is {want!r}: right only if it was trained like that"
            out.append(Finding(entry.path, text, problem=checkpoint.note is not None))
    return out


def expected_config(checkpoint: Checkpoint, name: str, layout: Layout, c: Any) -> dict[str, Any]:
    """The config.json that this head would be exported with."""
    note = checkpoint.note or {}
    dtype = getattr(torch, note.get("dtype", ""), checkpoint.dtype)
    tied = note.get("tied", bool(checkpoint.config.get("tie_word_embeddings")))
    target = FromTarget(note.get("target", ""), lm_head=None if tied else torch.zeros(1, 1))
    wanted = Wanted(checkpoint.path, target, dtype)
    return FORMATS[name].config(layout.kind, c, wanted)


def check_target(c: Any, target: Mapping[str, Any] | None, engine: str) -> list[Finding]:
    """Layer ids within the target's layers; the fingerprint of the target that it shall serve."""
    out, own = [], c.target
    layers = (target or own).get("num_layers")
    taps = [tap for tap in getattr(c, "taps", ()) if tap >= 0]
    if layers is not None and taps and taps[-1] >= layers:
        out.append(Finding("layer ids", f"tap layer {taps[-1]}; the target has {layers} layers"))
    for key in COMPARED if target is not None else ():
        mine, theirs = own.get(key), (target or {}).get(key)
        if mine is not None and mine != theirs:
            text = f"trained for another target, whose {key} is {str(mine)[:16]}, not "
            text += f"{str(theirs)[:16]}: {LOSS.format(engine=engine)}"
            return [*out, Finding("target", text)]
    return out


def check_note(checkpoint: Checkpoint, engine: str, stop: bool) -> list[Finding]:
    """Tensors as exported, and a head that computes what it did; stop: the latter cannot be."""
    note, out = checkpoint.note or {}, []
    for name, tensor in checkpoint.tensors.items():
        if name in note.get("tensors", {}) and digest(tensor) != note["tensors"][name]:
            text = "has other numbers than were exported: " + LOSS.format(engine=engine)
            out.append(Finding(name, text))
    if stop or out:
        return out
    head = import_head(checkpoint, Given()).head
    if differs(note.get("probe", []), probe(head, getattr(torch, note["dtype"]))):
        text = "read back, the head does not compute what it did: " + LOSS.format(engine=engine)
        out.append(Finding("logits", text))
    return out
