"""The package's own facts: hardware, models, stacks, fitted constants, published acceptance.

Each is a JSON file under `data/` with its sources inside.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from ..cost import Engine

EAGER_STACKS = ("transformers", "speculant")
"""Stacks that launch their kernels from Python; the others replay captured graphs."""


@cache
def data(name: str) -> dict[str, Any]:
    """A parsed data file, `name` without its extension."""
    folder = resources.files("speculant.tune").joinpath("data")
    text = folder.joinpath(f"{name}.json").read_text("utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def engine_for(stack: str) -> Engine:
    """The fitted constants of the kind of engine that a stack is."""
    kind = "eager" if stack in EAGER_STACKS else "graph"
    return Engine(name=kind, **data("constants")["engines"][kind])


def rank_decay() -> float:
    """The fitted constant of the acceptance-per-rank model."""
    decay: float = data("constants")["rank_decay"]
    return decay
