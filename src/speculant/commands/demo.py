"""`speculant demo`: the same text with speculation and without it."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import (
    BUNDLED,
    DraftModel,
    DraftName,
    Force,
    TargetName,
    Threads,
    Tree,
    Weights,
    load_pair,
    user_errors,
)


def demo(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    tree: Tree = None,
    force: Force = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a text.")] = 160,
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Show the same text with speculation and plainly, side by side."""
    with user_errors():
        usual = (None, "float32", "cpu", "auto")
        loaded = load_pair(target, draft, draft_model, *usual, threads, tree, force, weights)
        from ..demo import compare, show

        if not show(*loaded, compare(*loaded, max_tokens=max_tokens)):
            raise typer.Exit(1)
