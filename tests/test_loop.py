"""The training loop: exact resume, signals, order, selection, refusals, a full disk.

Independent truth: an uninterrupted run, scripted scores, and numbers worked out by hand.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from fake import FakeTarget
from speculant.train.data import Batch, Corpus, Item, find_shards, plan
from speculant.train.eagle3 import Eagle3Objective
from speculant.train.features import OnlineFeatures
from speculant.train.loop import Trainer
from speculant.train.losses import Outcome
from speculant.train.settings import LoopSettings, Score, accelerator_for, rate
from speculant.train.shards import Sample, shard_path, write_shard
from speculant.train.state import Progress, RunFolder
from test_eagle import make_head

LOOP: dict[str, Any] = {"batch_answers": 12, "batch_tokens": 64, "warmup": 2, "score_every": 4,
                        "depth": 2, "precision": "float32"}  # fmt: skip
STEPS = 10


def make_shards(folder: Path, target: FakeTarget) -> list[Path]:
    """Two shards of the target's own greedy text, answers of 2 to 8 tokens."""
    for index, count in enumerate((3, 9)):
        samples = []
        for i in range(count):
            prompt = [(7 * i + 3 * j + index) % 31 + 1 for j in range(2 + i % 3)]
            samples.append(Sample(prompt, target.greedy(prompt, 2 + (5 * i) % 7)))
        write_shard(shard_path(folder, index), samples)
    return find_shards([folder])


def objective(target: FakeTarget, **options: Any) -> Eagle3Objective:
    head = make_head(4)
    return Eagle3Objective(head, target, OnlineFeatures(target, head.config.taps), 3, **options)


