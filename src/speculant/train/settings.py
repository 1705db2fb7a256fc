"""How to train: settings that change the result, the learning rate, the processes, the score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

PATIENCE_S = 7 * 86400
"""How long processes wait for each other: one makes the data, hours of it, while the others wait."""


@dataclass(frozen=True)
class LoopSettings:
    """How to train. What changes the result belongs here, and is kept with the run.

    batch_answers: answer tokens of a batch; batch_tokens: its padded size at most
    lr:            peak rate of AdamW, after `warmup` steps, down to `floor` times it by a cosine
    clip:          gradient norm; ema: decay of averaged weights, 0 is off
    depth:         draft positions that are scored
    score_every:   steps between scores
    """

    lr: float = 1e-3
    warmup: int = 20
    floor: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 1.0
    ema: float = 0.0
    batch_answers: int = 1024
    batch_tokens: int = 8192
    depth: int = 5
    score_every: int = 100
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("lr", "clip", "batch_answers", "batch_tokens", "depth", "score_every")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}: it must be from 0 to below 1")


@dataclass(frozen=True)
class Score:
    """Held-out greedy acceptance of a chain, over all bases."""

    reached: tuple[float, ...]
    accepted: tuple[float, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens a base."""
        return 1 + sum(self.accepted) / max(1.0, self.reached[0])

    @property
    def conditional(self) -> list[float]:
        """Accepted at a position given that the one before was."""
        return [a / max(1.0, r) for a, r in zip(self.accepted, self.reached, strict=True)]


def rate(settings: LoopSettings, step: int, total: int) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up, then half a cosine down to the floor."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, total - settings.warmup)
    low = settings.floor
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def average_decay(settings: LoopSettings, step: int) -> float:
    """Decay of the averaged weights at step 0, 1, ...: short at first, or a short run would keep
    its first values."""
    return min(settings.ema, (1 + step) / (10 + step))


def bfloat16_is_native(device: str) -> bool:
    """True where bfloat16 is multiplied by the hardware, twice as fast as float32 or faster."""
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def accelerator_for(precision: str, device: str = "cpu") -> Accelerator:
    """The processes and the precision: bfloat16 where the machine multiplies it natively."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    wanted = {
        "auto": "bf16" if bfloat16_is_native(device) else "no",
        "bfloat16": "bf16",
        "float32": "no",
    }
    if precision not in wanted:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(wanted)}")
    AcceleratorState._reset_state()  # a process may train again, in another precision
    return Accelerator(
        mixed_precision=wanted[precision],
        cpu=device == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=PATIENCE_S))],
    )


def end_processes() -> None:
    """Take the processes' group down once all have come here, where there is one.

    Gloo's threads may abort a process that ends while its group is up.
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        group.barrier()
        group.destroy_process_group()
