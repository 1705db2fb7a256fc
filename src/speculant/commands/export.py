"""`speculant export` and `check-export`: heads for other engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import BUNDLED, AsJson, Force, TargetName, user_errors

if TYPE_CHECKING:
    from ..export.checking import Checked

ENGINES = ("vllm", "sglang", "tensorrt-llm")
DTYPES = ("bfloat16", "float16", "float32")
FewTokens = Annotated[
    int, typer.Option("--num-draft-tokens", "-n", help="To draft a round, in the launch commands.")
]
SomeTarget = Annotated[
    str | None,
    typer.Option("--target", help="The target, as for generate: compared with the head."),
]


def export(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or tensorrt-llm.")],
    head: Annotated[
        str, typer.Argument(help="The folder of a head, or the kind of a bundled one.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write; an earlier export is replaced.")
    ],
    target: TargetName = BUNDLED,
    layout: Annotated[
        str, typer.Option("--format", help="native, or speculators (vllm, EAGLE-3).")
    ] = "native",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    num_draft_tokens: FewTokens = 3,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a head in an engine's format, check it, and say how to serve with it."""
    with user_errors():
        name = find_format(engine, layout)
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}: choose {', '.join(DTYPES)}")
        from ..export.folder import check_replaceable
        from ..export.writing import find_layout
        from ..heads.weights import check_target, head_kind, load_head

        folder = find_head(head)
        kind = head_kind(folder)
        find_layout(name, kind)
        check_replaceable(out)
        import torch

        from ..export.parts import Wanted
        from ..export.writing import ENGINES as NAMES
        from ..export.writing import export_head
        from .lend import lend

        loaded = load_head(folder)
        lent = lend(target, ends=kind in ("medusa", "vanilla"))
        if not force:
            check_target(loaded, lent.fingerprint, target)
        wanted = Wanted(out, lent.parts, getattr(torch, dtype), num_draft_tokens)
        found: list[Checked] = []

        def check(written: Path) -> None:
            found.append(check_written(written, out, force))

        export_head(name, loaded, wanted, check)
        notes = [str(finding) for finding in found[0].findings]
        if as_json:
            typer.echo(json.dumps({"out": str(out), "format": name, "kind": kind, "notes": notes}))
            return
        size = sum(path.stat().st_size for path in out.iterdir())
        typer.echo(f"{out}: {kind} for {NAMES[name]} ({name}), {size / 1e6:.1f} MB, checked")
        typer.echo("".join(f"  note  {line}\n" for line in notes), nl=False)
        typer.echo(launch_of(out / "README.md"))


def check_export(
    folder: Annotated[
        Path, typer.Argument(help="An export, or a checkpoint that an engine shall load.")
    ],
    engine: Annotated[
        str | None, typer.Option("--engine", help="Whose format it is, without an export's note.")
    ] = None,
    target: SomeTarget = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run vLLM with it and without, and count what it accepts.")
    ] = False,
    python: Annotated[
        Path | None, typer.Option("--python", help="--run: the Python that has vLLM.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what an engine would skip, default or misread in a folder, and say what that costs."""
    with user_errors():
        from ..export.checking import check_export as check
        from ..export.folder import read_checkpoint

        if engine is not None and engine not in (*ENGINES, "speculators"):
            choices = ", ".join((*ENGINES, "speculators"))
            raise ValueError(f"unknown engine {engine!r}: choose from {choices}")
        if python is not None and not run:
            raise ValueError("--python goes with --run")
        checkpoint = read_checkpoint(folder)
        fingerprint = None
        if target is not None:
            from .lend import lend

            fingerprint = lend(target, ends=False).fingerprint
        checked = check(checkpoint, engine, fingerprint)
        outcome = None
        if run and checked.passed:
            from .run_engine import run_vllm

            outcome = run_vllm(checkpoint, checked, target, python)
        passed = checked.passed and (outcome is None or outcome.passed)
        if as_json:
            typer.echo(json.dumps(as_dict(folder, checked, outcome, passed)))
        else:
            show(folder, checked)
            if outcome is not None:
                typer.echo(outcome.render())
        if not passed:
            raise typer.Exit(1)


def show(folder: Path, checked: Checked) -> None:
    """The findings, for people."""
    layout = checked.layout
    ran = "" if layout.ran else "; read, not run here"
    typer.echo(f"{folder}: {layout.kind} for {checked.engine} ({layout.source}{ran})")
    for finding in checked.findings:
        typer.echo(f"  {'FAIL' if finding.problem else 'note'}  {finding}")
    count = sum(finding.problem for finding in checked.findings)
    good = "loads whole, as exported" if checked.noted else "loads whole"
    typer.echo(f"verdict: {good}" if not count else f"verdict: {count} problems: do not serve this")


def as_dict(folder: Path, checked: Checked, outcome: Any, passed: bool) -> dict[str, Any]:
    """The same for JSON."""
    findings = [
        {"subject": f.subject, "problem": f.problem, "text": f.text} for f in checked.findings
    ]
    return {
        "folder": str(folder),
        "engine": checked.engine,
        "kind": checked.layout.kind,
        "source": checked.layout.source,
        "passed": passed,
        "findings": findings,
        "run": None if outcome is None else outcome.as_dict(),
    }


def find_format(engine: str, layout: str) -> str:
    """The format of `--format` for an engine. ValueError for one that it does not read."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: choose from {', '.join(ENGINES)}")
    if layout not in ("native", "speculators"):
        raise ValueError(f"unknown format {layout!r}: choose native or speculators")
    if layout == "speculators" and engine != "vllm":
        raise ValueError(f"--format speculators is vLLM's: {engine} does not read it")
    return layout if layout == "speculators" else engine


def find_head(name: str) -> Path:
    """The folder of a head, or of the bundled one of a kind. ValueError for neither."""
    from ..drafts import bundled_head
    from ..heads.weights import KINDS

    if name in KINDS and not Path(name).is_dir():
        return bundled_head(name)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name}: no folder of a head, and none of {', '.join(KINDS)}")
    return Path(name)


def check_written(written: Path, out: Path, force: bool) -> Checked:
    """Check an export before it takes its place. ValueError for a problem, unless forced."""
    from ..export.checking import check_export as check
    from ..export.folder import read_checkpoint

    checked = check(read_checkpoint(written))
    problems: Sequence[str] = [str(finding) for finding in checked.findings if finding.problem]
    if problems and not force:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"not exported to {out}: {problems[0]}{more}; --force writes it anyway")
    return checked


def launch_of(readme: Path) -> str:
    """The first command of an export's README."""
    lines = readme.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("    "))
    return "\n".join(lines[start:end])
