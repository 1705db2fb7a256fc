"""The script that trains heads under equal conditions: what it runs once, and its table.

Independent truth: figures written by hand into the files that `train` and `eval` leave.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/head_curves.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("head_curves", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


head_curves = load_script()


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=out, data=[Path("a"), Path("b")], questions=None, limit=3, max_tokens=9, threads=[]
    )


def trained(out: Path, name: str) -> None:
    """What `speculant train` leaves."""
    held_out = {
        "mean_acceptance_length": 1.625,
        "conditional_acceptance_per_position": [0.5, 0.25, 0.125],
    }
    training = {"answer_tokens": 25118, "tokens_seen": 50435, "held_out": held_out}
    (out / name).mkdir(parents=True)
    (out / name / "config.json").write_text(json.dumps({"training": training}))


def decoded(path: Path, *runs: tuple[int, float]) -> None:
    """What `speculant eval` leaves: (nodes, mean acceptance length) of each setting."""
    results: list[dict[str, Any]] = [
        {
            "settings": {"tree": nodes},
            "mean_acceptance_length": length,
            "conditional_acceptance_per_position": [0.375, 0.75],
        }
        for nodes, length in runs
    ]
    path.write_text(json.dumps({"results": results} if len(results) > 1 else results[0]))


def test_the_table_holds_what_was_measured(tmp_path: Path) -> None:
    assert head_curves.row("eagle1-200k", tmp_path) is None
    trained(tmp_path, "eagle1-200k")
    assert head_curves.row("eagle1-200k", tmp_path) is None  # not decoded yet
    decoded(tmp_path / "eagle1-200k.eval.json", (0, 1.39), (32, 1.89))
    decoded(tmp_path / "eagle1-200k.fixed.eval.json", (25, 1.77))
    trained(tmp_path, "eagle3-25k")
    decoded(tmp_path / "eagle3-25k.eval.json", (0, 1.21), (32, 1.5))
    trained(tmp_path, "eagle3-50k")
    decoded(tmp_path / "eagle3-50k.eval.json", (0, 1.3), (32, 1.6))
    rows = [head_curves.row(name, tmp_path) for name in ("eagle1-200k", "eagle3-25k", "eagle3-50k")]
    known = [row for row in rows if row is not None]
    lines = head_curves.table(known).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == (
        "| eagle1-200k | 25,118 | 50,435 | None | 0.50, 0.25, 0.12 | 1.62 | 0.38, 0.75 | 1.39 "
        "| 1.89 | 1.77 |"
    )
    assert lines[3].endswith("| 1.21 | 1.50 |  |")
    head_curves.draw(known, tmp_path)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def speculant(arguments: list[str]) -> None:
        asked.append(arguments)
        if arguments[0] == "train":
            trained(tmp_path, "eagle1-200k")
        else:
            decoded(Path(arguments[arguments.index("--out") + 1]), (0, 1.4))

    monkeypatch.setattr(head_curves, "speculant", speculant)
    for _ in range(2):
        head_curves.train("eagle1-200k", options(tmp_path))
        head_curves.evaluate("eagle1-200k", options(tmp_path))
    head = str(tmp_path / "eagle1-200k")
    assert [words[:2] for words in asked] == [
        ["train", "eagle1"], ["eval", head], ["eval", f"eagle1-tree={head}"],
    ]  # fmt: skip
    assert asked[0].count("--data") == 2
    assert asked[0][asked[0].index("--answer-tokens") + 1] == "200000"
