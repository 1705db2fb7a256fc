"""The command line. Subcommands only; everything heavy is imported inside them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .drafts.base import Draft
    from .request import Piece
    from .sampling import SamplingParams
    from .target.base import Target

BUNDLED = "smollm2-135m-instruct"
MAX_THREADS = 1024

app = typer.Typer(
    name="speculant",
    help="Lossless speculative decoding: the target's own text, in fewer passes over its weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TargetName = Annotated[
    str, typer.Option("--target", help=f"{BUNDLED}, a folder, a hub id, or a .gguf file.")
]
DraftName = Annotated[str, typer.Option("--draft", help="ngram, lookahead, vanilla or none.")]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", help="vanilla: the smaller model, as for --target.")
]
NumDraft = Annotated[
    int | None, typer.Option("--num-draft-tokens", "-n", help="Tokens to draft a round.")
]
Rule = Annotated[str, typer.Option("--rule", help="Rule for sampled chains: block or token.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Backend = Annotated[str, typer.Option("--backend", help="auto, llama (ours) or hf (transformers).")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; default: torch's.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        help="0 is greedy. Default: 0, but 1 when --top-k, --top-p, --min-p or --seed is given.",
        show_default=False,
    ),
]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest mass, in (0, 1].")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens of this share of the likeliest.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Over prompt and output.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Over the output, once.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="Per occurrence.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", help="No end before this many tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends; repeatable.")]
StopIds = Annotated[list[int] | None, typer.Option("--stop-token-id", help="Repeatable.")]
Bias = Annotated[list[str] | None, typer.Option("--logit-bias", help="ID=NUMBER; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after EOS.")]
Seed = Annotated[int | None, typer.Option("--seed", help="0 .. 2**63 - 1; default: a new one.")]
Logprobs = Annotated[int | None, typer.Option("--logprobs", help="Alternatives a token (--json).")]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
ShowDraft = Annotated[
    bool, typer.Option("--show-draft", help="Colour tokens: accepted, recovered, bonus.")
]


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
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    as_json: AsJson = False,
    show_draft: ShowDraft = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Generate text for one prompt."""
    with _errors():
        from .sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=_temperature(temperature, top_k, top_p, min_p, seed),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            logit_bias=_biases(logit_bias or []),
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
        )
        options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "rule": _rule(rule)}
        text = sys.stdin.read() if prompt == "-" else prompt
        _check_prompt(text, system, raw)
        loaded = _load(
            target, draft, draft_model, num_draft_tokens, dtype, device, backend, threads
        )
        message = _prompt(loaded[0], text, system, raw)
        if as_json:
            from .engine import generate as run

            out = run(*loaded, message, params, **options)
            typer.echo(json.dumps(out.as_dict() | {"draft": draft, "target": loaded[0].info.name}))
        else:
            _print_stream(*loaded, message, params, options, show_draft)


