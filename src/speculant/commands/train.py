"""`speculant train` and `speculant data`: a draft built for its target."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import BUNDLED, AsJson, Device, TargetName, Threads, set_threads, user_errors

if TYPE_CHECKING:
    from ..pipeline.run import Watch
    from ..pipeline.settings import TrainSettings
    from ..target.base import Tokenizer

AnswerTokens = Annotated[
    int | None,
    typer.Option(
        "--answer-tokens",
        help="Data to make; of --data, how much to use. Default: 1.5 million, as --budget allows, "
        "or all of --data.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="JSONL with prompt, messages or conversations, or text, one a line. "
        "Default: the target writes its own requests.",
    ),
]
Answers = Annotated[
    str,
    typer.Option("--answers", help="target: it answers the prompts; given: the file's answers."),
]
Features = Annotated[
    str, typer.Option("--features", help="offline: states on disk; online: recomputed; auto.")
]
Rows = Annotated[int, typer.Option("--rows", help="Requests answered at once.")]
Seed = Annotated[int, typer.Option("--seed", help="Of data, order and first values.")]
UNLIMITED = 10**12  # answer tokens, where the time is the limit


def train(
    kind: Annotated[str, typer.Argument(help="eagle3, medusa, eagle1 or vanilla.")],
    target: TargetName = BUNDLED,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the head. Default: heads/KIND.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Time for all of it: 20m, 3h. Sizes follow from it."),
    ] = None,
    answer_tokens: AnswerTokens = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the data.")] = 2.0,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Folder of shards to train on instead; repeatable."),
    ] = None,
    prompts: Prompts = None,
    answers: Answers = "target",
    features: Features = "auto",
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size",
            help="Most frequent answer tokens that are drafted. Default: 8192, or --init's.",
        ),
    ] = None,
    taps: Annotated[
        str | None, typer.Option("--taps", help="EAGLE-3: layers to read, as 2,15,27.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", help="EAGLE-3: positions of training-time test; 1: off.")
    ] = 5,
    single: Annotated[
        float, typer.Option("--single", help="EAGLE-3: share of the run that starts with one step.")
    ] = 0.5,
    copying: Annotated[
        bool,
        typer.Option(
            "--copying/--no-copying",
            help="EAGLE-3: attention heads that copy from the text so far.",
        ),
    ] = True,
    loss: Annotated[
        str, typer.Option("--loss", help="cross_entropy, overlap (acceptance itself) or mixed.")
    ] = "cross_entropy",
    heads: Annotated[int, typer.Option("--heads", help="Medusa: heads, one a position.")] = 4,
    layers: Annotated[int, typer.Option("--layers", help="vanilla: decoder layers.")] = 2,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate of AdamW.")] = 1e-3,
    ema: Annotated[float, typer.Option("--ema", help="Decay of averaged weights; 0: off.")] = 0.998,
    batch_answers: Annotated[
        int, typer.Option("--batch-answers", help="Answer tokens of a step, a process.")
    ] = 256,
    precision: Annotated[
        str, typer.Option("--precision", help="auto, bfloat16 (mixed) or float32.")
    ] = "auto",
    init: Annotated[
        str,
        typer.Option("--init", help="target: from its own weights; random; or a head's folder."),
    ] = "target",
    rows: Rows = 64,
    seed: Seed = 0,
    show_mask: Annotated[
        bool,
        typer.Option("--show-mask", help="Print one sample, the supervised part coloured; stop."),
    ] = False,
    as_json: AsJson = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train a draft for a target: requests, answers, features, training, selection; resumable."""
    with user_errors():
        from ..pipeline.settings import TrainSettings, check_options, parse_seconds, parse_taps

        seconds = parse_seconds(budget) if budget else None
        settings = TrainSettings(
            kind=kind,
            target=target,
            out=out or Path("heads") / kind,
            budget_s=seconds,
            answer_tokens=_wanted(answer_tokens, seconds, bool(data)),
            epochs=epochs,
            data=tuple(data or ()),
            prompts=prompts,
            answers=answers,
            features=features,
            draft_vocab_size=draft_vocab_size,
            taps=parse_taps(taps) if taps else None,
            steps=steps,
            single=single,
            copying=copying,
            loss=loss,
            heads=heads,
            layers=layers,
            lr=lr,
            ema=ema,
            batch_answers=batch_answers,
            precision=precision,
            device=device,
            init=init,
            rows=rows,
            seed=seed,
        )
        check_options(settings)
        set_threads(threads)
        if show_mask:
            show_one(settings)
            return
        from ..pipeline.run import train as run
        from ..train.settings import end_processes

        with watching() as watch:
            result = run(settings, shlex.join(["speculant", *sys.argv[1:]]), watch)
        end_processes()
        if as_json:
            typer.echo(json.dumps({**asdict(result), "out": str(settings.out)}))
        if not result.finished:
            typer.echo("interrupted; the same command goes on from here", err=True)
            raise typer.Exit(130)
        if not as_json:
            conditional = ", ".join(f"{c:.3f}" for c in result.conditional)
            typer.echo(
                f"{settings.out}: mean acceptance length {result.mean_acceptance_length:.2f} on "
                f"held-out answers, conditional acceptance {conditional}\n"
                f"curves: {settings.run / 'curves.png'}\n"
                f"try it: speculant eval {settings.out}"
            )


