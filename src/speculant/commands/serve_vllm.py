"""`speculant serve --engine vllm`: our target and head, served by vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer

SHARED = {
    "target", "draft", "draft_model", "num_draft_tokens", "tree", "force", "host", "port", "api_key",
    "allow_public", "name", "engine", "dry_run", "dtype", "help",
}  # fmt: skip
"""Parameters of `serve` that mean something to vLLM too."""


def check_flags(context: typer.Context) -> None:
    """Raise ValueError for a flag of our engine: vLLM would not see it, and it would be ignored."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source and source.name == "COMMANDLINE" and parameter.name not in SHARED:
            flag = parameter.opts[0]
            raise ValueError(f"{flag} is our engine's: leave it out, or give vLLM's own flag")


@dataclass(frozen=True)
class Wish:
    """The options of `serve` that say what drafts."""

    draft: str
    draft_model: str | None
    num_draft_tokens: int | None
    tree: int | None
    dtype: str
    force: bool


def serve_with_vllm(
    target: str,
    wish: Wish,
    access: tuple[str, int, str | None, bool],
    name: str | None,
    more: list[str],
    dry_run: bool,
) -> None:
    """Run vLLM in this process's place, or print how it would be run.

    access: host, port, API key, and whether a public address may do without one
    more:   vLLM's own flags
    """
    from ..serve.launch import plan, run, speculative_config
    from ..serve.settings import Settings
    from ..target.load import resolve

    host, port, key, public = access
    Settings(model_name="vllm", host=host, port=port, api_key=key, allow_public=public)
    folder = str(resolve(target)[0])
    draft = exported(target, wish)
    config = speculative_config(draft, wish.draft_model, wish.num_draft_tokens, wish.tree)
    flags = ["--served-model-name", name or target, "--dtype", wish.dtype, *more]
    launch = plan(folder, config, host, port, key, flags, installed=not dry_run)
    if dry_run:
        typer.echo(json.dumps({"command": launch.command, "speculative_config": config}))
        return
    typer.echo(launch.shown(), err=True)
    run(launch)


def exported(target: str, wish: Wish) -> str:
    """The draft as vLLM takes it: one of our heads is written in its format, into the cache."""
    from ..drafts import COPYING, DRAFTS
    from ..heads.weights import head_kind, is_head

    if wish.draft in ("lookahead", "eagle1-tree", "eagle2") or wish.draft.startswith(COPYING):
        raise ValueError(f"--draft {wish.draft}: vLLM has no such method; try eagle1 or ngram")
    bundled = wish.draft in ("eagle3", "eagle1", "medusa")
    if not bundled and (wish.draft in DRAFTS or not is_head(Path(wish.draft))):
        return wish.draft
    import torch

    from ..export.parts import Wanted
    from ..export.writing import export_head, find_layout
    from ..heads.weights import check_target, load_head
    from ..serve.launch import DEPTH
    from ..target.convert import cache_folder
    from .export import find_head
    from .lend import lend

    folder = find_head(wish.draft)
    kind = head_kind(folder)
    find_layout("vllm", kind)
    head, lent = load_head(folder), lend(target, ends=kind in ("medusa", "vanilla"))
    if not wish.force:
        check_target(head, lent.fingerprint, target)
    out = cache_folder() / "exports" / f"vllm-{kind}-{folder.resolve().name}-{wish.dtype}"
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, wish.dtype)
    wanted = Wanted(out, lent.parts, dtype, wish.num_draft_tokens or DEPTH)
    export_head("vllm", head, wanted, lambda written: _checked(written, out, wish.force))
    return str(out)


def _checked(written: Path, out: Path, force: bool) -> None:
    from .export import check_written

    check_written(written, out, force)
