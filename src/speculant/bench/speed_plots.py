"""The benchmark's pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pictures import pyplot, save
from .contenders import PLAIN, is_adaptive
from .speeds import Speed

if TYPE_CHECKING:
    from .measure import Report

PARTS = {"draft": "draft", "verify": "verify (the target's forward)",
         "sampling": "sampling (acceptance, roll-back)", "other": "other"}  # fmt: skip


def plots(folder: Path, report: Report) -> list[Path]:
    """Write all pictures into a folder, which is made if need be; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for name, draw in (
        ("speed_by_task.png", speed_by_task),
        ("acceptance_by_position.png", acceptance_by_position),
        ("round_time.png", round_time),
        ("batch.png", against_batch),
        ("forward.png", forward_times),
    ):
        figure = draw(report)
        if figure is not None:
            save(figure, folder / name)
            out.append(folder / name)
    return out


def speed_by_task(report: Report) -> Any:
    """Tokens a second, the contenders side by side, a panel for weights and temperature."""
    places = _places(report)
    if not places:
        return None
    widest = max(len(here) for here in places.values())
    tasks = list(next(iter(places.values()))[0].per_task)
    colours = _colours(report)
    size = (min(28.0, max(8.0, 0.16 * widest * len(tasks) + 3)), 4.2)
    figure, panels = _panels(len(places), size)
    for axes, (title, here) in zip(panels, places.items(), strict=True):
        width = 0.85 / len(here)
        for number, s in enumerate(here):
            shift = (number - (len(here) - 1) / 2) * width
            places_x = [i + shift for i in range(len(tasks))]
            heights = [s.per_task[task].median if task in s.per_task else 0.0 for task in tasks]
            axes.bar(places_x, heights, width, label=_named(s), color=colours[s.name])
        axes.set(title=title, ylabel="tokens/s")
        axes.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Speed by task, {report.settings['target']}, batch 1")
    return figure


def acceptance_by_position(report: Report) -> Any:
    """Left of all drafting rounds, right given the position before: a row for each panel's place."""
    places = {
        title: [s for s in here if s.counters.get("num_drafts")]
        for title, here in _places(report).items()
    }
    places = {title: here for title, here in places.items() if here}
    if not places:
        return None
    plt, colours = pyplot(), _colours(report)
    figure, grid = plt.subplots(
        len(places), 2, figsize=(11, 3.9 * len(places)), squeeze=False, layout="constrained"
    )
    for row, (title, here) in zip(grid, places.items(), strict=True):
        for axes, key, what in (
            (row[0], "acceptance_per_position", "of the rounds that drafted"),
            (row[1], "conditional_acceptance_per_position", "given the position before"),
        ):
            for s in here:
                if axes is row[1] and is_adaptive(s.name):
                    continue  # it may stop after any position: the next one was not drafted
                accepted = s.counters["num_accepted_tokens_per_pos"]
                reached = 1 + sum(1 for n in accepted if n)  # behind the first 0 it is 0 of 0
                rates = s.counters[key][: min(reached, len(accepted))]
                places_x = range(1, len(rates) + 1)
                axes.plot(places_x, rates, "o-", ms=4, label=s.name, color=colours[s.name])
            axes.set(title=f"{title}: {what}", xlabel="position in the draft", ylim=(0, 1.02))
            axes.set_ylabel("share accepted")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        row[0].legend(fontsize=8)
    figure.suptitle(f"Acceptance by position, {report.settings['target']}, batch 1")
    return figure


