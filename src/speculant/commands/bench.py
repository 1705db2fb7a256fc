"""`speculant bench`: this machine's speed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..options import BUNDLED, AsJson, TargetName, Threads, Weights, set_threads, user_errors


def bench(
    target: TargetName = BUNDLED,
    drafts: Annotated[
        str,
        typer.Option(
            "--drafts",
            help="By commas: names or folders of heads; NAME:NODES a tree, NAME@N so deep, NAME@auto "
            "as deep as pays.",
        ),
    ] = "ngram,lookahead,eagle3@2,eagle3@auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a prompt.")] = 96,
    runs: Annotated[int, typer.Option("--runs", help="Measured runs, after a warm-up.")] = 3,
    peers: Annotated[bool, typer.Option(help="Compare with transformers' generate.")] = True,
    weights: Weights = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: speed against plain and transformers, t(k), loop time, memory."""
    with user_errors():
        if runs < 1 or max_tokens < 2:
            raise ValueError("--runs must be at least 1 and --max-tokens at least 2")
        names = [name.strip() for name in drafts.split(",")]
        for name in names:
            _check(name)
        set_threads(threads)
        from rich.console import Console

        from ..bench.measure import measure_core, render

        with Console(stderr=True).status("starting") as status:
            report = measure_core(
                target, names, max_tokens, runs, peers, status.update, weights or ""
            )
        typer.echo(json.dumps(report.as_dict()) if as_json else render(report))


def _check(spec: str) -> None:
    """Raise ValueError for a contender that is none: see `bench.measure.drafted`."""
    from ..bench.measure import parse_contender
    from ..drafts import draft_options
    from .eval import draft_kind

    try:
        name, nodes, _ = parse_contender(spec)
        kind = draft_kind(name)
    except ValueError as error:
        raise ValueError(f"--drafts {spec!r}: {error}") from None
    if nodes and "tree" not in draft_options(kind):
        raise ValueError(f"--drafts {spec!r}: a number of nodes goes with medusa and EAGLE drafts")
