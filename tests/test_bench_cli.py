"""`speculant bench` as a user runs it, on a fake target: its report, its files, its refusals."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fake import FakeTarget
from scripted import Scripted
from speculant.bench import measure, roofline, visitors
from speculant.cli import app
from speculant.commands.bench import command_line
from speculant.drafts import DRAFTS

TASKS = {"talk": ("hello there", "and now"), "maths": ("one and one",), "json": ("brackets",)}
MAX = 6


def until_eos(ids: list[int]) -> list[int]:
    return ids[: ids.index(0) + 1] if 0 in ids else ids


class Neighbour:
    """A peer on the same weights that goes wrong at the third token."""

    name, weights, version = "neighbour", "float32", "1.2"

    def __init__(self, target: FakeTarget) -> None:
        self.target = target

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        out = until_eos(self.target.greedy(prompt_ids, max_tokens))
        out[2:3] = [31 - token for token in out[2:3]]
        return out, 10.0 * len(out)


class Absent(Neighbour):
    """A peer that does not start."""

    name = "absent"

    def __enter__(self) -> Neighbour:
        raise OSError("it is not\nhere")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A fake target behind every name, a draft that is right half the time, and small sizes."""
    made = FakeTarget(seed=4, context_length=4096)

    def build(target: FakeTarget, num_draft_tokens: int = 3, tree: int = 0) -> Scripted:
        def guess(tokens: Sequence[int], budget: int) -> list[int]:
            right = target.greedy(tokens, budget)[:num_draft_tokens]
            return right if len(tokens) % 2 else [(t + 1) % 11 for t in right]

        return Scripted(guess, num_draft_tokens)

    def find(folder: str, target: Any, heads: Any, wanted: Any, threads: int) -> list[Any]:
        unknown = set(wanted or ()) - {"neighbour", "absent"}
        if unknown:
            raise ValueError(f"--peers: unknown peer {unknown.pop()!r}")
        peers = [Neighbour(made), Absent(made)]
        return [p for p in peers if wanted is None or p.name in wanted]

    monkeypatch.setitem(DRAFTS, "eagle3", ("for tests", build))
    monkeypatch.setattr(measure, "load_target", lambda name, weights="": made)
    monkeypatch.setattr(measure, "resolve", lambda name: (Path("nowhere"), name))
    monkeypatch.setattr(measure, "fit_together", lambda folder, weights: True)
    peak = {"peak": 90.0, "weights": 50.0, "cache": 1.0}
    monkeypatch.setattr(measure, "peak_memory", lambda *args: peak)
    monkeypatch.setattr(visitors, "find_peers", find)
    monkeypatch.setattr(visitors, "draft_folders", lambda specs, target: {})
    monkeypatch.setattr(roofline, "parameters", lambda target: 1_000_000)
    monkeypatch.setattr(roofline, "weight_bytes", lambda target, params: 4 * params)
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(roofline, "SQUARE", 16)
    return made


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [
        json.dumps({"question_id": i, "category": task, "turns": turns})
        for i, (task, turns) in enumerate(TASKS.items(), 1)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)], env={"COLUMNS": "120"})


QUICK = ("--max-tokens", MAX, "--runs", 2, "--drafts", "ngram,eagle3@2,eagle3@auto")


def conversations(target: FakeTarget) -> list[list[int]]:
    """Every prompt, by uncached greedy answers."""
    out = []
    for turns in TASKS.values():
        said = ""
        for turn in turns:
            said += ("\n\n" if said else "") + turn
            out.append(target.tokenizer.encode(said))
            answer = until_eos(target.greedy(out[-1], MAX))
            said += "\n\n" + target.tokenizer.decode([i for i in answer if i])
    return out


