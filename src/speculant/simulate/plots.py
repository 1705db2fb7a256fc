"""Pictures of the sweep and of the draft's quality. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..pictures import pyplot, save

if TYPE_CHECKING:
    from .quality import Quality
    from .sweep import Sweep


def sweep(path: Path, found: Sweep) -> None:
    """Numerator, denominator and their quotient against the draft length."""
    plt = pyplot()
    lengths = [row.num_draft_tokens for row in found.rows]
    tokens = [row.expected_tokens for row in found.rows]
    figure, (parts, speed) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    parts.plot(lengths, tokens, marker=".", label="tokens a round, E(N)")
    costs = [1 + n * found.cost for n in lengths]
    parts.plot(lengths, costs, marker=".", label="time of a round, 1 + N c")
    if found.alpha < 1:
        limit = 1 / (1 - found.alpha)
        if limit < 3 * max(tokens):
            parts.axhline(limit, color="grey", ls=":", label=f"1 / (1 - alpha) = {limit:.3g}")
    parts.set(xlabel="drafted tokens N", ylim=(0, None), title="What a round yields and costs")
    speed.plot(lengths, [row.speedup for row in found.rows], marker=".", label="speed-up")
    speed.axhline(1, color="grey", lw=1)
    best = found.best
    speed.plot(
        [best.num_draft_tokens], [best.speedup], "o", ms=9, mfc="none",
        label=f"best: N = {best.num_draft_tokens}, {best.speedup:.2f}x",
    )  # fmt: skip
    speed.set(xlabel="drafted tokens N", ylim=(0, None), title="Their quotient: the speed-up")
    for axes in (parts, speed):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"alpha = {found.alpha:g}, c = {found.cost:g}")
    save(figure, path)


def quality(path: Path, found: Quality) -> None:
    """Alpha against the noise, and tokens a forward against alpha: theory lines, measured points."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    steps = sorted(found.steps, key=lambda step: step.alpha)
    left.plot([s.noise for s in steps], [s.alpha for s in steps], label="theory")
    left.errorbar(
        [s.noise for s in steps], [s.alpha_measured for s in steps],
        yerr=[2 * s.alpha_error for s in steps], fmt="k.", label="simulated, 2 standard errors",
    )  # fmt: skip
    left.set(xlabel="noise in the draft's logits", ylabel="alpha", ylim=(0, 1.05))
    alphas = [s.alpha for s in steps]
    for column, cell in enumerate(steps[0].cells):
        cells = [s.cells[column] for s in steps]
        label = f"N = {cell.num_draft_tokens}"
        (line,) = right.plot(alphas, [c.exact for c in cells], label=label)
        right.plot(alphas, [c.constant_alpha for c in cells], ls=":", color=line.get_color())
        right.errorbar(
            alphas, [c.simulated for c in cells], yerr=[2 * c.standard_error for c in cells],
            fmt=".", color=line.get_color(),
        )  # fmt: skip
    right.plot([], [], "k:", label="with a constant alpha")
    right.set(xlabel="alpha", ylabel="tokens a forward")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"A draft moved away from its target, {found.world} world")
    save(figure, path)
