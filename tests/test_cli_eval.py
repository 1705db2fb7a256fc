"""`speculant eval` as a user and a script meet it: output, files, errors, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fake import HIDDEN, Broken, FakeTarget
from scripted import Scripted
from speculant.bench.prompts import PROMPTS
from speculant.cli import app
from speculant.drafts import DRAFTS, draft_options
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.weights import save_head

FIGURES = {
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_per_position"),
    *("conditional_acceptance_per_position", "num_questions", "num_answers", "num_tokens"),
    *("tokens_per_forward", "loops", "mean_acceptance_length_without_loops", "counters"),
}
MORE = {"per_task", "settings", "skipped", "warnings", "seconds", "tokens_per_s"}
QUICK = ("--max-tokens", "8", "--temperature", "0")


class Models:
    """Stands in for `load_target`, and notes what was asked for."""

    def __init__(self) -> None:
        self.target = FakeTarget(seed=4)
        self.loads: list[str] = []

    def load(self, source: str, **options: Any) -> FakeTarget:
        self.loads.append(source)
        return self.target


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    made = Models()
    monkeypatch.setattr("speculant.target.load.load_target", made.load)
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A draft named `branching` that can draft a tree; the (depth, tree) of every one made."""
    seen: list[tuple[int, int]] = []

    def build(target: FakeTarget, num_draft_tokens: int = 3, tree: int = 0) -> Scripted:
        seen.append((num_draft_tokens, tree))
        siblings = max(0, tree // num_draft_tokens - 1)

        def guess(tokens: Any, budget: int) -> list[int]:
            return target.greedy(tokens, budget)[:1] * min(budget, num_draft_tokens)

        return Scripted(guess, num_draft_tokens, siblings)

    monkeypatch.setitem(DRAFTS, "branching", ("for tests", build))
    return seen


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Five questions of two tasks, one with two turns."""
    rows = [(1, "qa", ["aa"]), (2, "maths", ["bb", "cc"]), (3, "qa", ["dd"]), (4, "qa", ["ee"]),
            (5, "maths", ["ff"])]  # fmt: skip
    path = tmp_path / "questions.jsonl"
    keys = ("question_id", "category", "turns")
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    return path


def run(*args: object) -> Result:
    words = ["eval", *map(str, args)]
    return CliRunner().invoke(app, words, prog_name="speculant", env={"COLUMNS": "100"})


def as_json(*args: object) -> dict[str, Any]:
    """Standard output of `--json`: one line, one object."""
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def fails(result: Result, code: int, *words: str) -> None:
    """One line for the user, and the exit code."""
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"speculant: [^\n]+\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
    assert result.stdout == ""


def test_json_of_one_setting_is_flat(models: Models, questions: Path) -> None:
    out = as_json("ngram", "--questions", questions, *QUICK, "--batch", 2, "-n", 3)
    assert set(out) == FIGURES | MORE
    assert {name: set(task) for name, task in out["per_task"].items()} == {
        "qa": FIGURES, "maths": FIGURES,
    }  # fmt: skip
    assert (out["num_questions"], out["num_answers"]) == (5, 6)
    tasks = out["per_task"].values()
    for name in ("num_questions", "num_answers", "num_tokens"):
        assert out[name] == sum(task[name] for task in tasks)
    assert out["settings"] == {
        "target": "fake", "draft": "ngram", "questions": str(questions), "limit": None,
        "dtype": "float32", "weights": "float32", "device": "cpu", "temperature": 0.0, "tree": None,
        "num_draft_tokens": 3, "max_tokens": 8, "batch": 2, "rule": "block", "seed": 0,
    }  # fmt: skip


def test_what_was_not_chosen_is_run_both_ways(
    models: Models, made: list[tuple[int, int]], questions: Path
) -> None:
    """Chain and tree, temperature 0 and 1; a draft without a tree runs at both temperatures."""

    def settings(*args: object) -> list[tuple[Any, Any, Any]]:
        out = as_json(*args, "--questions", questions, "--max-tokens", 6)
        results = out.get("results", [out])
        for result in results:
            assert set(result) == FIGURES | MORE
        keys = ("tree", "temperature", "num_draft_tokens")
        return [tuple(result["settings"][key] for key in keys) for result in results]  # type: ignore[misc]

    assert settings("branching") == [(0, 0, 3), (0, 1, 3), (32, 0, 30), (32, 1, 30)]
    assert made == [(3, 0), (3, 32)]
    assert settings("branching", "-t", 0.5) == [(0, 0.5, 3), (32, 0.5, 30)]
    assert settings("branching", "--tree", 8) == [(8, 0, 6), (8, 1, 6)]
    assert settings("branching", "--tree", 0, "-t", 0, "-n", 2) == [(0, 0, 2)]
    assert settings("branching", "--tree", 9, "-t", 0, "-n", 2) == [(9, 0, 2)]
    assert made[-1] == (2, 9)
    assert settings("ngram") == [(None, 0, 8), (None, 1, 8)]
    assert settings("lookahead", "-t", 0) == [(None, 0, None)]


def test_a_draft_that_drafts_trees_only_runs_no_chain(
    models: Models, monkeypatch: pytest.MonkeyPatch, questions: Path
) -> None:
    def build(target: FakeTarget, tree: int = 12) -> Scripted:
        return Scripted(lambda tokens, budget: [1] * budget, 2, tree // 2 - 1)

    monkeypatch.setitem(DRAFTS, "bushy", ("for tests", build))
    out = as_json("bushy", "--questions", questions, *QUICK)
    assert out["settings"]["tree"] == 12
    fails(run("bushy", "--tree", 0), 2, "'bushy' drafts trees only")


def test_the_built_in_questions(models: Models) -> None:
    models.target = FakeTarget(seed=4, context_length=1024)
    out = as_json("ngram", *QUICK)
    assert list(out["per_task"]) == list(PROMPTS)
    assert out["settings"]["questions"] == "built-in"


def test_a_limit_is_spread(models: Models, questions: Path) -> None:
    out = as_json("ngram", "--questions", questions, *QUICK, "--limit", 4)
    counts = {task: figures["num_questions"] for task, figures in out["per_task"].items()}
    assert counts == {"qa": 2, "maths": 2}
    assert out["settings"]["limit"] == 4


def test_tables_for_people(models: Models, made: list[tuple[int, int]], questions: Path) -> None:
    result = run("branching", "--questions", questions, "--max-tokens", 6, "-t", 0)
    assert result.exit_code == 0
    assert "fake with branching, chain, temperature 0" in result.stdout
    assert "fake with branching, tree of 32 nodes, temperature 0" in result.stdout
    out = as_json("branching", "--questions", questions, "--max-tokens", 6, "-t", 0, "--tree", 0)
    for task, figures in (("all", out), *out["per_task"].items()):
        row = next(line for line in result.stdout.splitlines() if line.split()[:1] == [task])
        first = f"{out['conditional_acceptance_per_position'][0]:.0%}" if task == "all" else ""
        numbers = row.split()
        assert numbers[1:3] == [str(figures["num_questions"]), str(figures["num_tokens"])]
        assert numbers[3] == f"{figures['mean_acceptance_length']:.2f}"
        assert first in numbers or not first


def test_warnings_are_loud(
    models: Models, monkeypatch: pytest.MonkeyPatch, questions: Path
) -> None:
    """On standard error, with the tables as with JSON, where they stand in the object too."""

    def build(target: FakeTarget) -> Scripted:
        def wrong(tokens: Any, budget: int) -> list[int]:
            return [(token + 1) % 32 for token in target.greedy(tokens, budget)]

        return Scripted(wrong)

    monkeypatch.setitem(DRAFTS, "wrong", ("for tests", build))
    for more in ((), ("--json",)):
        result = run("wrong", "--questions", questions, *QUICK, *more)
        assert result.exit_code == 0
        assert result.stderr.startswith("WARNING (temperature 0): mean acceptance length 1.00")
        assert "trained for this target" in result.stderr
        assert result.stderr.count("\n") == 1
    out = json.loads(result.stdout)
    assert len(out["warnings"]) == 1
    assert out["mean_acceptance_length"] == 1


def test_files(models: Models, questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "e.json").write_text("of an earlier run")
    files = ("--out", folder / "e.json", "--plot", folder / "e.png")
    out = as_json("ngram", "--questions", questions, "--max-tokens", 6, *files)
    assert json.loads((folder / "e.json").read_text()) == out
    assert (folder / "e.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} == {"e.json", "e.png"}


def test_files_that_cannot_be_written_are_refused_first(models: Models, tmp_path: Path) -> None:
    fails(run("ngram", "--out", tmp_path), 2, "--out", "this is a folder")
    fails(run("ngram", "--out", tmp_path / "no" / "e.json"), 2, "there is no folder")
    fails(run("ngram", "--plot", tmp_path / "e.txt"), 2, "--plot", "must end in .png")
    fails(run("ngram", "--out", "/proc/e.json"), 2, "no file can be written there")
    assert models.loads == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nonsense",), ["unknown draft 'nonsense'", "ngram"]),
        (("none",), ["drafts nothing"]),
        (("ngram", "--tree", "8"), ["--tree is 8", "'ngram' has no such choice"]),
        (("ngram", "--batch", "0"), ["--batch is 0"]),
        (("ngram", "--limit", "0"), ["--limit is 0"]),
        (("ngram", "--max-tokens", "1"), ["--max-tokens is 1", "at least 2"]),
        (("ngram", "--temperature", "-1"), ["temperature is -1.0"]),
        (("ngram", "--temperature", "nan"), ["temperature is nan"]),
        (("ngram", "-n", "0"), ["--num-draft-tokens is 0"]),
        (("ngram", "--rule", "loose"), ["unknown rule 'loose'"]),
        (("ngram", "--seed", "-1"), ["--seed is -1"]),
        (("ngram", "--dtype", "int8"), ["unknown dtype"]),
        (("ngram", "--device", "tpu"), ["unknown device"]),
        (("ngram", "--draft-model", "x"), ["--draft-model goes with"]),
        (("ngram", "--questions", "no/such.jsonl"), ["no/such.jsonl: cannot be read"]),
    ],
)
def test_mistakes_are_told_before_the_target_loads(
    models: Models, args: tuple[str, ...], words: list[str]
) -> None:
    fails(run(*args), 2, *words)
    assert models.loads == []


def test_a_broken_line_is_named(models: Models, questions: Path) -> None:
    questions.write_text(questions.read_text() + '\n{"question_id": 6, "turns": ["a"]}\n')
    fails(run("ngram", "--questions", questions), 2, f"{questions}:6:", "category is missing")
    assert models.loads == []


def test_folders_that_hold_no_head(models: Models, tmp_path: Path) -> None:
    fails(run(tmp_path), 2, "unknown draft")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    fails(run(tmp_path), 2, "config.json")
    assert models.loads == []


def save_eagle3(folder: Path, hidden_size: int = HIDDEN) -> Path:
    """An untrained EAGLE-3 head."""
    config = Eagle3Config(
        hidden_size=hidden_size, intermediate_size=24, num_heads=4, kv_heads=2, head_dim=6,
        vocab_size=32, draft_vocab_size=20, taps=(0, 1),
    )  # fmt: skip
    head = Eagle3Head(config)
    head.set_vocabulary(torch.arange(20))
    save_head(head, folder)
    return folder


def test_the_folder_of_a_head(models: Models, questions: Path, tmp_path: Path) -> None:
    """A real head's chain and tree: positions are depths, and the tree's nodes are counted."""
    folder = save_eagle3(tmp_path / "head")
    out = as_json(folder, "--questions", questions, "--max-tokens", 12, "-t", 0, "-n", 3)
    chain, tree = out["results"]
    assert chain["settings"]["tree"] == 0
    assert tree["settings"]["tree"] == 32
    assert chain["settings"]["draft"] == tree["settings"]["draft"] == str(folder)
    assert chain["num_tokens"] == tree["num_tokens"]
    for result, nodes in ((chain, 3), (tree, 32)):
        counters = result["counters"]
        assert len(result["acceptance_per_position"]) <= 3
        assert counters["num_draft_tokens"] <= nodes * counters["num_drafts"]
    assert tree["counters"]["num_draft_tokens"] > 3 * tree["counters"]["num_drafts"]


def test_a_head_of_another_target(models: Models, tmp_path: Path) -> None:
    fails(run(save_eagle3(tmp_path / "head", hidden_size=8)), 2, "the head is for hidden size 8")


def test_more_than_the_draft_can_do(models: Models, questions: Path) -> None:
    fails(run("ngram", "--questions", questions, "-n", 513), 2, "--num-draft-tokens is 513")
    fails(run("lookahead", "--questions", questions, "-n", 99), 2, "--num-draft-tokens is 99")


def test_every_question_too_long(models: Models, questions: Path) -> None:
    """Nothing is measured: said in the warnings, and the figures are empty rather than wrong."""
    models.target = FakeTarget(seed=4, context_length=8)
    questions.write_text(re.sub(r"([a-f])\1", "long question", questions.read_text()))
    out = as_json("ngram", "--questions", questions, *QUICK)
    assert (out["num_questions"], out["num_tokens"], out["acceptance_per_position"]) == (0, 0, [])
    assert len(out["skipped"]) == 6
    assert "6 turns of 5 questions were skipped" in out["warnings"][0]


def test_a_target_that_breaks(models: Models, questions: Path) -> None:
    broken = Broken(seed=4)
    broken.position = 4
    models.target = broken
    fails(run("ngram", "--questions", questions, *QUICK), 1, "question 1, turn 1")


def test_ctrl_c(models: Models, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run: exit code 130, and no half-written file."""

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("speculant.engine.Engine.step", interrupted)
    out = questions.with_name("e.json")
    result = run("ngram", "--questions", questions, *QUICK, "--out", out)
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")
    assert set(questions.parent.iterdir()) == {questions}


def test_heads_that_draft_trees_name_their_choice_tree() -> None:
    """What `eval` relies on: the option of that name is a number of nodes, 0 a chain."""
    assert draft_options("eagle3")["tree"] == 0
    assert draft_options("eagle2")["tree"] == 32
    assert "tree" not in draft_options("ngram")


@pytest.mark.real
def test_the_bundled_model(bundled: Path, tmp_path: Path) -> None:
    """Two turns on the real tokenizer and template; a text that repeats itself is guessed."""
    path = tmp_path / "q.jsonl"
    text = "Repeat exactly, twice: the quick brown fox jumps over the lazy dog."
    path.write_text(
        json.dumps({"question_id": 1, "category": "copy", "turns": [text, "Once more."]})
    )
    out = as_json("ngram", "--questions", path, "-t", 0, "--max-tokens", 32)
    assert (out["num_questions"], out["num_answers"]) == (1, 2)
    assert out["per_task"]["copy"]["counters"] == out["counters"]
    assert out["mean_acceptance_length"] > 1.5
    assert out["num_tokens"] == out["counters"]["num_emitted_tokens"] <= 64