def trainer(data: Path, folder: Path, mine: Any, **more: Any) -> Trainer:
    """A trainer over the shards of `data`, its run in `folder`."""
    shards = find_shards([data])
    change, report = more.pop("change", {}), more.pop("report", lambda record: None)
    return Trainer(
        mine, Corpus(shards[1:]), Corpus(shards[:1]), LoopSettings(**{**LOOP, **change}),
        RunFolder(folder), accelerator_for("float32"), more.pop("total_steps", STEPS),
        report=report, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


@pytest.fixture(scope="module")
def data(target: FakeTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_shards(folder, target)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / json.loads((folder / "state.json").read_text())["tensors"])


class CrashError(Exception):
    """Stands for a power cut."""


def crash_at(step: int) -> Any:
    def report(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise CrashError

    return report


def signal_at(step: int, number: signal.Signals = signal.SIGINT) -> Any:
    def report(record: dict[str, Any]) -> None:
        if record["step"] == step:
            os.kill(os.getpid(), number)

    return report


@pytest.mark.parametrize(("ema", "single"), [(0.0, 0.0), (0.9, 0.5)])
def test_a_run_that_crashed_goes_on_exactly(
    target: FakeTarget, data: Path, tmp_path: Path, ema: float, single: float
) -> None:
    """Line by line and bit by bit, through a crash behind a checkpoint and a second one."""
    options: dict[str, Any] = {"change": {"ema": ema}}
    whole = trainer(data, tmp_path / "whole", objective(target, single=single), **options)
    assert whole.run()
    for step in (3, 8):  # the crash comes when a step is logged and not yet in a checkpoint
        mine = objective(target, single=single)
        parts = trainer(data, tmp_path / "parts", mine, report=crash_at(step), **options)
        with pytest.raises(CrashError):
            parts.run(checkpoint_s=0.0)
        assert lines(tmp_path / "parts")[-1]["step"] == step
        assert json.loads((tmp_path / "parts" / "state.json").read_text())["step"] == step - 1
    last = trainer(data, tmp_path / "parts", objective(target, single=single), **options)
    assert last.progress.step == 7
    assert last.run()
    want, got = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    assert [record["step"] for record in got] == list(range(1, STEPS + 1))
    assert got == want
    if single:
        depths = [len(record["top1"]) for record in got]
        assert depths[:5] == [1] * 5
        assert max(depths[5:]) == 3
    one, two = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert set(one) == set(two)
    assert any(name.startswith("best.") for name in one)
    assert any(name.startswith("ema.") for name in one) == bool(ema)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert last.progress.best_step == whole.progress.best_step
    for name, p in last.module.named_parameters():
        assert torch.equal(p, whole.module.state_dict()[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_a_step(
    target: FakeTarget, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    mine = trainer(data, tmp_path, objective(target), report=signal_at(4, number))
    assert mine.run() is False
    assert signal.getsignal(number) is before
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 4
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4]
    assert trainer(data, tmp_path, objective(target)).run() is True
    assert [record["step"] for record in lines(tmp_path)] == list(range(1, STEPS + 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl", f"state-{STEPS}.safetensors", "state.json",
    ]  # fmt: skip


def test_a_second_signal_stops_at_once(target: FakeTarget, data: Path, tmp_path: Path) -> None:
    def report(record: dict[str, Any]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(data, tmp_path, objective(target), report=report).run()


def test_a_finished_run_does_nothing(target: FakeTarget, data: Path, tmp_path: Path) -> None:
    assert trainer(data, tmp_path, objective(target), total_steps=3).run()
    before = (tmp_path / "state.json").stat().st_mtime_ns
    again = trainer(data, tmp_path, objective(target), report=crash_at(1))
    assert again.run()
    assert (tmp_path / "state.json").stat().st_mtime_ns == before
    assert again.best


sizes = st.tuples(st.integers(2, 40), st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=700), st.integers(0, 5), st.integers(1, 60),
       st.integers(3, 200))  # fmt: skip
def test_plans(
    lengths: list[tuple[int, int]], seed: int, batch_answers: int, batch_tokens: int
) -> None:
    """Every item once an epoch, limits kept, the same every time, another order every epoch."""
    items = [Item(Path("s"), i, 0, p, a) for i, (p, a) in enumerate(lengths)]
    batches = plan(items, 0, seed, batch_answers, batch_tokens)
    assert sorted(item.index for batch in batches for item in batch) == list(range(len(items)))
    for batch in batches:
        answers, padded = sum(i.answer for i in batch), len(batch) * max(i.length for i in batch)
        assert len(batch) == 1 or (answers <= batch_answers and padded <= batch_tokens)
    assert plan(items, 0, seed, batch_answers, batch_tokens) == batches
    if len(batches) > 8:  # else two orders may well agree
        assert plan(items, 1, seed, batch_answers, batch_tokens) != batches
        assert plan(items, 0, seed + 1, batch_answers, batch_tokens) != batches


def test_plans_put_like_lengths_together() -> None:
    items = [Item(Path("s"), i, 0, 2, 1 + (i * 37) % 100) for i in range(100)]
    batches = plan(items, 0, 0, 10**9, 400)
    padding = sum(len(b) * max(i.length for i in b) for b in batches)
    assert padding < 1.2 * sum(i.length for i in items)


class Scripted:
    """Learns a number; its scores are given beforehand."""

    def __init__(self, scores: Sequence[float] = (), broken_at: int = -1) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(3, 1)
        self.scores, self.broken_at = list(scores), broken_at
        self.shares: list[float] = []
        self.weights: list[Tensor] = []

    def begin(self, share: float, step: int) -> None:
        self.shares.append(share)

    def loss(self, batch: Batch) -> Outcome:
        count = int(batch.answers.sum())
        loss = sum((p - 1).pow(2).sum() for p in self.module.parameters()) * count
        assert isinstance(loss, Tensor)
        if len(self.shares) == self.broken_at:
            loss = loss * torch.nan
        return Outcome(loss, count, ())

    def score(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        self.weights.append(self.module.state_dict()["weight"].clone())
        length = self.scores.pop(0) if self.scores else 1.0
        return torch.full((depth,), 10.0), torch.tensor([10 * (length - 1), 0.0])


def test_the_best_weights_are_kept(data: Path, tmp_path: Path) -> None:
    """Scores at steps 2, 4, 6, 8, 10: the highest counts, a tie keeps the earlier one."""
    mine = Scripted([1.2, 1.7, 1.5, 1.7, 1.1])
    some = trainer(data, tmp_path, mine, change={"score_every": 2, "batch_tokens": 10**6,
                                                 "batch_answers": 10**6})  # fmt: skip
    assert some.run()
    assert some.progress.best_step == 4
    assert some.progress.best_length == pytest.approx(1.7)
    assert torch.equal(some.best["weight"], mine.weights[1])
    assert not torch.equal(some.best["weight"], mine.module.state_dict()["weight"])
    kept = state(tmp_path)
    assert torch.equal(kept["best.weight"], mine.weights[1])
    assert torch.equal(kept["model.weight"], mine.module.state_dict()["weight"])
    scored = {r["step"]: r["mean_acceptance_length"] for r in lines(tmp_path) if "conditional" in r}
    assert scored == pytest.approx({2: 1.2, 4: 1.7, 6: 1.5, 8: 1.7, 10: 1.1})
    assert mine.shares == [i / STEPS for i in range(STEPS)]


def test_with_ema_the_averaged_weights_are_scored_and_kept(data: Path, tmp_path: Path) -> None:
    mine = Scripted([1.5])
    some = trainer(data, tmp_path, mine, change={"ema": 0.5, "lr": 0.1}, total_steps=3)
    start = mine.module.state_dict()["weight"].clone()
    after: list[Tensor] = []
    some.report = lambda record: after.append(mine.module.state_dict()["weight"].clone())
    assert some.run()
    want = start
    for weight, decay in zip(after, (1 / 10, 2 / 11, 3 / 12), strict=True):  # short at first
        want = decay * want + (1 - decay) * weight
    torch.testing.assert_close(some.best["weight"], want)
    torch.testing.assert_close(mine.weights[0], want)
    assert float((after[-1] - want).abs().max()) > 1e-3
    assert torch.equal(mine.module.state_dict()["weight"], after[-1])


def test_a_broken_gradient_names_its_step(data: Path, tmp_path: Path) -> None:
    mine = Scripted(broken_at=3)
    some = trainer(data, tmp_path, mine)
    with pytest.raises(FloatingPointError, match=r"step 3: the gradient is nan: lower --lr"):
        some.run(checkpoint_s=0.0)
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 2
    assert all(bool(t.isfinite().all()) for t in state(tmp_path).values())
    assert trainer(data, tmp_path, Scripted()).run()  # goes on from there


def test_runs_that_do_not_fit_are_refused(target: FakeTarget, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(data, run, objective(target), total_steps=1, extra={"kind": "eagle3"}).run()
    with pytest.raises(ValueError, match="holds a run of another head: give another --out"):
        trainer(data, run, Scripted(), extra={"kind": "eagle3"})
    with pytest.raises(ValueError, match="begun with kind = eagle3, not medusa"):
        trainer(data, run, objective(target), extra={"kind": "medusa"})
    with pytest.raises(ValueError, match=r"begun with lr = 0.001, not 0.5: repeat that"):
        trainer(data, run, objective(target), extra={"kind": "eagle3"}, change={"lr": 0.5})
    folder = RunFolder(run)
    assert folder.begun()["kind"] == "eagle3"
    folder.check({"kind": "eagle3", "lr": 0.001})
    with pytest.raises(ValueError, match="begun with kind = eagle3, not medusa"):
        folder.check({"kind": "medusa"})
    RunFolder(tmp_path / "none").check({"kind": "medusa"})
    name = json.loads((run / "state.json").read_text())["tensors"]
    (run / name).write_bytes((run / name).read_bytes()[:100])  # cut short
    with pytest.raises(ValueError, match=r"state.json: cannot go on from it .*another --out"):
        trainer(data, run, objective(target), extra={"kind": "eagle3"})
    for text in ("{", "[1]", '{"tensors": 3, "settings": {}}'):
        (run / "state.json").write_text(text)
        with pytest.raises(ValueError, match=r"state.json: cannot go on from it"):
            folder.check({})


def test_too_little_data_is_refused(data: Path, tmp_path: Path) -> None:
    some = trainer(data, tmp_path, Scripted())
    some.corpus.items = []
    with pytest.raises(ValueError, match="0 batches for 1 processes: make more data"):
        some.run()


def test_learning_rates_written_out() -> None:
    settings = LoopSettings(lr=2.0, warmup=4, floor=0.1)
    assert [rate(settings, step, 104) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert rate(settings, 4, 104) == pytest.approx(2.0)
    # a quarter of the way down: cos(pi / 4)
    assert rate(settings, 29, 104) == pytest.approx(2 * (0.1 + 0.45 * (1 + math.sqrt(0.5))))
    assert rate(settings, 54, 104) == pytest.approx(1.1)
    assert rate(settings, 104, 104) == pytest.approx(0.2)
    assert rate(settings, 200, 104) == pytest.approx(0.2)
    assert rate(LoopSettings(lr=1.0, warmup=0), 0, 10) == 1.0
    for wrong in ({"lr": 0.0}, {"lr": math.nan}, {"ema": 1.0}, {"batch_answers": 0}):
        with pytest.raises(ValueError):
            LoopSettings(**wrong)
    with pytest.raises(ValueError, match="unknown precision 'half'"):
        accelerator_for("half")


def test_scores_written_out() -> None:
    score = Score((10.0, 6.0, 3.0), (6.0, 3.0, 0.0))
    assert score.mean_acceptance_length == pytest.approx(1.9)
    assert score.conditional == pytest.approx([0.6, 0.5, 0.0])
    assert Score((0.0,), (0.0,)).mean_acceptance_length == 1.0


@pytest.mark.parametrize("place", ["tensors", "json", "log"])
def test_a_full_disk_leaves_the_old_state(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The state of step 2 stays whole and in force, and nothing half written stays behind."""

    def report(record: dict[str, Any]) -> None:
        if record["step"] != 3:
            return
        if place == "tensors":
            monkeypatch.setattr("safetensors.torch.save_file", _half)
        elif place == "json":
            monkeypatch.setattr(Path, "write_text", _half_text)
        else:
            monkeypatch.setattr(RunFolder, "log", lambda folder, line: _half_text(folder.metrics))

    mine = trainer(data, tmp_path, Scripted(), report=report)
    with pytest.raises(OSError):
        mine.run(checkpoint_s=0.0)
    monkeypatch.undo()
    left = {p.name for p in tmp_path.iterdir()}
    step = 3 if place == "log" else 2
    assert left == {"metrics.jsonl", "state.json", f"state-{step}.safetensors"}
    assert trainer(data, tmp_path, Scripted()).run()
    assert [record["step"] for record in lines(tmp_path)] == list(range(1, STEPS + 1))
    assert lines(tmp_path) == _whole(data, tmp_path)


def _whole(data: Path, folder: Path) -> list[dict[str, Any]]:
    trainer(data, folder / "whole", Scripted()).run()
    return lines(folder / "whole")


def _half(tensors: Any, path: Path) -> None:
    """What safetensors does on a full disk: a part of the file, then its own error."""
    from safetensors import SafetensorError

    path.write_bytes(b"half")
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def _half_text(path: Path, text: str = "") -> None:
    with path.open("a") as file:
        file.write('{"st')
    raise OSError(28, "No space left on device")


def test_a_line_that_was_cut_short_is_dropped(data: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        trainer(data, tmp_path, Scripted(), report=crash_at(3)).run(checkpoint_s=0.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    assert trainer(data, tmp_path, Scripted()).run()
    assert [record["step"] for record in lines(tmp_path)] == list(range(1, STEPS + 1))


def test_metrics_without_a_state_are_begun_anew(data: Path, tmp_path: Path) -> None:
    """It stopped before the first checkpoint."""
    with pytest.raises(CrashError):
        trainer(data, tmp_path, Scripted(), report=crash_at(3)).run()
    assert not (tmp_path / "state.json").exists()
    assert trainer(data, tmp_path, Scripted()).progress == Progress(
        STEPS, settings={**vars(LoopSettings(**LOOP))}
    )
    assert RunFolder(tmp_path).records() == []