def round_time(report: Report) -> Any:
    """Stacked bars: a round's milliseconds by part."""
    places = {title: [s for s in here if s.round_ms] for title, here in _places(report).items()}
    if not places:
        return None
    tallest = max(len(here) for here in places.values())
    figure, panels = _panels(len(places), (9.5, 0.42 * tallest + 1.9))
    for axes, (title, here) in zip(panels, places.items(), strict=True):
        left = [0.0] * len(here)
        for part, name in PARTS.items():
            widths = [s.round_ms[part] for s in here]
            axes.barh(range(len(here)), widths, left=left, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for i, s in enumerate(here):
            text = f" {s.round_ms['total']:.1f} ms, {s.counters['tokens_per_forward']:.2f} tokens"
            axes.text(left[i], i, text, va="center", fontsize=8)
        axes.set_yticks(range(len(here)), [s.name for s in here])
        axes.invert_yaxis()
        axes.set(title=title, xlabel="ms a round", xlim=(0, 1.3 * max(left)))
        axes.grid(axis="x", alpha=0.3)
    panels[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Time of a round, {report.settings['target']}, batch 1")
    return figure


def against_batch(report: Report) -> Any:
    """Total tokens a second and speed-up against batch; None of one batch size."""
    ours = [s for s in report.speeds if not s.peer]
    batches = sorted({s.batch for s in ours})
    if len(batches) < 2:
        return None
    places = list(dict.fromkeys((s.weights, s.temperature) for s in ours))
    plt, colours = pyplot(), _colours(report)
    figure, grid = plt.subplots(
        len(places), 2, figsize=(11, 3.9 * len(places)), squeeze=False, layout="constrained"
    )
    for row, (weights, temperature) in zip(grid, places, strict=True):
        here = [s for s in ours if (s.weights, s.temperature) == (weights, temperature)]
        for name in dict.fromkeys(s.name for s in here):
            mine = sorted((s for s in here if s.name == name), key=lambda s: s.batch)
            x = [s.batch for s in mine]
            style = {"label": name, "color": colours[name]}
            row[0].plot(x, [s.tokens_per_s.median for s in mine], "o-", **style)
            row[1].plot(x, [s.ratio.median for s in mine], "o-", **style)
        where = f"{weights}, temperature {temperature:g}"
        row[0].set(title=f"{where}: all requests together", ylabel="total tokens/s", ylim=(0, None))
        row[1].set(title=f"{where}: against plain", ylabel="times plain decoding", ylim=(0, None))
        for axes in row:
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(b) for b in batches])
            axes.set_xlabel("requests at once (batch)")
            axes.grid(alpha=0.3)
        row[1].legend(fontsize=8)
    figure.suptitle(f"Speed against batch, {report.settings['target']}")
    return figure


def forward_times(report: Report) -> Any:
    """t(k), measured, and the roofline, a panel for each kind of weights."""
    roof = report.roofline
    if roof is None or not report.forward:
        return None
    plt = pyplot()
    count = len(report.forward)
    figure, grid = plt.subplots(
        1, count, figsize=(max(6.5, 5.2 * count), 4.6), squeeze=False, layout="constrained"
    )
    for axes, (weights, forward) in zip(grid[0], report.forward.items(), strict=True):
        rows = list(forward.ms)
        medians = [forward.ms[k][0] for k in rows]
        axes.plot(rows, medians, "o-", label="t(k), measured (median)")
        reading = roof.bandwidth_ms(forward.weight_bytes)
        counting = [roof.arithmetic_ms(forward.params, k) for k in rows]
        axes.axhline(
            reading,
            ls=":",
            color="tab:green",
            label=f"{forward.weight_bytes / 1e6:.0f} MB at {roof.read_gb_per_s:.1f} GB/s",
        )
        axes.plot(
            rows,
            counting,
            ls="--",
            color="tab:red",
            label=f"2 k x {forward.params / 1e6:.0f} M at {roof.gflop_per_s:.0f} GFLOP/s",
        )
        axes.plot(rows, [max(reading, c) for c in counting], color="black", lw=1, label="roofline")
        for k, ms in zip(rows, medians, strict=True):
            axes.annotate(
                f"{ms / medians[0]:.2f}",
                (k, ms),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(rows, [str(k) for k in rows])
        axes.set(
            title=f"weights {weights} (numbers: t(k) / t(1))",
            xlabel="rows k of a forward",
            ylabel="ms",
        )
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    context = next(iter(report.forward.values())).context
    figure.suptitle(f"The target's forward behind {context} tokens, {report.settings['target']}")
    return figure


def _places(report: Report) -> dict[str, list[Speed]]:
    """Title -> the contenders at batch 1 of each kind of weights and temperature, peers with those
    that they compare with."""
    out: dict[str, list[Speed]] = {}
    for weights, temperature in dict.fromkeys(
        (s.weights, s.temperature) for s in report.speeds if s.batch == 1 and not s.peer
    ):
        out[f"{weights}, temperature {temperature:g}"] = [
            s
            for s in report.speeds
            if s.batch == 1 and s.temperature == temperature
            and (s.against if s.peer else s.weights) == weights
        ]  # fmt: skip
    return out


def _colours(report: Report) -> dict[str, Any]:
    """A contender's colour, the same in every picture and panel; plain decoding is grey."""
    names = [name for name in dict.fromkeys(s.name for s in report.speeds) if name != PLAIN]
    table = pyplot().get_cmap("tab10" if len(names) <= 10 else "tab20").colors
    return {PLAIN: "0.6"} | {name: table[i % len(table)] for i, name in enumerate(names)}


def _named(s: Speed) -> str:
    return f"{s.name} ({s.weights})" if s.peer else s.name


def _panels(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure with panels below each other, each of a size in inches."""
    figure, grid = pyplot().subplots(
        count, 1, figsize=(size[0], size[1] * count + 0.4), squeeze=False, layout="constrained"
    )
    return figure, [row[0] for row in grid]