def test_the_report_counts_what_was_appended(target: FakeTarget, questions: Path) -> None:
    done = run(*QUICK, "--questions", questions, "--json", "-t", "0,1", "--batches", "1,3")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    prompts = conversations(target)
    answers = [until_eos(target.greedy(ids, MAX)) for ids in prompts]
    speeds = {(s["name"], s["temperature"], s["batch"]): s for s in report["speeds"]}
    ours = ("plain", "ngram", "eagle3@2", "eagle3@auto")
    assert set(speeds) == {(n, t, b) for n in ours for t in (0, 1) for b in (1, 3)} | {
        ("neighbour", 0, 1)
    }
    for name in ours:
        one, three = speeds[name, 0, 1], speeds[name, 0, 3]
        assert one["tokens"] == sum(map(len, answers))
        assert one["counters"]["num_emitted_tokens"] == 2 * one["tokens"]
        assert one["agreement"] == {"prompts": 4, "same": 4, "first_difference": {}}
        most = 3 * one["tokens"]  # four prompts, in a group of twelve for a batch of three
        assert most / 2 < three["tokens"] <= most  # the clock stops when the batch empties
        assert three["agreement"]["same"] == 4
        assert set(one["per_task"]) == set(TASKS)
        assert three["per_task"] == {}
    plain = speeds["plain", 0, 1]
    assert plain["counters"]["target_forwards"] == plain["counters"]["num_emitted_tokens"]
    assert speeds["eagle3@2", 0, 1]["counters"]["num_accepted_tokens"] > 0
    peer = speeds["neighbour", 0, 1]
    assert peer["tokens"] == sum(len(a) - 1 for a in answers)
    apart = {key: at for key, at in peer["agreement"]["first_difference"].items() if at == 2}
    assert len(apart) == sum(len(a) > 2 for a in answers)
    expected = 1e2 * sum(len(a) - 1 for a in answers) / sum(map(len, answers))
    assert peer["tokens_per_s"]["median"] == pytest.approx(expected)
    assert report["versions"]["neighbour"] == "1.2"
    assert "absent does not start: it is not here" in report["notes"]
    assert any("repeats questions" in note for note in report["notes"])
    assert [(a["name"], a["temperature"]) for a in report["adapted"]] == [
        ("eagle3@auto", 0), ("eagle3@auto", 1)
    ]  # fmt: skip
    assert report["questions"]["tasks"] == {"talk": 2, "maths": 1, "json": 1}
    assert report["questions"]["prompt_tokens"]["most"] == max(map(len, prompts))
    assert report["roofline"]["read_gb_per_s"] > 0
    assert report["settings"]["command"].startswith("speculant bench ")


def test_the_default_is_one_bundled_question_a_task(target: FakeTarget) -> None:
    done = run("--max-tokens", 2, "--runs", 1, "--drafts", "ngram", "--json", "--no-peers")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["questions"]
    assert found["questions"] == 10 == len(found["tasks"])
    assert found["source"] == "the bundled ones"
    assert found["prompt_tokens"]["most"] > 500


def test_weights_alternate_and_tell_what_rounding_changed(
    target: FakeTarget, questions: Path, tmp_path: Path
) -> None:
    page, data = tmp_path / "report.md", tmp_path / "report.json"
    done = run(*QUICK, "--questions", questions, "--weights", "float32,file", "--limit", 2,
               "--peers", "neighbour", "--out", page, "--out", data)  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(data.read_text())
    assert {s["weights"] for s in report["speeds"]} == {"float32", "file"}
    assert set(report["quality"]) == {"file"}
    assert report["quality"]["file"]["agreement"] == 1.0
    assert set(report["forward"]) == set(report["memory_mb"]) == {"float32", "file"}
    text = page.read_text()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        bars = {line.count("|") for line in table.splitlines()}
        assert len(bars) == 1, table
    plain = next(s for s in report["speeds"] if s["name"] == "plain")
    assert f"| plain | {plain['tokens_per_s']['median']:.1f} |" in text
    assert "Speed: weights file, temperature 0, batch 1" in text
    assert "neighbour (float32): ours at best is" in text
    assert "the others part at token 2 or later" in text
    assert "weights file against float32" in text
    lines = (
        "eagle3@auto, float32",
        "worst task",
        "the best fixed setting",
        "fastest at batch 1, file",
    )
    for line in lines:
        assert line in text
        assert line in " ".join(done.stdout.split())
    assert "neighbour" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.jsonl", "report.json", "report.md"]


def test_targets_that_do_not_fit_together_are_measured_in_turn(
    target: FakeTarget, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "fit_together", lambda folder, weights: False)
    done = run(*QUICK, "--questions", questions, "--weights", "file,float32", "--json")
    report = json.loads(done.stdout)
    assert [s["weights"] for s in report["speeds"] if s["name"] == "plain"] == ["file", "float32"]
    assert sum(s["peer"] for s in report["speeds"]) == 1
    assert any("do not fit into memory together" in note for note in report["notes"])


