"""A head -> a folder for an engine, with a README and a note of what it was made from."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..heads.variants import as_dict
from ..heads.weights import KINDS, Head
from . import sglang, speculators, tensorrt_llm, vllm
from .folder import NOTE_FORMAT, ExportError, digest, write_checkpoint
from .keys import LAYOUTS, WHY_NOT
from .layout import Layout
from .parts import Made, Wanted
from .probe import probe
from .refused import refused


class Format(Protocol):
    """What a module of a format has."""

    def config(self, kind: str, c: Any, wanted: Wanted) -> dict[str, Any]: ...
    def tensors(self, head: Head, wanted: Wanted) -> dict[str, Tensor]: ...
    def make(self, kind: str, head: Head, wanted: Wanted) -> Made: ...


FORMATS: dict[str, Format] = {
    "vllm": vllm,
    "speculators": speculators,
    "sglang": sglang,
    "tensorrt-llm": tensorrt_llm,
}
"""Format -> its module."""

ENGINES = {
    "vllm": "vLLM",
    "speculators": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
}
"""Format -> the engine that loads it."""


def find_layout(name: str, kind: str) -> Layout:
    """The table of a kind of head in a format. Raises ExportError, with the reason, without one."""
    layout = LAYOUTS[name].get(kind)
    if layout is None:
        raise ExportError(f"no {name} export of a head of kind {kind}: {WHY_NOT[name, kind]}")
    return layout


def kind_of(head: Head) -> str:
    """The kind of a head, one of KINDS."""
    return next(kind for kind, (_, module) in KINDS.items() if type(head) is module)


def export_head(
    name: str, head: Head, wanted: Wanted, check: Callable[[Path], None] = lambda folder: None
) -> None:
    """Write a head, in float32 in memory, in a format into `wanted.out`.

    check: told the written folder before it takes its place

    Raises ExportError where the format has no place for the head.
    """
    kind = kind_of(head)
    layout = find_layout(name, kind)
    for switch, why in refused(name, kind, head.config).items():
        raise ExportError(f"no {name} export of a head with {switch}: {why}")
    made = FORMATS[name].make(kind, head, wanted)
    tensors = {key: tensor.contiguous() for key, tensor in made.tensors.items()}
    note = {
        "format": NOTE_FORMAT,
        "layout": name,
        "kind": kind,
        "dtype": wanted.dtype_name,
        "target": wanted.target.name,
        "num_speculative_tokens": wanted.depth,
        "speculant": _version(),
        "head": as_dict(head.config),
        "tied": wanted.target.lm_head is None,
        "tensors": {key: digest(tensor) for key, tensor in tensors.items()},
        "probe": probe(head, wanted.dtype),
    }
    files = {"README.md": readme(name, kind, layout, head, made, wanted), **made.files}
    data = {key: text.encode() for key, text in files.items()}
    if kind == "vanilla":
        data |= wanted.target.files
    write_checkpoint(wanted.out, made.config, tensors, layout.weights, note, data, check)


def readme(name: str, kind: str, layout: Layout, head: Head, made: Made, wanted: Wanted) -> str:
    """README.md of an export."""
    target = head.config.target.get("weights_sha256", "")
    trained = f", weights {target[:12]}" if target else ""
    return f"""\
# {kind} for {wanted.target.name}, for {ENGINES[name]}

A draft head trained with Speculant for {wanted.target.name}{trained}. It speeds up that model alone:
another one, a fine-tune of it included, accepts little of what it drafts.

{made.launch}
Checked against: {layout.source}.

    speculant check-export {wanted.out}

`config.json` and the weights are the engine's; `speculant_export.json` says what they must be.
"""


def parse_note(note: dict[str, Any]) -> tuple[str, str, Any]:
    """(format, kind, the head's config) of an export's note. Raises ExportError for a broken one."""
    try:
        name, kind, data = note["layout"], note["kind"], note["head"]
        if name not in LAYOUTS or kind not in LAYOUTS[name]:
            raise ExportError(f"the note of the export names no known layout: {name}, {kind}")
        config = KINDS[kind][0](**{key: _tuples(value) for key, value in data.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"the note of the export is broken ({error})") from None
    return name, kind, config


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _version() -> str:
    try:
        return version("speculant")
    except PackageNotFoundError:
        return "unknown"