def data(
    folder: Annotated[Path, typer.Argument(help="Folder of the shards.")],
    target: TargetName = BUNDLED,
    answer_tokens: AnswerTokens = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Time: 20m, 3h.")] = None,
    prompts: Prompts = None,
    answers: Answers = "target",
    features: Features = "auto",
    begun: Annotated[
        float | None,
        typer.Option("--begun", help="Share of requests that begin with a task and a random word."),
    ] = None,
    documents: Annotated[
        float | None,
        typer.Option(
            "--documents", help="Share of the others that become a long text and its task."
        ),
    ] = None,
    long: Annotated[
        float | None,
        typer.Option(
            "--long", help="Share of the others that become conversations up to the context."
        ),
    ] = None,
    turns: Annotated[
        float | None, typer.Option("--turns", help="Share of the others that go on for more turns.")
    ] = None,
    rows: Rows = 64,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Make training data alone, to train several drafts on; the same command goes on with it."""
    with user_errors():
        import time

        from ..pipeline.settings import TrainSettings, parse_seconds

        seconds = parse_seconds(budget) if budget else None
        settings = TrainSettings(
            kind="eagle3",
            target=target,
            out=folder,
            answer_tokens=_wanted(answer_tokens, seconds),
            prompts=prompts,
            answers=answers,
            features=features,
            begun=begun,
            documents=documents,
            long=long,
            turns=turns,
            rows=rows,
            device=device,
            seed=seed,
        )
        set_threads(threads)
        from ..pipeline.run import gather, load_for_data

        deadline = time.monotonic() + seconds if seconds else None
        loaded = load_for_data(target, device)
        with watching() as watch:
            paths = gather(settings, loaded, folder, deadline, watch)
        typer.echo(f"{folder}: {len(paths)} shards")


def _wanted(answer_tokens: int | None, seconds: float | None, given: bool = False) -> int:
    """Answer tokens to make, or to use of data that is given, where the user does not say."""
    if answer_tokens is not None:
        return answer_tokens
    return 1_500_000 if seconds is None and not given else UNLIMITED


def show_one(settings: TrainSettings) -> None:
    """Print one sample: supervised tokens green, the others dim."""
    from rich.console import Console
    from rich.text import Text

    from ..pipeline.run import one_sample

    sample, tokenizer = one_sample(settings)
    text = Text(_text(tokenizer, sample.prompt), style="dim")
    text.append(_text(tokenizer, sample.answer), style="bold green")
    Console(soft_wrap=True).print(text)
    total = len(sample.prompt) + len(sample.answer)
    typer.echo(f"\n{len(sample.answer)} of {total} tokens are supervised: the assistant's (green)")


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of ids with special tokens, where the tokenizer can show them."""
    backend: Any = getattr(tokenizer, "backend", None)
    if backend is not None:
        return str(backend.decode(list(ids), skip_special_tokens=False))
    return tokenizer.decode(ids)


@contextmanager
def watching() -> Iterator[Watch]:
    """Progress on stderr: bars on a terminal, a line a minute elsewhere."""
    from ..pipeline.progress import Display

    with Display() as display:
        yield display.watch
