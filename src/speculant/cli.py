"""The command line. Subcommands only; everything heavy is imported inside them."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from .commands.bench import bench
from .commands.eval import evaluate
from .commands.train import data, train
from .options import (
    BUNDLED,
    AsJson,
    Backend,
    Bias,
    Commands,
    Device,
    DraftModel,
    DraftName,
    Dtype,
    Force,
    Frequency,
    IgnoreEos,
    Logprobs,
    MaxTokens,
    MinP,
    MinTokens,
    NumDraft,
    Presence,
    Raw,
    Repetition,
    Rule,
    Seed,
    ShowDraft,
    Stop,
    StopIds,
    System,
    TargetName,
    Temperature,
    Threads,
    TopK,
    TopP,
    Tree,
    check_prompt,
    check_rule,
    check_text,
    load_pair,
    message_for,
    parse_biases,
    resolve_temperature,
    user_errors,
)

app = typer.Typer(
    name="speculant",
    cls=Commands,
    help="Lossless speculative decoding: the target's own text, in fewer passes over its weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Lossless speculative decoding: the target's own text, in fewer passes over its weights."""
    if version:
        from . import __version__

        typer.echo(f"speculant {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="A user message; - reads it from standard input.")],
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    rule: Rule = "block",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_id: StopIds = None,
    logit_bias: Bias = None,
    ignore_eos: IgnoreEos = False,
    seed: Seed = None,
    logprobs: Logprobs = None,
    system: System = None,
    raw: Raw = False,
    as_json: AsJson = False,
    show_draft: ShowDraft = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Generate text for one prompt."""
    with user_errors():
        from .sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=resolve_temperature(temperature, top_k, top_p, min_p, seed),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            logit_bias=parse_biases(logit_bias or []),
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
        )
        options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "rule": check_rule(rule)}
        text = sys.stdin.read() if prompt == "-" else prompt
        check_prompt(text, system, raw)
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
        )
        message = message_for(loaded[0], text, system, raw)
        if as_json:
            from .engine import generate as run

            out = run(*loaded, message, params, **options)
            path = "greedy" if params.greedy else "sampled"
            names = {"target": loaded[0].info.name, "draft": draft, "decoding": path, "rule": rule}
            typer.echo(json.dumps(out.as_dict() | names))
        else:
            from .chat import print_pieces
            from .engine import stream

            pieces = stream(*loaded, message, params, **options)
            print_pieces(loaded[0], params, pieces, show_draft)
            typer.echo()


@app.command()
def chat(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    show_draft: ShowDraft = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Talk to the target. /reset forgets, /stats counts, /exit leaves."""
    with user_errors():
        from .sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=resolve_temperature(temperature, top_k, top_p, 0.0, seed),
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        check_text("--system", system or "")
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
        )
        from .chat import converse

        converse(*loaded, params, system, num_draft_tokens, show_draft)


@app.command()
def check(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    tree: Tree = None,
    force: Force = False,
    rule: Rule = "block",
    samples: Annotated[int, typer.Option("--samples", help="Samples to draw.")] = 50_000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 0,
    as_json: AsJson = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Prove on this machine that the pair samples from the target's distribution."""
    with user_errors():
        check_rule(rule)
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
        )
        from rich.console import Console

        from .check import run_checks

        with Console(stderr=True).status("starting") as status:
            report = run_checks(
                *loaded,
                samples=samples,
                seed=seed,
                rule=rule,
                depth=num_draft_tokens,
                progress=status.update,
            )
        typer.echo(json.dumps(report.as_dict()) if as_json else report.render())
        if not report.passed:
            raise typer.Exit(1)


@app.command()
def demo(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    tree: Tree = None,
    force: Force = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a text.")] = 160,
    threads: Threads = None,
) -> None:
    """Show the same text with speculation and plainly, side by side."""
    with user_errors():
        usual = (None, "float32", "cpu", "auto")
        loaded = load_pair(target, draft, draft_model, *usual, threads, tree, force)
        from .demo import compare, show

        if not show(*loaded, compare(*loaded, max_tokens=max_tokens)):
            raise typer.Exit(1)


app.command()(bench)
app.command("eval")(evaluate)
app.command()(train)
app.command()(data)


def main() -> None:
    """Entry point of the `speculant` command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed: as if from /dev/null
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
