"""`speculant profile`: what the tuner needs of a target, its drafts and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import (
    BUNDLED,
    AsJson,
    Backend,
    Device,
    Dtype,
    TargetName,
    Threads,
    Weights,
    set_threads,
    user_errors,
)

if TYPE_CHECKING:
    from ..cost.profile import Profile

ALL = "ngram,lookahead,vanilla,medusa,eagle1,eagle2,eagle3"


def profile(
    target: TargetName = BUNDLED,
    drafts: Annotated[
        str, typer.Option("--draft", "--drafts", help="Names or folders of heads, by commas.")
    ] = ALL,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("profile.json"),
    num_draft_tokens: Annotated[
        str, typer.Option("--num-draft-tokens", help="Lengths of chains, by commas.")
    ] = "2,3,5",
    trees: Annotated[
        str, typer.Option("--trees", help="Nodes of trees, by commas; empty: none.")
    ] = "16",
    temperatures: Annotated[
        str, typer.Option("--temperature", "-t", help="Of the answers, by commas.")
    ] = "0,1",
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes, by commas.")] = "1",
    questions: Annotated[
        Path | None,
        typer.Option("--questions", help="JSONL as for eval. Default: a built-in prompt a task."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions, spread evenly over the categories.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens an answer.")] = 96,
    context: Annotated[
        int, typer.Option("--context", help="Cached tokens behind a timed forward.")
    ] = 256,
    as_json: AsJson = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Measure t(batch, rows), the drafts' cost and their acceptance, for `speculant tune`."""
    with user_errors():
        from .eval import check_outputs

        check_outputs(out, None)
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"unknown dtype {dtype!r}: choose float32 or bfloat16")
        if limit is not None and limit < 1:
            raise ValueError(f"--limit is {limit}: it must be at least 1")
        chosen = {
            "drafts": _names(drafts),
            "depths": _numbers("--num-draft-tokens", num_draft_tokens, int),
            "trees": _numbers("--trees", trees, int) if trees.strip() else (),
            "temperatures": _numbers("--temperature", temperatures, float),
            "batches": _numbers("--batches", batches, int),
        }
        set_threads(threads)
        import torch
        from rich.console import Console

        from ..bench.profile import Plan, measure, predictions
        from ..bench.questions import builtin_questions, read_questions, spread
        from ..cost.profile import write_profile
        from ..target.load import load_target

        plan = Plan(**chosen, max_tokens=max_tokens, context=context)
        asked = spread(read_questions(questions) if questions else builtin_questions(), limit)
        parts: dict[str, Any] = {"device": device, "backend": backend, "weights": weights}
        loaded = load_target(target, dtype=getattr(torch, dtype), **parts)
        if context + 64 > loaded.info.context_length:
            raise ValueError(
                f"--context is {context}: the target holds {loaded.info.context_length}"
            )
        with Console(stderr=True).status("starting") as status:
            found, runs = measure(loaded, plan, asked, status.update)
        write_profile(found, out)
        table = predictions(found, runs)
        if as_json:
            typer.echo(json.dumps({"profile": found.as_dict(), "predictions": table}))
        else:
            render(found, table)
            typer.echo(f"profile written to {out}: name it under telemetry in a workload file")


def render(found: Profile, table: list[dict[str, Any]]) -> None:
    """Two tables: the target's forward, and every setting as measured and as predicted from it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    base = {t.batch: t.median_ms for t in found.forward_ms if t.rows == 1}
    forward = Table(title=f"{found.target.name}: t(batch, rows), {found.context_length} cached")
    for name in ("batch", "rows", "ms", "spread", "/ t(batch, 1)"):
        forward.add_column(name, justify="right")
    for t in found.forward_ms:
        cells = (t.batch, t.rows, f"{t.median_ms:.2f}", f"{t.spread_ms:.2f}")
        forward.add_row(*map(str, cells), f"{t.median_ms / base[t.batch]:.2f}")
    console.print(forward)
    speeds = Table(title="batch 1: tokens a second, as measured and as the latency model has it")
    names = ("draft", "N", "nodes", "temperature", "accepted length", "measured", "predicted")
    for name in (*names, "error"):
        speeds.add_column(name, justify="right" if name != "draft" else "left")
    for row in table:
        plain = row["draft"] == "none"
        speeds.add_row(
            "plain" if plain else row["draft"],
            "" if plain else str(row["num_draft_tokens"]),
            "" if plain else str(row["nodes"]),
            f"{row['temperature']:g}",
            "" if plain else f"{row['mean_acceptance_length']:.2f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['predicted_tokens_per_s']:.1f}",
            "" if row["error"] is None else f"{row['error']:+.1%}",
        )
    console.print(speeds)


def _names(text: str) -> tuple[str, ...]:
    """Drafts by commas, each a name or a head's folder. ValueError for none or for what is neither."""
    from .eval import draft_kind

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("--draft names no draft")
    for name in names:
        draft_kind(name)
    return names


def _numbers(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        values = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{flag} {text!r}: give numbers by commas, as 1,4") from None
    return values
