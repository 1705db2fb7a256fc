"""Speculant: lossless speculative decoding.

target = speculant.load_target("smollm2-135m-instruct")
draft = speculant.load_draft("ngram", target)
out = speculant.generate(target, draft, "Why is the sky blue?")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafts import load_draft
    from .engine import generate, stream
    from .sampling import SamplingParams
    from .target.load import load_target

__version__ = "0.1.0"
__all__ = ["SamplingParams", "generate", "load_draft", "load_target", "stream"]

_HOMES = {
    "load_target": "target.load",
    "load_draft": "drafts",
    "generate": "engine",
    "stream": "engine",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `speculant --help` needs no torch."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'speculant' has no attribute {name!r}")