def test_pictures(target: FakeTarget, questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "plots"
    done = run(*QUICK, "--questions", questions, "--batches", "1,2", "--plots", folder)
    assert done.exit_code == 0, done.output
    names = ("acceptance_by_position", "batch", "forward", "round_time", "speed_by_task")
    assert sorted(p.name for p in folder.iterdir()) == [f"{name}.png" for name in names]
    for path in folder.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000
        assert f"written: {path}" in done.stderr


def test_a_single_batch_has_no_curve(target: FakeTarget, questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    done = run(*QUICK, "--questions", questions, "--batches", "2", "--plots", folder)
    assert done.exit_code == 0, done.output
    assert [p.name for p in folder.iterdir()] == ["forward.png"]
    said = " ".join(done.stdout.split())
    assert "peers are measured at batch 1" in said
    assert "slowest against plain at batch 2" in said


def test_turns_that_do_not_fit_are_left_out(
    target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q.jsonl"
    long = {"question_id": 1, "category": "a", "turns": ["x" * 5000]}
    short = {"question_id": 2, "category": "b", "turns": ["hello"]}
    path.write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n")
    report = json.loads(run(*QUICK, "--questions", path, "--json").stdout)
    assert report["questions"]["skipped"] == [{"question_id": 1, "turn": 1, "tokens": 5000}]
    assert report["questions"]["tasks"] == {"b": 1}
    path.write_text(json.dumps(long) + "\n")
    done = run(*QUICK, "--questions", path)
    assert done.exit_code == 2
    assert "no question leaves room" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--limit", "0"), "--limit is 0"),
        (("--batches", "0"), "--batches: each must be at least 1"),
        (("--batches", "1,x"), "give numbers by commas"),
        (("--batches", ""), "--batches names nothing"),
        (("--temperature", "-1"), "--temperature: each must be a number from 0"),
        (("-t", "nan"), "--temperature"),
        (("--drafts", "ngram,medusa9"), "unknown draft 'medusa9'"),
        (("--drafts", "ngram:8"), "a number of nodes goes with"),
        (("--drafts", "ngram@x"), "a depth from 1"),
        (("--weights", "int3"), "--weights 'int3': must be one of"),
        (("--weights", "int8,int8"), "twice"),
        (("--peers", "somebody"), "unknown peer 'somebody'"),
        (("--peers", "neighbour", "--no-peers"), "contradict"),
        (("--out", "report.txt"), "must end in .json or .md"),
        (("--out", "/no/such/folder/r.md"), "there is no folder"),
        (("--plots", "q.jsonl"), "no folder to write into"),
        (("--plots", "/proc/plots"), "no folder to write into"),
        (("--questions", "missing.jsonl"), "cannot be read"),
        (("--questions", "broken.jsonl"), "broken.jsonl:2: not a question: turns is missing"),
        (("--runs", "0"), "--runs is 0"),
    ],
)
def test_a_mistake_is_one_line(
    target: FakeTarget, questions: Path, args: tuple[str, ...], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(questions.parent)
    first = questions.read_text().splitlines()[0]
    (questions.parent / "broken.jsonl").write_text(
        f'{first}\n{{"question_id": 2, "category": "a"}}'
    )
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert said in done.output
    lines = [line for line in done.output.splitlines() if line.strip()]
    assert lines[-1].startswith("speculant: ")
    assert done.stdout == ""
    assert target.num_forwards == 0


def test_the_command_in_a_report_can_be_run_again() -> None:
    given = {"drafts": "ngram,eagle3@auto", "as_json": True, "no_peers": True, "runs": 3,
             "limit": None, "questions": Path("my questions.jsonl"), "out": [Path("x.md")],
             "plots": None, "threads": 2, "temperatures": "0,1"}  # fmt: skip
    words = shlex.split(command_line(given))
    assert words[:2] == ["speculant", "bench"]
    assert words[2:] == [
        "--drafts", "ngram,eagle3@auto", "--json", "--no-peers", "--runs", "3", "--questions",
        "my questions.jsonl", "--threads", "2", "--temperature", "0,1",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output
    for word in words:
        if word.startswith("--"):
            assert word in shown
