"""Named tensors out of a folder's safetensors, with nothing missing and nothing left over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .base import LoadError
from .linear import Embedding, FileRows


class Reader:
    """Takes named tensors out of a folder's safetensors, and says which were not there or left.

    Files are opened per tensor: pages of a mapping that stays open count as memory once touched.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.files = dict(_tensor_files(folder))

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

    def rows(self, name: str, shape: tuple[int, int]) -> Embedding:
        """A table that is looked up a few rows at a time: left in the file where that is as fast."""
        path = self.files[name]
        table = self.take(name, shape)
        if self.device.type != "cpu" or not (place := _place(path, name, self.dtype)):
            return Embedding(table.clone())
        return Embedding(table[:0], FileRows(path, place, shape, self.dtype))

    def has(self, name: str) -> bool:
        return name in self.files

    def discard(self, name: str) -> None:
        self.files.pop(name, None)

    def finish(self) -> None:
        left = [name for name in self.files if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise LoadError(
                f"{self.folder}: unexpected tensors in the weights: {', '.join(left[:3])}"
            )


def _tensor_files(folder: Path) -> Iterator[tuple[str, Path]]:
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, path
        except SafetensorError as error:
            raise LoadError(
                f"{path}: not a whole safetensors file ({error}): copy it anew"
            ) from None


def _place(path: Path, name: str, dtype: torch.dtype) -> int | None:
    """Where a tensor of this dtype starts in a safetensors file; None when it has another dtype."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    if entry["dtype"] != names.get(dtype):
        return None
    return 8 + length + int(entry["data_offsets"][0])
