"""Named tensors out of a folder's safetensors, with nothing missing and nothing left over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..native.library import library
from .base import LoadError
from .linear import Embedding, FileRows, Linear
from .quantised import FILE, QuantisedFile
from .tokenizer import line, read_json

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class Reader:
    """Takes named tensors out of a folder's safetensors, and says which were not there or left.

    Files are opened per tensor: pages of a mapping that stays open count as memory once touched.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, weights: str = ""
    ) -> None:
        """weights: what matrices are rounded to, see `linear.Linear`, or "file": a GGUF's blocks."""
        self.folder, self.dtype, self.device, self.weights = folder, dtype, device, weights
        self.blocks = QuantisedFile(folder) if weights.startswith("file") else None
        self.files = {name: path for path in weight_files(folder) for name in read_header(path)}

    def take(
        self, name: str, shape: tuple[int, ...], keep: bool = False, copy: bool = False
    ) -> Tensor:
        """A tensor of the given shape, where nothing converts it a view of the mapped file.

        keep: it will be taken again; copy: free of the file.
        """
        from safetensors import safe_open

        if name not in self.files:
            raise LoadError(f"{self.folder}: tensor {name} is missing from the weights")
        path = self.files[name] if keep else self.files.pop(name)
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise LoadError(
                f"{self.folder}: tensor {name} is {tuple(tensor.shape)}, expected {shape}"
            )
        return tensor.to(self.device, self.dtype, copy=copy)

    def linear(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        keep: bool = False,
        bias: Tensor | None = None,
    ) -> Linear:
        """Matrices [N_i, K] one below the other, as one packed layer. keep: see `take`."""
        whole = None if self.blocks is None else self.blocks.take(names)
        parts = [self.take(*part, keep=keep) for part in zip(names, shapes, strict=True)]
        if whole is not None:
            return Linear(whole, bias, self.weights)
        dense = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Linear(dense, bias, "" if self.blocks else self.weights)

    def rows(self, name: str, shape: tuple[int, int]) -> Embedding:
        """A table that is looked up a few rows at a time: left in the file where that is as fast."""
        path = self.files[name]
        table = self.take(name, shape)
        if self.device.type != "cpu" or not (place := _place(path, name, self.dtype)):
            return Embedding(table.clone())
        return Embedding(table[:0], FileRows(path, place, shape, self.dtype))

    def discard(self, name: str) -> None:
        self.files.pop(name, None)

    def finish(self) -> None:
        left = [name for name in self.files if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise LoadError(
                f"{self.folder}: unexpected tensors in the weights: {', '.join(left[:3])}"
            )


def exact_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> str:
    """The format that holds a folder's own weights, none of them rounded, in the fewest bytes.

    That is the fastest one for few rows (docs/performance.md): "file" for what was a GGUF file,
    bfloat16 for a checkpoint stored in it; "" where the compiled library does not compute, which is
    in float32 and on a CPU.
    """
    if dtype is not torch.float32 or device.type != "cpu" or library() is None:
        return ""
    if (folder / FILE).is_file():
        return "file"
    entries = [e for path in weight_files(folder) for e in read_header(path).values()]
    matrices = [entry for entry in entries if len(entry.get("shape", ())) == 2]
    stored = matrices and all(entry.get("dtype") == "BF16" for entry in matrices)
    return "bfloat16" if stored else ""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; LoadError where there is none or one is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise LoadError(
                f"{folder / INDEX}: names {', '.join(missing[:3]) or 'no file'}, missing"
            )
        return [folder / name for name in names]
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
    if pickles:
        raise LoadError(
            f"{folder}: only pickled weights ({pickles[0].name}), which can run code when read: "
            "convert them to safetensors"
        )
    raise LoadError(f"{folder}: no weights ({WEIGHTS} or {INDEX})")


def read_header(path: Path) -> dict[str, Any]:
    """Tensor entries of a safetensors file, which must hold every byte that they name."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= size - 8 else None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a safetensors file ({line(error)}): copy it anew") from None
    if not isinstance(header, dict):
        raise LoadError(f"{path}: not a safetensors file, or a truncated one: copy it anew")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        end = 8 + length + max((int(e["data_offsets"][1]) for e in entries.values()), default=0)
    except (KeyError, TypeError, ValueError, IndexError):
        raise LoadError(f"{path}: its header is broken: copy it anew") from None
    if end != size:
        raise LoadError(f"{path}: {size} bytes where its header names {end}: copy it anew")
    return {name: {**entry, "start": 8 + length} for name, entry in entries.items()}


def _place(path: Path, name: str, dtype: torch.dtype) -> int | None:
    """Where a tensor of this dtype starts in a safetensors file; None when it has another dtype."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    entry = read_header(path)[name]
    if entry["dtype"] != names.get(dtype):
        return None
    return int(entry["start"]) + int(entry["data_offsets"][0])
