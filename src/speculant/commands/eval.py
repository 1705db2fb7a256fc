"""`speculant eval`: how much of a draft the target accepts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import (
    BUNDLED,
    TREE_NODES,
    AsJson,
    Backend,
    Device,
    DraftModel,
    Dtype,
    Force,
    NumDraft,
    Rule,
    TargetName,
    Threads,
    Weights,
    check_rule,
    load_pair,
    user_errors,
)

if TYPE_CHECKING:
    from ..bench.acceptance import Evaluation, Setting
    from ..bench.questions import Question
    from ..drafts.base import Draft
    from ..target.base import Target

PICTURES = (".png", ".pdf", ".svg")


def evaluate(
    draft: Annotated[str, typer.Argument(help="The folder of a head, or the name of a draft.")],
    target: TargetName = BUNDLED,
    draft_model: DraftModel = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="JSONL with question_id, category, turns. Default: a built-in prompt a task.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions, spread evenly over the categories.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens an answer.")] = 128,
    num_draft_tokens: NumDraft = None,
    tree: Annotated[
        int | None,
        typer.Option(
            "--tree",
            help=f"Nodes of the tree; 0: a chain. Default: both, the tree of {TREE_NODES}.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", help="0 is greedy. Default: both 0 and 1.", show_default=False
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Questions answered at once.")] = 8,
    rule: Rule = "block",
    force: Force = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampled answers.")] = 0,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON here too.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture here (.png, .pdf or .svg).")
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    weights: Weights = "auto",
    threads: Threads = None,
) -> None:
    """Measure acceptance per position and per task: chain and tree, temperature 0 and 1."""
    with user_errors():
        from ..bench.questions import builtin_questions, read_questions, spread

        check_rule(rule)
        if limit is not None and limit < 1:
            raise ValueError(f"--limit is {limit}: it must be at least 1")
        common = {"max_tokens": max_tokens, "batch": batch, "rule": rule, "seed": seed}
        settings = plan(draft, temperature, tree, num_draft_tokens, common)
        check_outputs(out, plot)
        asked = read_questions(questions) if questions else builtin_questions()
        asked = spread(asked, limit)
        parts = {"dtype": dtype, "device": device, "backend": backend, "threads": threads,
                 "force": force, "weights": weights}  # fmt: skip
        loaded, pairs = load(settings, draft, target, draft_model, **parts)
        names = {
            "target": loaded.info.name,
            "draft": draft,
            "questions": str(questions) if questions else "built-in",
            "limit": limit,
            "dtype": dtype,
            "weights": loaded.info.weights or dtype,
            "device": device,
        }
        done = [run(loaded, made, asked, setting, names) for setting, made in pairs]
        report(done, draft, as_json, out, plot)


def plan(
    name: str,
    temperature: float | None,
    tree: int | None,
    num_draft_tokens: int | None,
    common: dict[str, Any],
) -> list[Setting]:
    """The passes to run: what was not chosen is run both ways. ValueError for what makes no sense."""
    from ..bench.acceptance import Setting
    from ..drafts import draft_options

    usual = draft_options(draft_kind(name)).get("tree")  # nodes; 0 is a chain, None no such choice
    trees: Sequence[int | None] = (None,)
    if isinstance(usual, int):
        trees = (usual,) if usual else (0, TREE_NODES)  # some draft trees only
    if tree is not None:
        if usual is None:
            raise ValueError(f"--tree is {tree}: draft {name!r} has no such choice, leave it out")
        if usual and not tree:
            raise ValueError(f"--tree is 0: draft {name!r} drafts trees only")
        trees = (tree,)
    temperatures = (0.0, 1.0) if temperature is None else (temperature,)
    return [Setting(t, nodes, num_draft_tokens, **common) for nodes in trees for t in temperatures]


def draft_kind(name: str) -> str:
    """The draft that a name or a head's folder stands for. ValueError for what is neither."""
    from ..drafts import NEEDS, bundled_head, find_draft

    kind, given = find_draft(name)
    if kind == "none":
        raise ValueError("draft none drafts nothing: there is nothing to evaluate")
    if kind in NEEDS and not given:
        bundled_head(NEEDS[kind], kind)
    return kind


def check_outputs(out: Path | None, plot: Path | None) -> None:
    """Refuse what could not be written in the end, before anything runs."""
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{flag} {path}: this is a folder: name a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
        try:  # access() says yes to root everywhere
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = error.strerror
            raise ValueError(f"{flag} {path}: no file can be written there ({reason})") from None
    if plot is not None:
        if plot.suffix.lower() not in PICTURES:
            raise ValueError(f"--plot {plot}: the name must end in {', '.join(PICTURES)}")
        if find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'speculant[bench]'")


def load(
    settings: Sequence[Setting], name: str, target: str, draft_model: str | None, **parts: Any
) -> tuple[Target, list[tuple[Setting, Draft]]]:
    """The target, and every setting with its draft: all of them before the first question runs.

    The settings come back with the depth that the draft takes where none was given.
    """
    from ..drafts import draft_options, load_draft

    given = settings[0].num_draft_tokens
    loaded, made = load_pair(
        target=target, draft=name, draft_model=draft_model, num_draft_tokens=given, **parts
    )
    most = loaded.info.context_length
    if given is not None and given > most:
        raise ValueError(f"--num-draft-tokens is {given}: the context holds {most}")
    options: dict[str, Any] = {} if given is None else {"num_draft_tokens": given}
    if parts["force"]:
        options["force"] = True
    drafts: dict[int | None, Draft] = {None: made, 0: made}
    for setting in settings:
        if setting.tree not in drafts:
            drafts[setting.tree] = load_draft(name, loaded, tree=setting.tree, **options)
    known = "num_draft_tokens" in draft_options(draft_kind(name))
    pairs = []
    for setting in settings:
        draft = drafts[setting.tree]
        depth = draft.info.depth if known and given is None else given
        pairs.append((replace(setting, num_draft_tokens=depth), draft))
    return loaded, pairs


def run(
    target: Target,
    draft: Draft,
    questions: Sequence[Question],
    setting: Setting,
    names: dict[str, Any],
) -> Evaluation:
    """One pass over the questions, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ..bench.evaluate import evaluate as measure

    console = Console(stderr=True)
    total = sum(len(question.turns) for question in questions)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("answers, {task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    # a bar that nobody watches would fill a log
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(setting.label, total=total, speed=0.0)
        began = time.perf_counter()

        def show(answers: int, tokens: int) -> None:
            bar.update(task, completed=answers, speed=tokens / (time.perf_counter() - began))

        return measure(target, draft, questions, setting, names, show)


def report(
    done: Sequence[Evaluation], name: str, json_only: bool, out: Path | None, plot: Path | None
) -> None:
    """Print the figures, write the files asked for, and warn on standard error."""
    from rich.console import Console

    from ..bench import eval_report

    results = [evaluation.as_dict() for evaluation in done]
    labels = [evaluation.setting.label for evaluation in done]
    title = f"{results[0]['settings']['target']} with {name}"
    text = json.dumps(eval_report.as_json(results))
    if json_only:
        typer.echo(text)
    else:
        eval_report.render(Console(highlight=False), title, labels, results)
    if out is not None:
        part = out.with_name(f".{out.name}.{os.getpid()}.part")
        try:
            part.write_text(text + "\n")
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)
    if plot is not None:
        eval_report.plot(plot, title, labels, results)
    loud = Console(stderr=True, highlight=False)
    for label, result in zip(labels, results, strict=True):
        for line in result["warnings"]:
            loud.print(f"WARNING ({label}): {line}", style="bold red", markup=False, soft_wrap=True)
