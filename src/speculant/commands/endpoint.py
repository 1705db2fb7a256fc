"""`speculant check --endpoint`: a server against the target, computed here."""

from __future__ import annotations

import json

import typer

from ..options import set_threads

SAMPLES = 1500


def check_endpoint(
    url: str,
    model: str | None,
    baseline: str | None,
    target: str,
    samples: int | None,
    temperature: float,
    seed: int,
    as_json: bool,
    dtype: str,
    device: str,
    backend: str,
    threads: int | None,
) -> None:
    """Run the checks and print the report; exit code 1 when one failed."""
    import torch
    from rich.console import Console

    from ..check.client import Endpoint
    from ..check.endpoint import run_endpoint_checks
    from ..target.load import load_target

    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {dtype!r}: choose float32 or bfloat16")
    set_threads(threads)
    loaded = load_target(target, dtype=getattr(torch, dtype), device=device, backend=backend)  # type: ignore[arg-type]
    server = Endpoint(url, loaded.tokenizer, model)
    other = None if baseline is None else Endpoint(baseline, loaded.tokenizer)
    count = SAMPLES if samples is None else samples
    with Console(stderr=True).status("starting") as status:
        report = run_endpoint_checks(loaded, server, other, count, temperature, seed, status.update)
    typer.echo(json.dumps(report.as_dict()) if as_json else report.render())
    if not report.passed:
        raise typer.Exit(1)


def refuse_draft_options(**given: object) -> None:
    """ValueError for an option of the local check: a server has its own draft."""
    for name, value in given.items():
        if value:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} goes with a local pair: an endpoint has its own draft")
