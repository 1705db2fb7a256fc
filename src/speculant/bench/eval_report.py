"""An evaluation for people: tables in the terminal, and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

COLUMNS = (
    "task", "asked", "tokens", "mean\nlength", "tokens/\nforward", "drafts\naccepted",
    "first", "second, third, ... (%)\ngiven the one before",
)  # fmt: skip
NOTE = (
    "mean length: tokens that a round with a draft commits, its recovered or bonus token included; "
    "accepted: accepted of all drafted tokens; the rest: accepted at a position, of the rounds "
    "that accepted the one before. Sums over all answers first, then ratios."
)


def as_json(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One JSON object: the only setting's own figures, or every setting's under `results`."""
    return dict(results[0]) if len(results) == 1 else {"results": [dict(r) for r in results]}


def render(console: Console, title: str, labels: Sequence[str], results: Sequence[Any]) -> None:
    """Print a table a setting: overall, then per task."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for label, result in zip(labels, results, strict=True):
        table = Table(title=f"{title}, {label}", box=SIMPLE_HEAD, padding=0)
        for i, name in enumerate(COLUMNS):
            last = i == len(COLUMNS) - 1
            table.add_column(name, justify="left" if i == 0 or last else "right", no_wrap=not last)
        table.add_row(*_cells("all", result), style="bold", end_section=True)
        for task, mine in result["per_task"].items():
            table.add_row(*_cells(task, mine))
        console.print(table)
        console.print(
            f"{result['num_answers']} answers in {result['seconds']:.0f} s; "
            f"{result['loops']} of them are repetition loops"
        )
    console.print(NOTE)


def plot(path: Path, title: str, labels: Sequence[str], results: Sequence[Any]) -> None:
    """Write a picture (by the path's ending): acceptance per position, and per task as bars.

    Written to a temporary file first, then renamed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    for label, result in zip(labels, results, strict=True):
        rates = _conditional(result)
        curves.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    curves.set(
        title="Accepted at a position, given that the one before was",
        xlabel="position in the draft", ylabel="conditional acceptance", ylim=(0, 1.05),
    )  # fmt: skip
    curves.grid(alpha=0.3)
    curves.legend()
    _bars(bars, labels, results)
    figure.suptitle(title)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(part, dpi=150)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _bars(axes: Axes, labels: Sequence[str], results: Sequence[Any]) -> None:
    """Mean acceptance length per task, the settings side by side."""
    tasks = list(dict.fromkeys(["all", *(task for r in results for task in r["per_task"])]))
    width = 0.8 / len(results)
    for number, (label, result) in enumerate(zip(labels, results, strict=True)):
        rows = {"all": result, **result["per_task"]}
        places = [i for i, task in enumerate(tasks) if task in rows]
        heights = [rows[tasks[i]]["mean_acceptance_length"] for i in places]
        shift = (number - (len(results) - 1) / 2) * width
        axes.bar([i + shift for i in places], heights, width, label=label)
    axes.set(title="Mean acceptance length by task", ylabel="tokens a drafting round commits")
    axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right")
    axes.axhline(1, color="grey", linewidth=1)
    axes.grid(axis="y", alpha=0.3)


def _cells(task: str, figures: Mapping[str, Any]) -> list[str]:
    """One row of a table."""
    drafted = figures["counters"]["num_drafts"] > 0
    conditional = [f"{rate:.0%}" for rate in _conditional(figures)]
    return [
        task,
        str(figures["num_questions"]),
        str(figures["num_tokens"]),
        f"{figures['mean_acceptance_length']:.2f}" if drafted else "-",
        f"{figures['tokens_per_forward']:.2f}",
        f"{figures['draft_acceptance_rate']:.0%}" if drafted else "-",
        conditional[0] if conditional else "-",
        " ".join(rate.rstrip("%") for rate in conditional[1:]),
    ]


def _conditional(figures: Mapping[str, Any]) -> list[float]:
    """Conditional acceptance of the positions some round got to: behind them it is 0 of 0."""
    accepted = figures["counters"]["num_accepted_tokens_per_pos"]
    reached = [True, *(count > 0 for count in accepted[:-1])]
    rates = figures["conditional_acceptance_per_position"]
    return [rate for rate, some in zip(rates, reached, strict=False) if some]
