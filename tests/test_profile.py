"""`speculant profile`: the file the tuner reads, against an evaluation of the same runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fake import FakeTarget
from scripted import Scripted
from speculant.bench import profile
from speculant.bench.acceptance import Setting, pooled
from speculant.bench.evaluate import evaluate
from speculant.bench.profile import Plan, measure, predictions
from speculant.bench.questions import Question
from speculant.cli import app
from speculant.cost.latency import Measured
from speculant.cost.profile import read_profile
from speculant.drafts import DRAFTS

QUESTIONS = [Question(1, "talk", ("hello there",)), Question(2, "maths", ("one and one",))]
ROWS = (1, 2, 4)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A fake target of a stated size, and a draft that is right every other token."""
    made = FakeTarget(seed=4)

    def build(target: FakeTarget, num_draft_tokens: int = 3, tree: int = 0) -> Scripted:
        def guess(tokens: Any, budget: int) -> list[int]:
            right = target.greedy(tokens, budget)[: min(budget, num_draft_tokens)]
            return right if len(tokens) % 2 else [(t + 1) % 11 for t in right]

        return Scripted(guess, num_draft_tokens, max(0, tree // num_draft_tokens - 1))

    monkeypatch.setitem(DRAFTS, "eagle3", ("for tests", build))
    monkeypatch.setattr(profile, "parameters", lambda target: 1000)
    monkeypatch.setattr(profile, "ROWS", ROWS)
    monkeypatch.setattr("speculant.target.load.load_target", lambda source, **options: made)
    return made


def test_the_file_holds_what_evaluations_count(target: FakeTarget, tmp_path: Path) -> None:
    plan = Plan(("eagle3",), depths=(1, 3), trees=(6,), temperatures=(0.0, 1.0), max_tokens=12,
                batches=(2,), context=5)  # fmt: skip
    found, runs = measure(target, plan, QUESTIONS)
    assert {(t.batch, t.rows) for t in found.forward_ms} == {(b, r) for b in (1, 2) for r in ROWS}
    assert all(t.median_ms > 0 for t in found.forward_ms)
    (draft,) = found.drafts
    assert {(p.batch, p.num_draft_tokens, p.nodes) for p in draft.propose_ms} == {
        (b, *form) for b in (1, 2) for form in ((1, 1), (3, 3), (6, 6))
    }
    settings = [(0.0, 1, 1), (1.0, 1, 1), (0.0, 3, 3), (1.0, 3, 3), (0.0, 6, 6), (1.0, 6, 6)]
    assert [(a.temperature, a.num_draft_tokens, a.nodes) for a in draft.acceptance] == [
        s for s in settings for _ in ("all", "maths", "talk")
    ]
    assert {a.task for a in draft.acceptance} == {"all", "talk", "maths"}
    again = evaluate(
        target, DRAFTS["eagle3"][1](target), QUESTIONS, Setting(0.0, None, 3, 12, batch=1)
    )
    counters = pooled(again.answers)
    mine = next(a for a in draft.acceptance if (a.task, a.temperature, a.nodes) == ("all", 0.0, 3))
    assert mine.mean_acceptance_length == counters.mean_acceptance_length
    assert list(mine.acceptance_per_position) == counters.acceptance_per_position
    assert mine.rounds == counters.target_forwards
    assert mine.drafted_share == counters.num_drafts / counters.target_forwards
    assert [(r.name, r.nodes) for r in runs][:2] == [("none", 0), ("eagle3", 1)]
    rows = predictions(found, runs)
    plain = 1e3 / Measured(found).plain_ms(1)
    assert rows[0]["predicted_tokens_per_s"] == pytest.approx(plain)
    assert len(rows) == len(runs) == 7
    assert all(row["measured_tokens_per_s"] > 0 for row in rows)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, args)])


def test_the_command_writes_a_file_that_the_tuner_reads(target: FakeTarget, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    quick = ("--draft", "eagle3,ngram", "--max-tokens", 6, "--context", 4, "--out", out,
             "--num-draft-tokens", 2, "--trees", "", "-t", "0", "--limit", 2)  # fmt: skip
    done = run(*quick)
    assert done.exit_code == 0, done.output
    assert "as the latency model has it" in done.output
    found = read_profile(out)
    assert [d.name for d in found.drafts] == ["eagle3", "ngram"]
    done = run(*quick, "--json")
    assert json.loads(done.output.splitlines()[-1]).keys() == {"profile", "predictions"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--draft", "nothing"), "unknown draft"),
        (("--draft", "none"), "drafts nothing"),
        (("--draft", ","), "names no draft"),
        (("--num-draft-tokens", "a"), "give numbers by commas"),
        (("--num-draft-tokens", "0"), "at least 1"),
        (("--batches", "0"), "at least 1"),
        (("-t", "-1"), "at least 0"),
        (("--max-tokens", "1"), "at least 2"),
        (("--limit", "0"), "at least 1"),
        (("--out", "/no/such/folder/p.json"), "no folder"),
        (("--dtype", "int8"), "unknown dtype"),
        (("--context", "100000"), "the target holds"),
    ],
)
def test_wrong_inputs_are_one_line(
    target: FakeTarget, tmp_path: Path, args: tuple[str, ...], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
