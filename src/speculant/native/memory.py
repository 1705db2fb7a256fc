"""Weights in huge pages: the processor's prefetching stops at the end of a page of 4 kB."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import PackedLinear

PAGE, LINE = 2 << 20, 64  # bytes of a huge page and of a cache line
PARTS = ("weight", "scales", "minima")
ENOUGH = 24 << 20
"""Bytes of matrices that share a mapping: few half-used pages, and never a second copy of the model."""


class Mover:
    """Moves matrices as they are loaded, some at a time."""

    def __init__(self) -> None:
        self._waiting: list[PackedLinear] = []

    def add(self, *matrices: PackedLinear | None) -> None:
        """Take matrices; None is passed over."""
        self._waiting += [matrix for matrix in matrices if matrix is not None]
        if sum(matrix.nbytes for matrix in self._waiting) >= ENOUGH:
            self.finish()

    def finish(self) -> None:
        """Move what waits."""
        move_to_huge_pages(self._waiting)
        self._waiting = []
        give_back_memory()


def give_back_memory() -> None:
    """Return what the allocator keeps of freed memory to the system, with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def move_to_huge_pages(matrices: Sequence[PackedLinear]) -> None:
    """Move packed matrices into one mapping of huge pages, where the system has some (Linux)."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    kept = [(m, name) for m in matrices for name in PARTS if getattr(m, name) is not None]
    size = sum(_whole_lines(getattr(m, name).nbytes) for m, name in kept)
    if advice is None or size < PAGE:
        return
    # private: shared memory has a setting of its own, usually off
    area = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(advice)
    except OSError:  # a kernel without them
        return
    room = torch.frombuffer(area, dtype=torch.uint8)
    at = -room.data_ptr() % PAGE
    for matrix, name in kept:
        part: Tensor = getattr(matrix, name)
        place = room[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        setattr(matrix, name, place)  # the old memory is free again: no second copy of the model
        at += _whole_lines(part.nbytes)


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE
