"""`speculant bench`: this machine's speed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..options import BUNDLED, AsJson, TargetName, Threads, set_threads, user_errors


def bench(
    target: TargetName = BUNDLED,
    drafts: Annotated[str, typer.Option("--drafts", help="Comma-separated.")] = "ngram,lookahead",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a prompt.")] = 96,
    runs: Annotated[int, typer.Option("--runs", help="Measured runs, after a warm-up.")] = 3,
    peers: Annotated[bool, typer.Option(help="Compare with transformers' generate.")] = True,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: speed against plain and transformers, t(k), loop time, memory."""
    with user_errors():
        if runs < 1 or max_tokens < 2:
            raise ValueError("--runs must be at least 1 and --max-tokens at least 2")
        from ..drafts import DRAFTS

        names = [name.strip() for name in drafts.split(",")]
        for name in names:
            if name not in DRAFTS or name == "none":
                known = ", ".join(n for n in DRAFTS if n != "none")
                raise ValueError(f"--drafts: unknown draft {name!r}: choose from {known}")
        set_threads(threads)
        from rich.console import Console

        from ..bench.measure import measure_core, render

        with Console(stderr=True).status("starting") as status:
            report = measure_core(target, names, max_tokens, runs, peers, status.update)
        typer.echo(json.dumps(report.as_dict()) if as_json else render(report))
