"""The benchmark's figures as tables: rich ones in the terminal, Markdown in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .contenders import PLAIN, is_adaptive
from .speeds import Agreement, Figure, Speed, best_ours

if TYPE_CHECKING:
    from rich.console import Console

    from .measure import Report

BASELINE_MB = 300
"""Memory that is allowed beside weights and cache."""
GREEDY = 0.0


@dataclass(frozen=True)
class Table:
    """title: a line; rows: cells as text, under `columns`, the first of which are names."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The title, a blank line, and the table."""
        lines = [" | ".join(self.columns), "|".join("---" for _ in self.columns)]
        lines += [" | ".join(row) for row in self.rows]
        head, rule, *rest = (f"| {line} |" for line in lines)
        return "\n".join([self.title, "", head, rule.replace(" ", ""), *rest])


def markdown(report: Report) -> str:
    """Everything, as a page's part."""
    tables = [table.markdown() for table in tables_of(report)]
    lines = [f"- {line}" for line in lines_of(report)]
    return "\n\n".join([headline(report), *tables, "\n".join(lines)]) + "\n"


def render(console: Console, report: Report) -> None:
    """Everything, in the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as RichTable

    console.print(headline(report), markup=False)
    for table in tables_of(report):
        console.print(f"\n{table.title}", style="bold", markup=False)
        shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(table.columns):
            shown.add_column(escape(name), justify="left" if i == 0 else "right")
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
    for line in lines_of(report):
        console.print(f"- {line}", markup=False)


def headline(report: Report) -> str:
    """What was measured on what, in a sentence or two."""
    s, q, m = report.settings, report.questions, report.machine
    runs = "one run" if s["runs"] == 1 else f"medians of {s['runs']} runs"
    return (
        f"{s['target']}, {q['prompts']} prompts of {q['prompt_tokens']['least']} to "
        f"{q['prompt_tokens']['most']} tokens ({q['questions']} questions out of {q['source']}), "
        f"answers of at most {s['max_tokens']} tokens, {runs}; {m['processor']}, {s['threads']} "
        f"threads, torch {report.versions['torch']}. `{s['command']}`"
    )


def tables_of(report: Report) -> Iterator[Table]:
    """All tables, in the order in which they are read."""
    ours = [s for s in report.speeds if not s.peer]
    places = dict.fromkeys((s.weights, s.temperature, s.batch) for s in ours)
    for weights, temperature, batch in places:
        here = [
            s for s in ours if (s.weights, s.temperature, s.batch) == (weights, temperature, batch)
        ]
        if (temperature, batch) == (GREEDY, 1):
            here += [s for s in report.speeds if s.peer and s.against == weights]
        title = f"weights {weights}, temperature {temperature:g}, batch {batch}"
        yield speed_table(f"Speed: {title}", here)
        if batch == 1:
            yield task_table(f"Tokens/s by task: {title}", here)
            yield ratio_table(f"Times plain decoding by task: {title}", here)
            yield round_table(f"Milliseconds a round: {title}", here)
    yield from _batch_tables(ours)
    for weights in report.forward:
        yield forward_table(report, weights)
    if report.memory_mb:
        yield memory_table(report)


def speed_table(title: str, found: Sequence[Speed]) -> Table:
    """The contenders of one place."""
    columns = ("contender", "tokens/s", "spread", "against plain", "accepted", "mean length",
               "loop's own", "text as plain")  # fmt: skip
    rows = []
    for s in found:
        drafted = s.counters.get("num_drafts", 0)
        rows.append((
            _named(s),
            f"{s.tokens_per_s.median:.1f}",
            _spread(s.tokens_per_s),
            f"{s.ratio.median:.2f}x" + (f" +-{s.ratio.spread / 2:.0%}" if s.ratio.spread else ""),
            f"{s.counters['draft_acceptance_rate']:.0%}" if drafted else "",
            f"{s.counters['mean_acceptance_length']:.2f}" if drafted else "",
            "" if s.loop_share is None else f"{s.loop_share:.1%}",
            _same(s.agreement),
        ))  # fmt: skip
    return Table(title, columns, rows)


def task_table(title: str, found: Sequence[Speed]) -> Table:
    """Tokens a second by task."""
    tasks = tuple(found[0].per_task)
    rows = [
        (
            _named(s),
            *(f"{s.per_task[task].median:.1f}" if task in s.per_task else "" for task in tasks),
        )
        for s in found
    ]
    return Table(title, ("contender", *tasks), rows)


def ratio_table(title: str, found: Sequence[Speed]) -> Table:
    """How fast against plain by task, plain itself left out."""
    tasks = tuple(found[0].per_task)
    rows = [
        (
            _named(s),
            *(f"{s.ratio_per_task[t].median:.2f}" if t in s.per_task else "" for t in tasks),
        )
        for s in found
        if s.name != PLAIN
    ]
    return Table(title, ("contender", *tasks), rows)


def round_table(title: str, found: Sequence[Speed]) -> Table:
    """Where a round's time goes."""
    parts = ("draft", "verify", "sampling", "other", "total")
    rows = [
        (s.name, *(f"{s.round_ms[part]:.2f}" for part in parts), _per_round(s))
        for s in found
        if s.round_ms
    ]
    return Table(title, ("contender", *parts, "tokens/round"), rows)


