"""`speculant import`: heads from other engines and trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import AsJson, user_errors
from .export import SomeTarget

if TYPE_CHECKING:
    from ..export.given import Given, Imported


def import_folder(
    folder: Annotated[
        Path, typer.Argument(help="A published checkpoint: config.json, safetensors.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the head to write.")],
    target: SomeTarget = None,
    tap_convention: Annotated[
        str,
        typer.Option(
            "--tap-convention",
            help="Layer id i is the state that enters it (enter), or its output (output). auto: by "
            "where the ids stand, and measured with --target.",
        ),
    ] = "auto",
    taps: Annotated[
        str | None,
        typer.Option("--taps", help="Layers whose entering state is read, such as 2,15,27."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="Medusa with --target: JSONL whose questions the target answers to measure the "
            "heads' accuracies. Default: the built-in ones.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a head of a checkpoint in EAGLE's, vLLM's, speculators', SGLang's or Medusa's layout."""
    with user_errors():
        from ..export.folder import read_checkpoint
        from ..export.given import Given
        from ..export.importing import import_head
        from ..export.writing import kind_of
        from ..heads.weights import is_head, save_head
        from .lend import lend

        if out.exists() and not (out.is_dir() and (is_head(out) or not any(out.iterdir()))):
            raise ValueError(f"--out {out}: is there and is no head: give another folder")
        if questions is not None and target is None:
            raise ValueError("--questions goes with --target, which answers them")
        given = Given(convention=tap_convention, taps=parse_taps(taps))
        checkpoint = read_checkpoint(folder)
        if target is not None:
            given = lend(target, ends=True).given(given)
        imported = import_head(checkpoint, given)
        measured = None
        if target is not None and imported.ambiguous is not None:
            from .taps import choose_taps

            imported, measured = choose_taps(target, imported)
        if target is not None and unmeasured(imported):
            from .ranks import measure_ranks

            imported = measure_ranks(target, imported, questions)
        remarks = [*imported.remarks, *open_questions(imported, given, measured)]
        save_head(imported.head, out, imported.dtype)
        kind = kind_of(imported.head)
        if as_json:
            report = {"out": str(out), "kind": kind, "layout": imported.layout, "remarks": remarks}
            typer.echo(json.dumps({**report, "measured": measured}))
            return
        typer.echo(f"{out}: {kind}, from {imported.layout} in {folder}")
        typer.echo("".join(f"  note  {line}\n" for line in remarks), nl=False)
        typer.echo(f"  next  speculant eval {out}")


def unmeasured(imported: Imported) -> bool:
    """True for Medusa heads whose accuracies are not known."""
    return getattr(imported.head.config, "accuracies", None) == ()


def open_questions(
    imported: Imported, given: Given, measured: dict[str, float] | None
) -> list[str]:
    """What the files left open."""
    out = []
    if measured is not None:
        numbers = ", ".join(f"{share:.1%} with taps {taps}" for taps, share in measured.items())
        out.append(f"it names the target's next token in {numbers}")
    elif imported.ambiguous is not None:
        other = ",".join(map(str, imported.ambiguous))
        out.append(
            f"its layer ids may also mean taps {other} (--tap-convention): --target measures which"
        )
    if unmeasured(imported):
        out.append(
            "the accuracies of its heads are not known, and they will draft a usual tree: --target "
            "measures them, over --questions or built-in ones, for a tree of their own"
        )
    if not imported.head.config.target and not given.fingerprint:
        out.append("no fingerprint of its target is recorded: --target records one")
    return out


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """`--taps 2,15,27` as numbers."""
    if text is None:
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        taps = ()
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise ValueError(f"--taps {text!r}: give layers, ascending, such as 2,15,27")
    return taps
