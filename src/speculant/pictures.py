"""Drawing: matplotlib without a screen, imported when something is drawn, and files written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DPI = 110


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure, whole or not at all, and forget it."""
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(part, dpi=DPI)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        pyplot().close(figure)
