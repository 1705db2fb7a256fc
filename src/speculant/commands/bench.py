"""`speculant bench`: this machine's speed, under every setting that is asked for."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import BUNDLED, AsJson, TargetName, Threads, set_threads, user_errors

if TYPE_CHECKING:
    from ..bench.grid import Plan
    from ..bench.measure import Report

WRITTEN = (".json", ".md")


def bench(
    context: typer.Context,
    target: TargetName = BUNDLED,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions", help="JSONL as for eval. Default: 80 of our own over ten tasks."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            help="Questions, spread evenly over the categories. Default: one a category.",
            show_default=False,
        ),
    ] = None,
    drafts: Annotated[
        str,
        typer.Option(
            "--drafts",
            help="By commas: names or folders of heads; NAME:NODES a tree, NAME@N so deep, NAME@auto "
            "as deep as pays.",
        ),
    ] = "ngram,lookahead,eagle3@2,eagle3@auto,ngram+eagle3@auto",
    temperatures: Annotated[
        str, typer.Option("--temperature", "-t", help="By commas; 0 is greedy.")
    ] = "0",
    batches: Annotated[
        str, typer.Option("--batches", help="By commas: questions answered together.")
    ] = "1",
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="By commas, what the target's matrices are rounded to: float32, bfloat16, int8, "
            "int4; file: the integers of its GGUF file; -a8 behind a name rounds activations to int8 "
            "too. Default: float32.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens an answer.")] = 96,
    runs: Annotated[int, typer.Option("--runs", help="Measured runs, after a warm-up.")] = 3,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            help="By commas: other decoders to measure beside; none. Default: all that are found.",
            show_default=False,
        ),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="The same as --peers none.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", metavar="<path>", help="Write the report here too: .json or .md; repeatable."
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Folder to write pictures into.")
    ] = None,
) -> None:
    """Measure this machine: strategies x temperatures x batches x weights, and peers, in one run."""
    with user_errors():
        if peers is not None and no_peers:
            raise ValueError("--peers and --no-peers contradict each other: leave one out")
        _check_outputs(out or [], plots)
        from ..bench.grid import Plan

        asked_peers = None if peers is None else tuple(_words(peers))
        if no_peers or peers == "none":
            asked_peers = ()
        plan = Plan(
            drafts=tuple(_words(drafts)),
            temperatures=_numbers("--temperature", temperatures, float),
            batches=_numbers("--batches", batches, int),
            weights=tuple(_words(weights)) if weights is not None else ("",),
            max_tokens=max_tokens,
            runs=runs,
            limit=limit,
            peers=asked_peers,
        )
        _check(plan)
        set_threads(threads)
        from ..bench.questions import BUNDLED as OWN
        from ..bench.questions import read_questions

        asked = read_questions(questions or OWN)
        from rich.console import Console

        from ..bench.measure import measure

        source = questions.name if questions else "the bundled ones"
        command = command_line(context.params)
        with Console(stderr=True).status("starting") as status:
            report = measure(target, plan, asked, source, command, status.update)
        show(report, as_json, out or [], plots)


def show(report: Report, as_json: bool, out: list[Path], plots: Path | None) -> None:
    """Print the report, and write the files that were asked for."""
    from rich.console import Console

    from ..bench import speed_plots, speed_report

    data = json.dumps(report.as_dict())
    for path in out:
        text = speed_report.markdown(report) if path.suffix == ".md" else data + "\n"
        _write(path, text)
    if as_json:
        typer.echo(data)
    else:
        speed_report.render(Console(highlight=False), report)
    for path in out:
        typer.echo(f"written: {path}", err=True)
    if plots is not None:
        for path in speed_plots.plots(plots, report):
            typer.echo(f"written: {path}", err=True)


def command_line(params: dict[str, Any]) -> str:
    """A command with every option that it was given or that it took, as a shell reads it."""
    words = ["speculant", "bench"]
    names = {"as_json": "json", "temperatures": "temperature"}
    for name, value in params.items():
        flag = "--" + names.get(name, name).replace("_", "-")
        if value is True:
            words.append(flag)
        elif value not in (None, False) and name not in ("out", "plots"):
            words += [flag, str(value)]
    return shlex.join(words)


def _check(plan: Plan) -> None:
    """Refuse drafts and weights that there are none of, before anything is loaded."""
    from ..bench.contenders import parse_contender
    from ..drafts import draft_options
    from ..target.load import WEIGHTS
    from .eval import draft_kind

    for spec in plan.drafts:
        try:
            name, nodes, _ = parse_contender(spec)
            kind = draft_kind(name)
        except ValueError as error:
            raise ValueError(f"--drafts {spec!r}: {error}") from None
        if nodes and "tree" not in draft_options(kind):
            raise ValueError(
                f"--drafts {spec!r}: a number of nodes goes with medusa and EAGLE drafts"
            )
    for weights in plan.weights:
        if weights and weights not in WEIGHTS:
            raise ValueError(f"--weights {weights!r}: must be one of {', '.join(WEIGHTS)}")


def _check_outputs(out: list[Path], plots: Path | None) -> None:
    """Refuse what could not be written in the end, before anything runs."""
    from .eval import check_outputs

    for path in out:
        if path.suffix not in WRITTEN:
            raise ValueError(f"--out {path}: the name must end in {' or '.join(WRITTEN)}")
        check_outputs(path, None)
    if plots is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--plots needs matplotlib: pip install matplotlib")
    try:
        plots.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=plots):  # access() says yes to root everywhere
            pass
    except OSError as error:
        raise ValueError(f"--plots {plots}: no folder to write into ({error.strerror})") from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in _words(text))
    except ValueError:
        raise ValueError(f"{flag} {text!r}: give numbers by commas, as 1,4") from None


def _write(path: Path, text: str) -> None:
    """To a temporary name beside the file, then renamed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
