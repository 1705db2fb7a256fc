"""`speculant serve`: an OpenAI-compatible server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import (
    BUNDLED,
    Backend,
    Device,
    DraftModel,
    DraftName,
    Dtype,
    Force,
    IsAdaptive,
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

if TYPE_CHECKING:
    from ..drafts.base import Draft
    from ..serve.settings import Settings
    from ..target.base import Target

NEEDS = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance")
CONTEXT = 4096
ENGINES = ("speculant", "vllm")


def serve(
    context: typer.Context,
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    adaptive: IsAdaptive = False,
    offer: Annotated[
        list[str] | None,
        typer.Option("--offer", help="Another draft for requests to choose, NAME or NAME:NODES."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="SPECULANT_API_KEY", help="What requests must bring."),
    ] = None,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="A public address without a key.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in the API; default: its own.")
    ] = None,
    max_rows: Annotated[int, typer.Option("--max-rows", help="Answers that run at once.")] = 8,
    max_queue: Annotated[int, typer.Option("--max-queue", help="Answers that may wait.")] = 64,
    context_length: Annotated[
        int, typer.Option("--context", help="Most tokens of prompt and output.")
    ] = CONTEXT,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds to a request's last token.")
    ] = 600.0,
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", help="Seconds to finish after SIGTERM.")
    ] = 60.0,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", help="Longest request.")] = 1
    << 20,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="A value that a request's `task` may have; repeatable."),
    ] = None,
    prefix_reuse: Annotated[
        bool, typer.Option(help="Keep the cache for a conversation's next turn.")
    ] = True,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the log.")
    ] = False,
    rule: Rule = "block",
    engine: Annotated[
        str, typer.Option("--engine", help="speculant, or vllm: its flags may follow.")
    ] = "speculant",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="vllm: print the command, and run nothing.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Serve the target over OpenAI's API, with speculation, metrics and a page to watch it."""
    with user_errors():
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}: choose {' or '.join(ENGINES)}")
        if engine == "vllm":
            from .serve_vllm import Wish, check_flags, serve_with_vllm

            check_flags(context)
            wish = Wish(draft, draft_model, num_draft_tokens, tree, dtype, force)
            access = (host, port, api_key, allow_public)
            serve_with_vllm(target, wish, access, name, context.args, dry_run)
            return
        if context.args:
            raise ValueError(f"no such option or argument: {context.args[0]}")
        if dry_run:
            raise ValueError("--dry-run goes with --engine vllm")
        check_extra()
        check_rule(rule)
        for flag, number in (("--max-rows", max_rows), ("--context", context_length)):
            if number < 1:
                raise ValueError(f"{flag} is {number}: it must be at least 1")
        from ..serve.settings import Settings

        settings = Settings(
            model_name=name or "pending",
            host=host,
            port=port,
            api_key=api_key,
            allow_public=allow_public,
            max_queue=max_queue,
            max_body_bytes=max_body_bytes,
            request_timeout_s=request_timeout,
            shutdown_timeout_s=shutdown_timeout,
            tasks=tuple(task or ()),
            log_prompts=log_prompts,
        )
        offers = [parse_offer(each) for each in offer or ()]
        pair = load_pair(
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
        shape = {
            "max_rows": max_rows,
            "capacity": context_length,
            "num_draft_tokens": num_draft_tokens,
            "rule": rule,
            "adaptive": adaptive,
            "reuse": prefix_reuse,
        }
        start(pair, draft, offers, settings, name, shape)


def check_extra() -> None:
    """Raise ValueError, saying what to install, where a library of the server is missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: pip install 'speculant[serve]'")


def parse_offer(text: str) -> tuple[str, str, dict[str, Any]]:
    """`--offer` as (name in the API, draft, options): "eagle3:32" is EAGLE-3 with a tree of 32."""
    from ..drafts import draft_options, find_draft

    draft, _, nodes = text.partition(":")
    find_draft(draft)
    if not nodes:
        return text, draft, {}
    if not nodes.isdigit() or "tree" not in draft_options(find_draft(draft)[0]):
        raise ValueError(f"--offer {text}: a number of nodes goes with medusa and the EAGLE drafts")
    return text, draft, {"tree": int(nodes)}


def start(
    pair: tuple[Target, Draft],
    draft: str,
    offers: list[tuple[str, str, dict[str, Any]]],
    settings: Settings,
    name: str | None,
    shape: dict[str, Any],
) -> None:
    """Load what is offered beside the pair's draft, and serve until SIGTERM or Ctrl-C."""
    from dataclasses import replace
    from pathlib import Path

    from ..drafts import DRAFTS, load_draft
    from ..serve.build import build_service
    from ..serve.run import serve as run

    target, made = pair
    # a folder is known by its last name: a path is nobody's business outside
    drafts = {draft if draft in DRAFTS else Path(draft).resolve().name: made}
    for label, kind, options in (*offers, ("ngram", "ngram", {}), ("none", "none", {})):
        shown = label if kind in DRAFTS else Path(label).name
        if shown not in drafts:
            drafts[shown] = load_draft(kind, target, **options)
    settings = replace(settings, model_name=name or target.info.name)
    service = build_service(target, drafts, settings, **shape)

    def say(url: str) -> None:
        typer.echo(f"{settings.model_name} at {url} (OpenAI's API: {url}/v1)")

    run(service, say)
