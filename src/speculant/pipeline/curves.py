"""The picture of a run: loss, and held-out acceptance, against answer tokens seen."""

from __future__ import annotations

from typing import Any

from ..pictures import pyplot, save
from ..train.state import RunFolder


def plot(folder: RunFolder) -> None:
    """Draw metrics.jsonl into curves.png, written whole or not at all."""
    records = folder.records()
    scored = [r for r in records if "conditional" in r]
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot([r["tokens"] for r in records], _smooth([r["loss"] for r in records]), lw=1)
    left.set(xlabel="answer tokens seen", ylabel="training loss (mean of 25 steps)", yscale="log")
    for k in range(max((len(r["conditional"]) for r in scored), default=0)):
        points = [(r["tokens"], r["conditional"][k]) for r in scored]
        right.plot(*zip(*points, strict=True), marker=".", label=f"position {k + 1}")
    right.set(xlabel="answer tokens seen", ylabel="held-out conditional acceptance", ylim=(0, 1))
    lengths = right.twinx()
    lengths.plot(
        [r["tokens"] for r in scored], [r["mean_acceptance_length"] for r in scored], "k--", lw=1
    )
    lengths.set_ylabel("mean acceptance length (dashed)")
    if scored:
        right.legend(loc="lower right", fontsize=8)
    save(figure, folder.curves)


def _smooth(values: list[Any], width: int = 25) -> list[float]:
    """Mean of the last `width` values at every point."""
    out = []
    for i in range(len(values)):
        some = values[max(0, i + 1 - width) : i + 1]
        out.append(sum(some) / len(some))
    return out
