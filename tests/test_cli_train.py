"""`speculant train` and `speculant data` as a user meets them: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.heads.weights import head_kind
from speculant.train.data import find_shards
from speculant.train.shards import Sample, shard_path, write_shard
from speculant.train.state import RunFolder
from test_pipeline import TEMPLATE, tiny_model

QUICK = ("--draft-vocab-size", 200, "--epochs", 1, "--precision", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", template=None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Tell of {i}"}) + "\n" for i in range(4)))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def refused(*words: object, news: int = 0) -> str:
    """The one line that a user's mistake gives, behind so many lines of news."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == news + 1, result.stderr
    assert lines[-1].startswith("speculant: ")
    return lines[-1]


def test_a_head_from_a_file_of_prompts(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("train", "eagle1", "--target", model, "--prompts", prompts, "--out", tmp_path / "h")
    result = run(*words, *QUICK)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'h'}: mean acceptance length 1." in result.stdout
    assert f"try it: speculant eval {tmp_path / 'h'}" in result.stdout
    assert "draft vocabulary 200 of 259" in result.stderr
    assert head_kind(tmp_path / "h") == "eagle1"
    again = run(*words, *QUICK, "--json")
    assert again.exit_code == 0
    told = json.loads(again.stdout)
    assert told["finished"] is True
    assert told["out"] == str(tmp_path / "h")
    assert {"mean_acceptance_length", "conditional", "steps", "answer_tokens"} <= set(told)


def test_ctrl_c_says_how_to_go_on(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunFolder.log

    def interrupted(folder: RunFolder, record: Any) -> None:
        log(folder, record)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "log", interrupted)
    words = ("train", "medusa", "--target", model, "--prompts", prompts, "--out", tmp_path / "h")
    result = run(*words, *QUICK, "--batch-answers", 40)
    assert result.exit_code == 130
    assert "interrupted; the same command goes on from here" in result.stderr
    assert not (tmp_path / "h").exists()
    monkeypatch.setattr(RunFolder, "log", log)
    assert run(*words, *QUICK, "--batch-answers", 40).exit_code == 0
    assert head_kind(tmp_path / "h") == "medusa"


def test_data_alone_and_a_head_from_it(model: Path, prompts: Path, tmp_path: Path) -> None:
    made = run("data", tmp_path / "d", "--target", model, "--prompts", prompts)
    assert made.exit_code == 0, made.output
    assert made.stdout == f"{tmp_path / 'd'}: 4 shards\n"
    assert "GB with the target's states" in made.stderr
    assert "answer tokens, " in made.stderr
    again = run("data", tmp_path / "d", "--target", model, "--prompts", prompts)
    assert again.stdout == made.stdout
    words = ("--target", model, "--data", tmp_path / "d", "--out", tmp_path / "h", *QUICK)
    assert run("train", "vanilla", *words).exit_code == 0
    assert len(find_shards([tmp_path / "d"])) == 4
    assert not (tmp_path / "h.run" / "data").exists()