def _batch_tables(ours: Sequence[Speed]) -> Iterator[Table]:
    """Total tokens a second against batch, and what they are of plain decoding's."""
    batches = sorted({s.batch for s in ours})
    if len(batches) < 2:
        return
    for weights, temperature in dict.fromkeys((s.weights, s.temperature) for s in ours):
        here = [s for s in ours if (s.weights, s.temperature) == (weights, temperature)]
        rows = []
        for name in dict.fromkeys(s.name for s in here):
            mine = {s.batch: s for s in here if s.name == name}
            cells = [
                f"{mine[b].tokens_per_s.median:.1f} ({mine[b].ratio.median:.2f}x)" for b in batches
            ]
            rows.append((name, *cells))
        title = f"Total tokens/s by batch: weights {weights}, temperature {temperature:g}"
        yield Table(title, ("contender", *(f"batch {b}" for b in batches)), rows)


def forward_table(report: Report, weights: str) -> Table:
    """t(k) beside the roofline."""
    forward, roof = report.forward[weights], report.roofline
    assert roof is not None
    first = next(iter(forward.ms.values()))[0]
    rows = []
    for k, (ms, wide) in forward.ms.items():
        reading = roof.bandwidth_ms(forward.weight_bytes)
        counting = roof.arithmetic_ms(forward.params, k)
        limit = max(reading, counting)
        bound = "bandwidth" if reading >= counting else "arithmetic"
        rows.append((f"{k}", f"{ms:.2f}", f"{wide:.2f}", f"{ms / first:.2f}",
                     f"{limit:.2f} ({bound})", f"{ms / limit:.2f}"))  # fmt: skip
    columns = ("rows k", "t(k) ms", "spread ms", "t(k) / t(1)", "roofline ms", "t(k) / roofline")
    return Table(f"t(k) behind {forward.context} tokens: weights {weights}", columns, rows)


def memory_table(report: Report) -> Table:
    """Peak memory of a fresh process."""
    rows = []
    for weights, m in report.memory_mb.items():
        rest = m["peak"] - m["weights"] - m["cache"]
        rows.append((weights, *(f"{x:.0f}" for x in (m["peak"], m["weights"], m["cache"], rest))))
    columns = ("weights", "peak MB", "weights", "cache", f"the rest (allowed {BASELINE_MB})")
    return Table("Peak memory of a fresh process, MB", columns, rows)


def lines_of(report: Report) -> Iterator[str]:
    """What no table holds, a sentence or two each."""
    yield from _best_lines([s for s in report.speeds if not s.peer])
    for adapted in report.adapted:
        yield adapted.line
    yield from _peer_lines(report.speeds)
    for weights, q in report.quality.items():
        yield (
            f"weights {weights} against float32, over {q.tokens} tokens of greedy answers: "
            f"perplexity {q.perplexity:.4f} against {q.reference_perplexity:.4f}, the same likeliest "
            f"token in {q.agreement:.2%}, divergence {q.divergence:.2e} nats"
        )
    if report.roofline is not None:
        roof = report.roofline
        yield (
            f"roofline: {roof.read_gb_per_s:.1f} GB/s, {roof.gflop_per_s:.0f} GFLOP/s ({roof.how}); "
            + "; ".join(
                f"{name} reads {f.weight_bytes / 1e6:.0f} MB a forward and multiplies "
                f"{f.params / 1e6:.0f} million weights a row"
                for name, f in report.forward.items()
            )
        )
    yield from report.notes


def _best_lines(ours: Sequence[Speed]) -> Iterator[str]:
    """The fastest of ours at batch 1, and how adaptive ones do in batches."""
    for weights, temperature in dict.fromkeys((s.weights, s.temperature) for s in ours):
        here = [s for s in ours if (s.weights, s.temperature) == (weights, temperature)]
        alone = [s for s in here if s.batch == 1]
        where = f"{weights}, temperature {temperature:g}"
        if alone:
            best = max(alone, key=lambda s: s.tokens_per_s.median)
            yield (
                f"fastest at batch 1, {where}: {best.name}, {best.tokens_per_s.median:.1f} "
                f"tokens/s, {best.ratio.median:.2f}x plain"
            )
        for name in dict.fromkeys(s.name for s in here if is_adaptive(s.name) and s.batch > 1):
            worst = min((s for s in here if s.name == name), key=lambda s: s.ratio.median)
            yield (
                f"{name}, {where}: of all batch sizes it is slowest against plain at batch "
                f"{worst.batch}, {worst.ratio.median:.2f}x"
            )


def _peer_lines(found: Sequence[Speed]) -> Iterator[str]:
    """Each peer against the best of ours, and of ours with its weights."""
    for peer in (s for s in found if s.peer and s.tokens_per_s.median):
        line = f"{peer.name} ({peer.weights}): ours at best is {_times(best_ours(found), peer)}"
        same = best_ours(found, _of(peer.against))
        if same != best_ours(found):
            line += f"; with {peer.against}, {_times(same, peer)}"
        if peer.agreement is not None:
            a = peer.agreement
            line += f"; its text is ours ({peer.against}) on {a.same} of {a.prompts} prompts"
            if a.first_difference:
                earliest = min(a.first_difference.values())
                line += f", the others part at token {earliest} or later"
        yield line


def _of(weights: str) -> Callable[[Speed], bool]:
    return lambda s: s.weights == weights


def _times(mine: Speed, peer: Speed) -> str:
    ratio = mine.tokens_per_s.median / peer.tokens_per_s.median
    return f"{ratio:.2f}x as fast ({mine.name}, {mine.weights})"


def _named(s: Speed) -> str:
    return f"{s.name} ({s.weights})" if s.peer else s.name


def _per_round(s: Speed) -> str:
    return f"{s.counters['tokens_per_forward']:.2f}"


def _spread(figure: Figure) -> str:
    return "" if figure.spread is None else f"{figure.spread:.0%}"


def _same(agreement: Agreement | None) -> str:
    return "" if agreement is None else f"{agreement.same}/{agreement.prompts}"
