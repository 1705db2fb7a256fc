"""The machine that is measured: what it is, what runs on it, and what fits into its memory."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..request import prompt_ids
from ..target.base import Target
from ..target.weights import read_header, weight_files
from .profile import parameters, weight_bytes
from .prompts import PROMPTS

PACKAGES = ("speculant", "torch", "transformers", "tokenizers", "numpy")
BYTES = {"": 4.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.75, "file": 1.125}
"""Bytes of a parameter in each format of weights, what `-a8` and `-a16` do to activations aside."""
ROOM = 1.25
"""What loading and caches take on top of the weights, as a factor."""
BUSY = 0.5
"""Load above which a machine counts as busy."""


def describe() -> dict[str, Any]:
    """Processor, cores, memory (GB) and the load of the last minute; None where it is not known."""
    memory, free = _memory_bytes("MemTotal"), _memory_bytes("MemAvailable")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "memory_gb": None if memory is None else round(memory / 1e9, 1),
        "free_gb": None if free is None else round(free / 1e9, 1),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that matter."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "not installed as a package"
    return out


def fit_together(folder: Path, weights: Sequence[str]) -> bool:
    """True where targets of all these weights fit into the memory that is free now, as far as known."""
    free = _memory_bytes("MemAvailable")
    if free is None or len(weights) == 1:
        return True
    params = sum(
        math.prod(entry["shape"])
        for path in weight_files(folder)
        for entry in read_header(path).values()
    )
    return bool(ROOM * params * sum(BYTES[name.partition("-a")[0]] for name in weights) < free)


def peak_memory(
    target_name: str, target: Target, max_tokens: int, weights: str = ""
) -> dict[str, float]:
    """Peak resident memory (MB) of a fresh process that generates, and what it is made of. Linux.

    Raises OSError where that process fails.
    """
    code = (
        "import speculant\n"
        f"t = speculant.load_target({target_name!r}, weights={weights!r})\n"
        "d = speculant.load_draft('ngram', t)\n"
        f"p = speculant.SamplingParams(max_tokens={max_tokens}, temperature=0.0)\n"
        f"speculant.generate(t, d, {PROMPTS['coding']!r}, p)\n"
        # not getrusage: a child's figure there starts from its parent's
        "print([line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line][0])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if out.returncode:
        last = out.stderr.strip().splitlines()[-1:] or [f"exit code {out.returncode}"]
        raise OSError(f"the process that was to be measured failed: {last[0]}")
    capacity = len(prompt_ids(target, PROMPTS["coding"])) + max_tokens
    return {
        "peak": float(out.stdout.strip().splitlines()[-1]) / 1e3,
        "weights": weight_bytes(target, parameters(target)) / 1e6,
        "cache": target.new_cache(1, capacity).nbytes / 1e6,
    }


def _memory_bytes(name: str) -> int | None:
    """A line of /proc/meminfo, in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
