"""`speculant check`: the proof that a pair, or a server, samples from the target's distribution."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..options import (
    BUNDLED,
    AsJson,
    Backend,
    Device,
    DraftModel,
    DraftName,
    Dtype,
    Force,
    NumDraft,
    Rule,
    TargetName,
    Threads,
    Tree,
    Weights,
    check_rule,
    load_pair,
    user_errors,
)


def check(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    rule: Rule = "block",
    samples: Annotated[
        int | None,
        typer.Option("--samples", help="To draw. Default: 50,000; of an endpoint 1,500."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 0,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Check a server (OpenAI's API) instead, by its address."),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option("--endpoint-model", help="The target, as the server calls it.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="--endpoint: the same without speculation.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="--endpoint: of its samples.")
    ] = 1.0,
    as_json: AsJson = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Prove on this machine that a pair, or a server, samples from the target's distribution."""
    with user_errors():
        check_rule(rule)
        from .endpoint import check_endpoint, refuse_draft_options

        if endpoint is not None:
            refuse_draft_options(
                draft=draft != "ngram", draft_model=draft_model, num_draft_tokens=num_draft_tokens,
                tree=tree is not None, force=force, rule=rule != "block",
            )  # fmt: skip
            asked = (endpoint, endpoint_model, baseline, target, samples, temperature, seed)
            check_endpoint(*asked, as_json, dtype, device, backend, threads)
            return
        if endpoint_model or baseline or temperature != 1:
            raise ValueError("--endpoint-model, --baseline and --temperature go with --endpoint")
        loaded = load_pair(
            target,
            draft,
            draft_model,
            num_draft_tokens,
            dtype,
            device,
            backend,
            threads,
            tree,
            force,
            weights,
        )
        from rich.console import Console

        from ..check import run_checks

        with Console(stderr=True).status("starting") as status:
            report = run_checks(
                *loaded,
                samples=50_000 if samples is None else samples,
                seed=seed,
                rule=rule,
                depth=num_draft_tokens,
                progress=status.update,
            )
        typer.echo(json.dumps(report.as_dict()) if as_json else report.render())
        if not report.passed:
            raise typer.Exit(1)
