"""`speculant simulate` as a user and a script meet it: tables, JSON, files, errors, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.simulate.broken import BREAKS
from test_docs import ROOT, script

VERDICT = {
    "chi_square", "degrees_of_freedom", "critical_value", "p_value", "passed", "samples",
}  # fmt: skip
QUICK = {
    "theorem": ["--samples", "2000", "--vocab", "8"],
    "sweep": ["--alpha", "0.9", "--cost", "0.04"],
    "quality": ["--samples", "200", "--noise", "0,1", "--drafts", "1,3"],
    "tree": ["--samples", "200", "--shape", "2,2"],
    "rollback": [],
}


def run(*args: object) -> Result:
    words = ["simulate", *map(str, args)]
    return CliRunner().invoke(app, words, prog_name="speculant", env={"COLUMNS": "80"})


def as_json(*args: object) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)  # type: ignore[no-any-return]


def test_theorem_json() -> None:
    out = as_json("theorem", *QUICK["theorem"], "--seed", 1)
    assert set(out) >= VERDICT
    assert out["passed"] is True
    assert out["samples"] == 2000
    for part in (out["block"], out["tree"], out["direct"], *out["markov"].values()):
        assert set(part) >= VERDICT
    assert as_json("theorem", *QUICK["theorem"], "--seed", 1) == out
    assert as_json("theorem", *QUICK["theorem"], "--seed", 2) != out


def test_sweep_json() -> None:
    out = as_json("sweep", "--alpha", 0.8, "--cost", 0.05, "--max-draft", 12)
    assert set(out) == {"rows", "best_num_draft_tokens", "best_speedup"}
    assert set(out["rows"][3]) == {
        "num_draft_tokens", "expected_tokens", "time_per_token", "speedup",
    }  # fmt: skip
    assert out["best_num_draft_tokens"] == 8
    assert round(out["best_speedup"], 2) == 3.09
    assert out["rows"][8]["speedup"] == out["best_speedup"]


def test_other_json() -> None:
    quality = as_json("quality", *QUICK["quality"])
    assert [step["noise"] for step in quality["steps"]] == [0, 1]
    assert [row["num_draft_tokens"] for row in quality["steps"][0]["rows"]] == [1, 3]
    tree = as_json("tree", *QUICK["tree"])
    assert [len(c["leaves"]) for c in tree["contenders"]] == [0, 0, 4, 4, 0]
    assert tree["nodes"] == 6
    rollback = as_json("rollback", "--drafts", 4, "--reject-at", "none,2")
    now = [turn["kv"]["cache_now"]["logical"] for turn in rollback["turns"]]
    after = [turn["kv"]["after_next_forward"]["logical"] for turn in rollback["turns"]]
    assert (now, after) == ([13, 10], [14, 11])
    assert rollback["verified"] is True


@pytest.mark.parametrize("name", QUICK)
def test_tables_fit_a_terminal(name: str) -> None:
    result = run(name, *QUICK[name])
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "\u2026" not in result.stdout  # nothing was cut off
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stdout)


def test_default_tables_fit_a_terminal() -> None:
    for words in (["theorem"], ["rollback", "--prefix", "4000", "--reject-at", "1,2,3,none"]):
        result = run(*words)
        assert result.exit_code == 0
        assert "\u2026" not in result.stdout


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_fails_and_says_so(name: str) -> None:
    result = run("theorem", "--samples", 20_000, "--vocab", 16, "--break", name)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "NOT lossless" in result.stdout
    assert name in result.stdout
    out = run("theorem", "--samples", 20_000, "--vocab", 16, "--break", name, "--json")
    assert out.exit_code == 1
    found = json.loads(out.stdout)
    assert found["all_passed"] is False
    assert (found["tree"] if name == "best-path" else found)["passed"] is False


def test_plots_are_written(tmp_path: Path) -> None:
    for name in ("sweep", "quality"):
        path = tmp_path / f"{name}.png"
        result = run(name, *QUICK[name], "--plot", path)
        assert result.exit_code == 0, result.output
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    edge = run(
        "sweep", "--alpha", 1, "--cost", 0, "--max-draft", 0, "--plot", tmp_path / "edge.svg"
    )
    assert edge.exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["edge.svg", "quality.png", "sweep.png"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("theorem --samples 10", "samples"),
        ("theorem --samples -5", "samples"),
        ("theorem --seed -1", "--seed"),
        ("theorem --vocab 1", "vocabulary"),
        ("theorem --vocab 1000", "vocabulary"),
        ("theorem --drafts 0", "drafts"),
        ("theorem --shape 2,x", "--shape"),
        ("theorem --shape 0", "shape"),
        ("theorem --shape 9 --vocab 8", "shape"),
        ("theorem --noise nan", "noise"),
        ("theorem --break nothing", "residual, drop, best-path"),
        ("sweep --alpha 1.2 --cost 0.1", "alpha"),
        ("sweep --alpha nan --cost 0.1", "alpha"),
        ("sweep --alpha 0.5 --cost -1", "cost"),
        ("sweep --alpha 0.5 --cost nan", "cost"),
        ("sweep --alpha 0.5 --cost 0.1 --max-draft -1", "longest"),
        ("sweep --alpha 0.5 --cost 0.1 --samples 1", "samples"),
        ("sweep --alpha 0.5 --cost 0.1 --plot /nowhere/x.png", "no folder"),
        ("sweep --alpha 0.5 --cost 0.1 --plot x.txt", ".png"),
        ("quality --noise a", "--noise"),
        ("quality --noise 1,inf", "--noise"),
        ("quality --noise -1", "noise"),
        ("quality --drafts 0", "draft lengths"),
        ("quality --world flat", "context-free or markov"),
        ("quality --samples 1", "rounds"),
        ("tree --shape 16,16", "nodes"),
        ("tree --shape ,", "--shape"),
        ("tree --sharpness -1", "sharpness"),
        ("rollback --reject-at 0", "count from 1 to 4"),
        ("rollback --reject-at 5", "count from 1 to 4"),
        ("rollback --reject-at x", "none, random"),
        ("rollback --drafts -1", "drafts"),
        ("rollback --rounds 0", "rounds"),
        ("rollback --prefix -1", "prefix"),
        ("rollback --alpha 2", "alpha"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2, result.output
    assert re.fullmatch(r"speculant: [^\n]+\n", result.stderr), result.stderr
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", [*QUICK, "--help"])
def test_nothing_imports_torch(name: str) -> None:
    words = ["simulate", name, *QUICK.get(name, [])]
    code = (
        "import sys\nfrom speculant.cli import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    assert script().updated(page) == page, "run scripts/update_docs.py"
    for name in QUICK:
        assert f"Usage: speculant simulate {name}" in page
