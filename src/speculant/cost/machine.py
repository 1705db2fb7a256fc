"""What a forward costs on a machine, from sizes and vendor figures (a roofline).

Time = (weight bytes + K/V bytes) / bandwidth + FLOPs / peak + what each layer's kernels cost to
start. The first two are added, not the longer one taken: a layer's memory-bound and compute-bound
kernels run one after the other, and the sum fits published batches of 1 to 32 better. The
efficiencies and start-up times are an engine's, fitted on published measurements
(`tune/data/constants.json`); sizes and peaks are facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

KV_BYTES = 2  # bytes of one cached key or value: 16-bit caches are every stack's default


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer, dense or mixture of experts.

    kv_width:           K/V heads x head size, of one layer
    params:             parameters that every token reads: all but the routed experts
    expert_params:      parameters of all routed experts together; 0 for a dense model
    experts, experts_per_token: routed experts of a layer, and how many a token visits
    weight_bytes:       bytes of one parameter, 2 for bf16, 1 for FP8
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    kv_width: int
    params: float
    expert_params: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = 2.0

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "vocab", "kv_width", "params", "weight_bytes"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name}: {key} is {value}: it must be above 0")
        if self.expert_params < 0 or not math.isfinite(self.expert_params):
            raise ValueError(f"{self.name}: expert_params is {self.expert_params}: 0 or more")
        if self.expert_params and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.name}: experts_per_token is {self.experts_per_token}: "
                f"it lies in 1..{self.experts} experts"
            )

    @property
    def total_params(self) -> float:
        """All parameters."""
        return self.params + self.expert_params

    @property
    def active_params(self) -> float:
        """Parameters that one token computes with."""
        if not self.expert_params:
            return self.params
        return self.params + self.expert_params * self.experts_per_token / self.experts

    def touched_params(self, tokens: int) -> float:
        """Parameters read by a forward of that many tokens.

        A token visits k of E experts; with tokens routed independently and evenly an expert is
        left alone with probability (1 - k/E)^tokens, so the experts touched grow with the rows.
        """
        if not self.expert_params:
            return self.params
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.params + self.expert_params * (1.0 - missed)

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token leaves in the cache."""
        return 2.0 * self.layers * self.kv_width * KV_BYTES

    def with_bytes(self, weight_bytes: float) -> ModelShape:
        """The same sizes at another precision."""
        return replace(self, weight_bytes=weight_bytes)


@dataclass(frozen=True)
class Machine:
    """Accelerators of one kind: bandwidth in GB/s, peak in TFLOP/s (dense 16-bit), memory in GB."""

    name: str
    bandwidth_gb_s: float
    tflops: float
    memory_gb: float
    count: int = 1

    def __post_init__(self) -> None:
        for key in ("bandwidth_gb_s", "tflops", "memory_gb", "count"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name}: {key} is {value}: it must be above 0")


@dataclass(frozen=True)
class Engine:
    """What the software adds; milliseconds, fitted (see `tune/data/constants.json`).

    bandwidth_efficiency, flops_efficiency: shares of the vendor's peaks that are reached
    layer_ms:   added per layer of a forward: starting its kernels, one by one from Python or from
                a captured graph
    step_ms:    added per draft step;  round_ms: added per round with a draft
    tree_ms:    added per round that verifies a tree
    share_ms:   added per layer when several devices share each layer (tensor parallelism)
    splits:     whether several devices share each layer; otherwise each holds some of the layers
                and they work in turn, at the speed of one
    """

    name: str
    bandwidth_efficiency: float
    flops_efficiency: float
    layer_ms: float = 0.0
    step_ms: float = 0.0
    round_ms: float = 0.0
    tree_ms: float = 0.0
    share_ms: float = 0.0
    splits: bool = True

    def __post_init__(self) -> None:
        for key in ("bandwidth_efficiency", "flops_efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{self.name}: {key} is {getattr(self, key)}: it lies in 0..1")
        for key in ("layer_ms", "step_ms", "round_ms", "tree_ms", "share_ms"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{self.name}: {key} is {value}: 0 or more")


def forward_ms(
    model: ModelShape, machine: Machine, engine: Engine, batch: int, rows: int, context: int
) -> float:
    """Milliseconds of one forward of `rows` tokens for each of `batch` sequences.

    context: cached tokens behind each sequence, on average.
    """
    if batch < 1 or rows < 1 or context < 0:
        raise ValueError(f"batch {batch}, rows {rows}, context {context}: at least 1, 1 and 0")
    devices = machine.count if engine.splits else 1
    tokens = batch * rows
    read = model.touched_params(tokens) * model.weight_bytes
    read += batch * context * model.kv_bytes_per_token()
    moving = read / (machine.bandwidth_gb_s * 1e6 * devices * engine.bandwidth_efficiency)
    flops = 2.0 * tokens * (model.active_params + 2.0 * model.layers * context * model.hidden)
    computing = flops / (machine.tflops * 1e9 * devices * engine.flops_efficiency)
    spent = moving + computing + model.layers * engine.layer_ms
    if devices > 1:
        spent += model.layers * engine.share_ms
    return spent
