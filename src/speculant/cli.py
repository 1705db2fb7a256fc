"""The command line. Subcommands only; everything heavy is imported inside them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .commands.bench import bench
from .commands.chat import chat
from .commands.check import check
from .commands.demo import demo
from .commands.eval import evaluate
from .commands.export import check_export, export
from .commands.generate import generate
from .commands.import_head import import_folder
from .commands.profile import profile
from .commands.serve import serve
from .commands.simulate import simulate
from .commands.train import data, train
from .commands.tune import tune
from .options import Commands

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


app.command()(generate)
app.command()(chat)
app.command()(check)
app.command()(demo)
app.command()(bench)
app.command()(profile)
app.command("eval")(evaluate)
app.command()(train)
app.command()(data)
app.command()(export)
app.command("import")(import_folder)
app.command("check-export")(check_export)
app.add_typer(simulate)
app.command()(tune)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


def main() -> None:
    """Entry point of the `speculant` command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed: as if from /dev/null
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
