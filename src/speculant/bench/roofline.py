"""The target's forward of few rows, and what this machine could do at best.

A forward of k rows reads all weights once and does two floating-point operations a weight and row,
so it takes at least the longer of weight bytes / read bandwidth and 2 k params / peak FLOP/s. Keys,
values and activations are left out: at a few hundred tokens they are small beside the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..pace import WARM_UP, ForwardTimer
from ..target.base import Target
from .profile import parameters, weight_bytes

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
"""Cached tokens behind a timed forward."""
PASSES = 15
"""Times that every row count is timed, after a warm-up."""
READ_BYTES = 256 << 20
"""What is read to time memory: many times the largest cache of a desktop processor."""
SQUARE = 1536
"""Rows and columns of the matrices whose product times arithmetic."""
HOW = (
    f"read bandwidth: the best of summing {READ_BYTES >> 20} MB of float32, and of a matrix of that "
    f"size times a vector; arithmetic: the best product of two float32 matrices of {SQUARE} x {SQUARE}"
)


@dataclass
class Machine:
    """The best of what was seen so far: bytes a millisecond, operations a millisecond."""

    read: float = 0.0
    arithmetic: float = 0.0
    numbers: torch.Tensor = field(default_factory=lambda: torch.ones(READ_BYTES >> 12, 1 << 10))
    square: torch.Tensor = field(default_factory=lambda: torch.ones(SQUARE, SQUARE))

    def run(self) -> None:
        """Time each once more."""
        vector = torch.ones(self.numbers.shape[1])
        self.read = max(self.read, self.numbers.nbytes / _ms(lambda: self.numbers.sum()))
        self.read = max(self.read, self.numbers.nbytes / _ms(lambda: self.numbers @ vector))
        work = 2 * len(self.square) ** 3
        self.arithmetic = max(self.arithmetic, work / _ms(lambda: self.square @ self.square))


@dataclass(frozen=True)
class Roofline:
    """What a machine can do: GB and billion floating-point operations (multiply, add) a second."""

    read_gb_per_s: float
    gflop_per_s: float
    how: str = HOW

    def bandwidth_ms(self, weight_bytes: int) -> float:
        """Reading the weights once."""
        return weight_bytes / self.read_gb_per_s / 1e6

    def arithmetic_ms(self, params: int, rows: int) -> float:
        """Multiplying so many rows by them."""
        return 2 * rows * params / self.gflop_per_s / 1e6


@dataclass(frozen=True)
class Forward:
    """t(k) of one target: rows -> (median milliseconds, largest less smallest).

    weight_bytes: read by a forward; params: multiplied with every row
    """

    context: int
    ms: dict[int, tuple[float, float]]
    weight_bytes: int
    params: int


class Forwards:
    """Times t(k) of several targets and the machine's best, a pass at a time, beside other work."""

    def __init__(self, targets: dict[str, Target]) -> None:
        """targets: by the name of their weights."""
        self.targets, self.passes, self.machine = targets, 0, Machine()
        self.timers: dict[str, ForwardTimer] = {}
        for name, target in targets.items():
            room = target.info.context_length
            rows = [k for k in ROWS if k <= room // 2]
            self.timers[name] = ForwardTimer(target, rows, min(CONTEXT, room // 2))
            self.timers[name].run(WARM_UP)

    def keep_up(self, done: int, total: int) -> None:
        """Run as many passes as are due when `done` of `total` groups of questions are answered."""
        while self.passes < -(-PASSES * done // total):
            self.passes += 1
            self.machine.run()
            for timer in self.timers.values():
                timer.run()

    def figures(self) -> dict[str, Forward]:
        """Medians, by the name of the weights."""
        out = {}
        for name, target in self.targets.items():
            timer = self.timers[name]
            ms = {rows: seen for (_, rows), seen in timer.medians().items()}
            size = weight_bytes(target, parameters(target))
            out[name] = Forward(timer.context, ms, size, multiplied(target))
        return out

    def roofline(self) -> Roofline:
        """The machine's best."""
        return Roofline(self.machine.read / 1e6, self.machine.arithmetic / 1e6)


def multiplied(target: Target) -> int:
    """Parameters that every row is multiplied with: an embedding that is only looked up is not."""
    from ..target.hf import HFTarget
    from ..target.llama import LlamaTarget

    params = parameters(target)
    if isinstance(target, LlamaTarget):
        return params if target.config.tied else params - target.embedding.numel
    if isinstance(target, HFTarget):
        table = target.model.get_input_embeddings().weight
        head = target.model.get_output_embeddings()
        return params if head is None or head.weight is table else params - table.numel()
    return params


def _ms(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return 1e3 * (time.perf_counter() - began)
