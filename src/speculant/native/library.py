"""Load the compiled library, if this machine has one that fits its processor.

`setup.py` compiles it when the package is installed and a compiler is there. Everything it does has
a torch equivalent, so its absence costs speed alone. `SPECULANT_NATIVE=0` leaves it out.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

LEVELS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}
"""What torch calls a processor's instructions -> what `speculant_level` calls them."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled library, set to run on torch's own threads; None without one that fits."""
    if os.environ.get("SPECULANT_NATIVE") == "0":
        return None
    found = sorted(Path(__file__).parent.parent.glob("_native*.so"))
    if not found:
        return None
    try:
        loaded = ctypes.CDLL(str(found[0]))
    except OSError:
        return None
    has = LEVELS.get(torch.backends.cpu.get_cpu_capability(), 2)
    if loaded.speculant_level() > has:
        return None  # compiled on another machine: it would stop at an unknown instruction
    loaded.speculant_threads(ctypes.c_void_p(_fork()))
    return loaded


def _fork() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; None: one thread."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            runtime = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
