"""`speculant tune`: whether and how to speculate, before deploying. No torch, no model."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import AsJson, user_errors


def tune(
    workload: Annotated[
        Path | None, typer.Argument(help="The workload (YAML); --example prints one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the page here (Markdown).")
    ] = None,
    as_json: AsJson = False,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Another machine than the workload's, or: measured."),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a commented workload and stop.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the workload's JSON schema and stop.")
    ] = False,
    predict: Annotated[
        Path | None,
        typer.Option("--predict", help="Predict a file of published measurements (JSON) and stop."),
    ] = None,
) -> None:
    """Recommend a draft, its length and its configuration for a workload, with the reasons."""
    with user_errors():
        asked = {"--example": example, "--schema": schema, "--predict": predict,
                 "a workload": workload}  # fmt: skip
        chosen = [name for name, value in asked.items() if value]
        if len(chosen) != 1:
            got = " and ".join(chosen) if chosen else "nothing"
            raise ValueError(f"give one of a workload file, --example, --schema, --predict: {got}")
        if example:
            data = resources.files("speculant.tune").joinpath("data")
            typer.echo(data.joinpath("example.yaml").read_text("utf-8"), nl=False)
        elif schema:
            from ..tune.workload import schema as workload_schema

            typer.echo(json.dumps(workload_schema(), indent=1))
        elif predict is not None:
            if hardware is not None:
                raise ValueError("--hardware goes with a workload: records name their own")
            _predict(predict, out, as_json)
        else:
            assert workload is not None
            _recommend(workload, out, as_json, hardware)


def _recommend(path: Path, out: Path | None, as_json: bool, hardware: str | None) -> None:
    from ..tune.recommend import recommend
    from ..tune.report import render
    from ..tune.workload import read_workload

    workload = read_workload(path)
    if hardware is not None:
        other = workload.hardware.model_copy(update={
            "name": hardware, "bandwidth_gb_s": None, "tflops": None, "memory_gb": None,
        })  # fmt: skip
        workload = workload.model_copy(update={"hardware": other})
    page = recommend(workload)
    text = render(page)
    if out is not None:
        write(out, text)
    if as_json:
        typer.echo(json.dumps(page, allow_nan=False))
    elif out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{page['decision']}: {page['family']}; the page is in {out}")


def _predict(path: Path, out: Path | None, as_json: bool) -> None:
    from ..tune.predict import as_json as as_data
    from ..tune.predict import predict, read_records, render

    predictions, skipped = predict(read_records(path))
    text = render(predictions, skipped)
    if out is not None:
        write(out, text)
    if as_json:
        data: dict[str, Any] = as_data(predictions, skipped)
        typer.echo(json.dumps(data, allow_nan=False))
    elif out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{len(predictions)} predicted, {len(skipped)} skipped; the table is in {out}")


def write(path: Path, text: str) -> None:
    """Write a text to a temporary name beside the file, then rename."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: give a file")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