def test_show_mask_prints_one_sample(model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes"}]
    path.write_text(json.dumps({"messages": talk}))
    out = ("--out", tmp_path / "h")
    result = run("train", "eagle3", "--target", model, "--prompts", path, "--answers", "given",
                 "--show-mask", "--draft-vocab-size", 200, *out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("<user>One?</s><assistant>Yes</s>\n")
    assert "4 of 26 tokens are supervised: the assistant's (green)" in result.stdout
    assert not (tmp_path / "h.run").exists()
    answered = run("train", "eagle3", "--target", model, "--prompts", prompts, "--show-mask", *out)
    assert answered.exit_code == 0
    assert answered.stdout.startswith("<user>Tell of 0</s><assistant>")
    write_shard(shard_path(tmp_path, 0), [Sample([65, 66], [67])])
    stored = run("train", "eagle3", "--target", model, "--data", tmp_path, "--show-mask", *out)
    assert stored.exit_code == 0
    assert "1 of 3 tokens are supervised" in stored.stdout


def test_show_mask_answers_no_more_than_it_needs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculant.engine import Engine

    path, asked = tmp_path / "many.txt", []
    path.write_text("".join(f"Tell of {i}\n" for i in range(400)))
    complete = Engine.complete
    monkeypatch.setattr(
        Engine, "complete", lambda self, p, some: (asked.extend(p), complete(self, p, some))[1]
    )
    result = run("train", "eagle3", "--target", model, "--prompts", path, "--show-mask")
    assert result.exit_code == 0
    assert len(asked) <= 2


def test_wrong_words_are_one_line(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Refused before a model is loaded: its folder is not there."""
    nowhere = ("--target", "/not/there", "--out", tmp_path / "h")
    assert "'eagle4' is not one of eagle3, medusa" in refused("train", "eagle4", *nowhere)
    for budget, told in (("soon", "give a time such as 20m"), ("5s", "at least a minute"),
                         ("0", "at least a minute")):  # fmt: skip
        assert told in refused("train", "eagle3", "--budget", budget, *nowhere)
    assert "needs --prompts" in refused("train", "eagle3", "--answers", "given", *nowhere)
    assert "no folder" in refused("train", "eagle3", "--data", tmp_path / "none", *nowhere)
    assert "no file" in refused("train", "eagle3", "--prompts", tmp_path / "none", *nowhere)
    assert "--init 'zero'" in refused("train", "eagle3", "--init", "zero", *nowhere)
    assert "--taps 'x'" in refused("train", "eagle3", "--taps", "x", *nowhere)
    assert "--answer-tokens is 0" in refused("train", "eagle3", "--answer-tokens", 0, *nowhere)
    assert "--answer-tokens is 0" in refused(
        "data", tmp_path / "d", "--target", "/not/there", "--answer-tokens", 0
    )
    assert "/not/there" in refused("train", "eagle3", "--prompts", prompts, *nowhere)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    words = ("--target", model, "--prompts", prompts, "--out", tmp_path / "mine", *QUICK)
    assert "is no head" in refused("train", "medusa", *words)
    assert (tmp_path / "mine" / "notes.txt").exists()


def test_an_option_that_a_kind_would_ignore_is_refused() -> None:
    """Before anything is loaded: no target is named here."""
    assert "it is for eagle3" in refused("train", "medusa", "--steps", 3)
    assert "it is for eagle3, medusa, vanilla" in refused("train", "eagle1", "--loss", "mixed")
    assert "it is for vanilla" in refused("train", "eagle3", "--layers", 4)
    assert "it is for medusa" in refused("train", "vanilla", "--heads", 2)


def test_a_broken_line_is_named_and_can_be_put_right(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """By another file too: nothing was made of the broken one."""
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "Fine"}\n{"prompt": \n')
    words = ("train", "medusa", "--target", model, "--out", tmp_path / "h", *QUICK)
    assert f"{path}:2: not a prompt" in refused(*words, "--prompts", path)
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "holds no prompt" in refused(*words, "--prompts", tmp_path / "empty.txt")
    assert run(*words, "--prompts", prompts).exit_code == 0


def test_what_the_target_cannot_is_one_line(
    model: Path, base: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ("--prompts", prompts, "--out", tmp_path / "h")
    told = refused("train", "medusa", "--target", model, *words, "--draft-vocab-size", 8192)
    assert "--draft-vocab-size is 8192: the target has 259 tokens" in told
    told = refused("train", "eagle3", "--target", model, *words, *QUICK, "--taps", "1,9")
    assert "the target's layers are 0 to 6" in told
    told = refused("train", "medusa", "--target", base, "--out", tmp_path / "b", *QUICK)
    assert "no chat template" in told
    assert "pass --prompts FILE" in told
    given = ("--answers", "given", *words, *QUICK)
    assert "needs a target with a chat template" in refused(
        "train", "medusa", "--target", base, *given
    )
    assert "no conversation of the file has an assistant's turn" in refused(
        "train", "medusa", "--target", model, *given
    )


def test_a_base_model_trains_on_the_users_texts(base: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--target", base, "--prompts", prompts, "--out", tmp_path / "h")
    assert run("train", "medusa", *words, *QUICK).exit_code == 0


def test_a_run_of_another_kind_is_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--target", model, "--prompts", prompts, "--out", tmp_path / "h", *QUICK)
    assert run("train", "medusa", *words).exit_code == 0
    told = refused("train", "vanilla", *words)
    assert "was begun with kind = medusa, not vanilla: repeat that, or give another --out" in told


def test_data_of_another_target_is_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", layers=8)
    made = run("data", tmp_path / "d", "--target", other, "--prompts", prompts)
    assert made.exit_code == 0
    words = ("--target", model, "--data", tmp_path / "d", "--out", tmp_path / "h", *QUICK)
    assert "its answers are another target's than tiny" in refused("train", "eagle1", *words)
    (tmp_path / "empty").mkdir()
    told = refused("train", "eagle1", "--target", model, "--data", tmp_path / "empty", *QUICK,
                   "--out", tmp_path / "h")  # fmt: skip
    assert "make data first" in told


def test_a_broken_shard_is_named(model: Path, prompts: Path, tmp_path: Path) -> None:
    run("data", tmp_path / "d", "--target", model, "--prompts", prompts)
    shard = shard_path(tmp_path / "d", 2)
    shard.write_bytes(shard.read_bytes()[:60])
    words = ("--target", model, "--data", tmp_path / "d", "--out", tmp_path / "h", *QUICK)
    assert f"{shard}: not a shard" in refused("train", "eagle1", *words)


def test_a_full_disk_is_one_line_and_can_go_on(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    words = ("train", "medusa", "--target", model, "--prompts", prompts, "--out", tmp_path / "h")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = run(*words, *QUICK)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "free some space and go on" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.rglob("*.part"))
    monkeypatch.undo()
    assert run(*words, *QUICK).exit_code == 0


def test_templates_that_supervise_nothing_are_refused(prompts: Path, tmp_path: Path) -> None:
    """An assistant's turn that ends with no EOS: where the mask should end is not known."""
    broken = tiny_model(tmp_path / "m", template=TEMPLATE.replace("</s>", "|"))
    path = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes"}]
    path.write_text(json.dumps({"messages": talk}) + "\n")
    words = ("--target", broken, "--prompts", path, "--answers", "given", "--out", tmp_path / "h")
    told = refused("train", "medusa", *words, *QUICK, news=1)
    assert "ends no assistant's turn with an EOS" in told