@app.command()
def chat(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
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
    with _errors():
        from .sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=_temperature(temperature, top_k, top_p, 0.0, seed),
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        _check_text("--system", system or "")
        loaded = _load(
            target, draft, draft_model, num_draft_tokens, dtype, device, backend, threads
        )
        from .chat import converse

        converse(*loaded, params, system, num_draft_tokens, show_draft)


@app.command()
def check(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    num_draft_tokens: NumDraft = None,
    rule: Rule = "block",
    samples: Annotated[
        int, typer.Option("--samples", help="Speculative samples to draw.")
    ] = 50_000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 0,
    as_json: AsJson = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Prove on this machine that the pair samples from the target's distribution."""
    with _errors():
        _rule(rule)
        loaded = _load(
            target, draft, draft_model, num_draft_tokens, dtype, device, backend, threads
        )
        from .check import run_checks

        report = run_checks(*loaded, samples=samples, seed=seed, rule=rule, depth=num_draft_tokens)
        typer.echo(json.dumps(report.as_dict()) if as_json else report.render())
        if not report.passed:
            raise typer.Exit(1)


@app.command()
def demo(
    target: TargetName = BUNDLED,
    draft: DraftName = "ngram",
    draft_model: DraftModel = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a text.")] = 160,
    threads: Threads = None,
) -> None:
    """Show the same text with speculation and plainly, side by side."""
    with _errors():
        loaded = _load(target, draft, draft_model, None, "float32", "cpu", "auto", threads)
        from .demo import compare, show

        if not show(*loaded, compare(*loaded, max_tokens=max_tokens)):
            raise typer.Exit(1)


@app.command()
def bench(
    target: TargetName = BUNDLED,
    drafts: Annotated[str, typer.Option("--drafts", help="Comma-separated.")] = "ngram,lookahead",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens a prompt.")] = 96,
    runs: Annotated[int, typer.Option("--runs", help="Measured runs, after a warm-up.")] = 3,
    peers: Annotated[bool, typer.Option(help="Compare with transformers' generate.")] = True,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: speed against plain and transformers, t(k), loop time, memory."""
    with _errors():
        if runs < 1 or max_tokens < 2:
            raise ValueError("--runs must be at least 1 and --max-tokens at least 2")
        from .drafts import DRAFTS

        names = [name.strip() for name in drafts.split(",")]
        for name in names:
            if name not in DRAFTS or name == "none":
                known = ", ".join(n for n in DRAFTS if n != "none")
                raise ValueError(f"--drafts: unknown draft {name!r}: choose from {known}")
        _set_threads(threads)
        from rich.console import Console

        from .bench.measure import measure_core, render

        with Console(stderr=True).status("starting") as status:
            report = measure_core(target, names, max_tokens, runs, peers, status.update)
        typer.echo(json.dumps(report.as_dict()) if as_json else render(report))


def _temperature(
    given: float | None, top_k: int, top_p: float, min_p: float, seed: int | None
) -> float:
    """Asking for sampling without a temperature means temperature 1, never silently greedy."""
    if given is not None:
        return given
    return 1.0 if top_k or top_p != 1 or min_p or seed is not None else 0.0


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    out = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            out[int(token)] = float(value)
        except ValueError:
            raise ValueError(
                f"--logit-bias {pair!r}: give it as ID=NUMBER, such as 42=-1.5"
            ) from None
    return out


def _load(
    target: str,
    draft: str,
    draft_model: str | None,
    num_draft_tokens: int | None,
    dtype: str,
    device: str,
    backend: str,
    threads: int | None,
) -> tuple[Target, Draft]:
    """Load the pair; everything that can be refused cheaply is refused before the target loads."""
    from .drafts import DRAFTS, load_draft

    if draft not in DRAFTS:
        raise ValueError(f"unknown draft {draft!r}: choose one of {', '.join(DRAFTS)}")
    if draft_model is not None and draft != "vanilla":
        raise ValueError(f"--draft-model goes with --draft vanilla, not with {draft}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {dtype!r}: choose float32 or bfloat16")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose cpu or cuda")
    if num_draft_tokens is not None and num_draft_tokens < 0:
        raise ValueError(f"--num-draft-tokens is {num_draft_tokens}: it must be at least 0")
    _set_threads(threads)
    import torch

    from .target.load import load_target

    parts = {"dtype": getattr(torch, dtype), "device": device, "backend": backend}
    loaded = load_target(target, **parts)
    options: dict[str, Any] = {}
    if draft_model is not None:
        options["model"] = load_target(draft_model, **parts)
    count, most = num_draft_tokens or 0, loaded.info.context_length
    if count and draft in ("ngram", "vanilla"):
        options["num_draft_tokens"] = min(count, most)
    made = load_draft(draft, loaded, **options)
    most = min(most, made.info.max_nodes or most)  # the draft none takes any number
    if count > most:
        raise ValueError(f"--num-draft-tokens is {count}: {draft} drafts at most {most} here")
    return loaded, made


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads is {threads}: it must be between 1 and {MAX_THREADS}")
    import torch

    torch.set_num_threads(threads)


def _rule(name: str) -> str:
    if name not in ("block", "token"):
        raise ValueError(f"unknown rule {name!r}: choose block or token")
    return name


def _check_text(name: str, text: str) -> None:
    """Bytes that are not UTF-8 reach Python as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None


def _check_prompt(text: str, system: str | None, raw: bool) -> None:
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one character")
    if raw and system is not None:
        raise ValueError("--system needs the chat template: leave out --raw")
    _check_text("the prompt", text)
    _check_text("--system", system or "")


def _prompt(target: Target, text: str, system: str | None, raw: bool) -> Any:
    if raw:
        return target.tokenizer.encode(text)
    if system is not None:
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return text


def _print_stream(
    target: Target,
    draft: Draft,
    message: Any,
    params: SamplingParams,
    options: dict[str, Any],
    show_draft: bool,
) -> None:
    from .chat import print_pieces
    from .engine import stream

    pieces: Iterator[Piece] = stream(target, draft, message, params, **options)
    print_pieces(target, params, pieces, show_draft)
    sys.stdout.write("\n")


@contextmanager
def _errors() -> Iterator[None]:
    """A user's mistake is one line and exit code 2, a failure one line and 1, Ctrl-C 130."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None
    except typer.Exit:
        raise
    except _expected() as error:
        line = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"speculant: {line}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _expected() -> tuple[type[BaseException], ...]:
    """Errors whose message is for the user; anything else is a bug and keeps its traceback."""
    from .target.base import LoadError

    return (LoadError, ValueError, OSError, FloatingPointError, MemoryError)


def main() -> None:
    """Entry point of the `speculant` command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed: as if from /dev/null
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
