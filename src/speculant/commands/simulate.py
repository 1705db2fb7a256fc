"""`speculant simulate`: speculation on known distributions. No torch, no model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import AsJson, user_errors

if TYPE_CHECKING:
    from collections.abc import Callable

Seed = Annotated[int, typer.Option("--seed", help="Seed of the simulation.")]
Vocab = Annotated[int, typer.Option("--vocab", help="Tokens, 2 to 256.")]
Shape = Annotated[str, typer.Option("--shape", help="Children of a node, depth by depth.")]
World = Annotated[
    str, typer.Option("--world", help="markov: depends on the last token; context-free: on none.")
]
Noise = Annotated[
    float, typer.Option("--noise", help="Error of the draft's logits (standard deviation).")
]
Drift = Annotated[
    float, typer.Option("--drift", help="The error grows by this share of itself with each depth.")
]
Sharpness = Annotated[
    float, typer.Option("--sharpness", help="Spread of the target's logits; low: many likely.")
]
Rounds = Annotated[int, typer.Option("--samples", help="Rounds simulated for each figure.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Write a picture here (.png, .pdf or .svg).")
]

simulate = typer.Typer(
    name="simulate",
    help="Speculation on known distributions: watch the theory hold. No model is loaded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@simulate.command()
def theorem(
    samples: Annotated[int, typer.Option("--samples", help="Tokens of each rule.")] = 50_000,
    seed: Seed = 0,
    vocab: Vocab = 64,
    drafts: Annotated[int, typer.Option("--drafts", "-n", help="Tokens of a chain.")] = 4,
    shape: Shape = "2,2",
    noise: Noise = 1.0,
    broken: Annotated[
        str | None,
        typer.Option(
            "--break",
            help="See a wrong rule fail. residual: a rejected token is replaced from the target; "
            "drop: unsure tokens are dropped; best-path: a tree's likeliest accepted sibling wins.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Chi-square of every rule against direct sampling."""
    with user_errors():
        from ..simulate.theorem import prove

        check_seed(seed)
        found = prove(samples, seed, vocab, drafts, parse_shape(shape), noise, broken)
        show(as_json, found, lambda report, console: report.theorem(console, found, samples))
        if not found.passed:
            raise typer.Exit(1)


@simulate.command()
def sweep(
    alpha: Annotated[float, typer.Option("--alpha", help="Acceptance of a drafted token, 0..1.")],
    cost: Annotated[
        float, typer.Option("--cost", help="Time of a draft step / time of a target forward.")
    ],
    max_draft: Annotated[int, typer.Option("--max-draft", help="Longest draft tried.")] = 10,
    plot: Plot = None,
    samples: Annotated[
        int, typer.Option("--samples", help="Rounds to simulate for each length; 0: none.")
    ] = 0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """The speed-up of every draft length."""
    with user_errors():
        from ..simulate.sweep import sweep as run

        check_seed(seed)
        check_plot(plot)
        found = run(alpha, cost, max_draft, samples, seed)
        show(as_json, found, lambda report, console: report.sweep(console, found))
        if plot is not None:
            from ..simulate import plots

            plots.sweep(plot, found)


@simulate.command()
def quality(
    noise: Annotated[
        str, typer.Option("--noise", help="Errors of the draft's logits, step by step.")
    ] = "0,0.25,0.5,1,2,4",
    drafts: Annotated[str, typer.Option("--drafts", "-n", help="Draft lengths.")] = "1,2,4,8",
    samples: Rounds = 5000,
    seed: Seed = 0,
    world: World = "markov",
    vocab: Vocab = 32,
    drift: Drift = 0.25,
    sharpness: Sharpness = 2.0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Move a draft away from its target, step by step."""
    with user_errors():
        from ..simulate.quality import degrade

        check_seed(seed)
        check_plot(plot)
        steps, lengths = parse_floats("--noise", noise), parse_ints("--drafts", drafts)
        found = degrade(world, steps, lengths, samples, seed, vocab, drift, sharpness)
        show(as_json, found, lambda report, console: report.quality(console, found))
        if plot is not None:
            from ..simulate import plots

            plots.quality(plot, found)


@simulate.command()
def tree(
    shape: Shape = "2,2,2",
    samples: Rounds = 10_000,
    seed: Seed = 0,
    world: World = "markov",
    vocab: Vocab = 32,
    noise: Noise = 1.0,
    drift: Drift = 0.25,
    sharpness: Sharpness = 2.0,
    as_json: AsJson = False,
) -> None:
    """Trees against chains of as many drafted nodes."""
    with user_errors():
        from ..simulate.compare import compare

        check_seed(seed)
        widths = parse_shape(shape)
        found = compare(world, widths, samples, seed, vocab, noise, drift, sharpness)
        show(as_json, found, lambda report, console: report.compare(console, found))


@simulate.command()
def rollback(
    drafts: Annotated[int, typer.Option("--drafts", "-n", help="Drafted tokens a round.")] = 4,
    reject_at: Annotated[
        str,
        typer.Option(
            "--reject-at",
            help="A sequence each: which drafted token is rejected (1 is the first), none, or "
            "random; several rounds by slashes, as in none/1,2.",
        ),
    ] = "none,2",
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", help="Default: as many as --reject-at names.", show_default=False),
    ] = None,
    prefix: Annotated[int, typer.Option("--prefix", help="Tokens in the cache before.")] = 8,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Acceptance of a drafted token, for random.")
    ] = 0.8,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """A batch's caches step by step, and wasted work."""
    with user_errors():
        from ..simulate.rollback import parse_plan, roll_back

        check_seed(seed)
        plan = parse_plan(reject_at)
        count = max(map(len, plan)) if rounds is None else rounds
        found = roll_back(drafts, plan, prefix, count, alpha, seed)
        show(as_json, found, lambda report, console: report.rollback(console, found))


def show(as_json: bool, found: Any, render: Callable[[Any, Any], None]) -> None:
    """One JSON object, or a table by `render(report module, console)`."""
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
        return
    from rich.console import Console

    from ..simulate import report

    render(report, Console(highlight=False))


def check_seed(seed: int) -> None:
    """Refuse what no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}: it lies in 0 .. 2**63 - 1")


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be written, before anything runs."""
    from .eval import check_outputs

    check_outputs(None, path)


def parse_ints(option: str, text: str) -> tuple[int, ...]:
    """`2,2,2` as numbers."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give whole numbers, as in 2,2,2") from None


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    """`0,0.5,1` as finite numbers."""
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{option} {text!r}: give numbers, as in 0,0.5,1")
    return numbers


def parse_shape(text: str) -> tuple[int, ...]:
    """A tree's widths."""
    return parse_ints("--shape", text)
