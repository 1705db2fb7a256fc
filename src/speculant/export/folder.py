"""A checkpoint's folder: its config, its tensors, and the note that an export leaves in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NOTE = "speculant_export.json"
NOTE_FORMAT = "speculant-export-1"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CURE = (
    'python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.contiguous() '
    "for k, v in torch.load('{source}', map_location='cpu', weights_only=True).items()}}, "
    "'{goal}')\""
)


class ExportError(ValueError):
    """A head or folder that cannot be exported or imported; one line for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds.

    note: what the export that wrote it left in it (`NOTE`), or None
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    note: dict[str, Any] | None

    @property
    def dtype(self) -> torch.dtype:
        """Of its first floating-point tensor; float32 where there is none."""
        return next(
            (t.dtype for t in self.tensors.values() if t.is_floating_point()), torch.float32
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json and all safetensors of a folder, sharded or not.

    Raises ExportError for a folder without them, for pickles, and for what is broken.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such folder")
    config = _read_json(folder / "config.json")
    note = _read_json(folder / NOTE) if (folder / NOTE).is_file() else None
    if note is not None and note.get("format") != NOTE_FORMAT:
        raise ExportError(f"{folder / NOTE}: written by another version of speculant")
    return Checkpoint(folder, config, _read_tensors(folder), note)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: those that an index names, else all. ExportError without any."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ExportError(f"{index}: names {', '.join(missing[:3]) or 'no file'}, missing")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        cure = CURE.format(source=pickles[0], goal=folder / "model.safetensors")
        raise ExportError(
            f"{pickles[0]}: a pickle, which can run code when it is read: convert it with  {cure}"
        )
    raise ExportError(f"{folder}: no weights (*.safetensors)")


def write_checkpoint(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weights: str,
    note: Mapping[str, Any],
    files: Mapping[str, bytes],
    check: Callable[[Path], None],
) -> None:
    """Write a folder beside itself, then rename it. An earlier export there is replaced.

    files: further ones, by name
    check: told the folder before it is renamed; what it raises keeps `out` as it was

    Raises ExportError where `out` is something else.
    """
    from safetensors.torch import save_file

    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        part.chmod(0o755)
        save_file(dict(tensors), part / weights, metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (part / NOTE).write_text(json.dumps(note, indent=2) + "\n")
        for name, content in files.items():
            (part / name).write_bytes(content)
        check(part)
        old = out.with_name(f".{out.name}.old")
        if out.exists():
            os.replace(out, old)
        os.replace(part, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise ExportError unless `out` is free, an empty folder, or an earlier export."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ExportError(f"{out}: is there and is no folder: give another --out")
    if any(out.iterdir()) and not (out / NOTE).is_file():
        raise ExportError(f"{out}: is there and is no earlier export: give another --out")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    flat = tensor.contiguous().view(-1)
    data = flat.view(torch.uint8) if flat.numel() else flat
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + b"\0" + data.numpy().tobytes()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"{path}: cannot be read ({reason})") from None
    if not isinstance(data, dict):
        raise ExportError(f"{path}: not an object of settings")
    return data


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    out: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path}: cannot be read ({error}): copy it anew") from None
        twice = sorted(set(out) & set(tensors))
        if twice:
            raise ExportError(f"{path}: tensor {twice[0]} is in another file too")
        out |= tensors
    if not out:
        raise ExportError(f"{folder}: its weights hold no tensor")
    return out
