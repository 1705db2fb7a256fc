"""Two processes that train together over gloo: one's gradients, and a whole run.

Independent truth: plain autograd over both processes' batches in one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fake import FakeTarget
from test_loop import lines, make_shards, objective, signal_at, trainer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


@pytest.fixture(scope="module")
def data(target: FakeTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_shards(folder, target)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


END = "from speculant.train.settings import end_processes; end_processes()"


def together(code: str) -> list[str]:
    """Run code in two processes that find each other over gloo; what each printed."""
    port, running = str(free_port()), []
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    for rank in ("0", "1"):
        env = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", f"{code}; {END}"]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        done = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], done[0][1] + done[1][1]
    return [out for out, _ in done]


def worker(data: str, out: str) -> None:
    """One of two processes: gradients of its own batch, then a run to the end."""
    torch.set_num_threads(1)
    target, rank = FakeTarget(seed=1), int(os.environ["RANK"])
    mine = trainer(Path(data), Path(out) / "run", objective(target), total_steps=3)
    items = mine.corpus.items
    mine.objective.begin(1.0, 0)
    outcome = mine.backward(([items[1]], [items[0], items[4]])[rank])
    gradients = {n: p.grad for n, p in mine.module.named_parameters() if p.grad is not None}
    save_file(gradients, Path(out) / f"gradients-{rank}.safetensors")
    mine.optimizer.zero_grad(set_to_none=True)
    # the processes' clocks differ: that one wants a checkpoint must be a common decision
    mine.run(checkpoint_s=(1e9, 0.0)[rank])
    save_file(dict(mine.module.state_dict()), Path(out) / f"weights-{rank}.safetensors")
    print(json.dumps({"count": outcome.count, "tokens": mine.progress.tokens}))


def train_worker(model: str, data: str, out: str) -> None:
    """One of two processes that train a head together, the first run stopped by a signal."""
    from speculant.pipeline.run import Watch, train
    from speculant.pipeline.settings import TrainSettings

    torch.set_num_threads(1)
    settings = TrainSettings(
        "medusa", model, Path(out), data=(Path(data),), epochs=2.0, draft_vocab_size=200, heads=2,
        batch_answers=10, ema=0.5, precision="float32",
    )  # fmt: skip
    results, steps = [], []
    for stop in (2, 0):
        report = signal_at(stop)

        def step(record: dict[str, Any], total: int, report: Any = report) -> None:
            steps.append(record["step"])
            report(record)

        result = train(settings, "x", Watch(lambda line: None, lambda news, wanted: None, step))
        results.append([result.finished, result.steps])
    print(json.dumps([results, steps]))


def test_two_processes_have_the_gradient_of_one(
    target: FakeTarget, data: Path, tmp_path: Path
) -> None:
    """Gloo, answers of unlike length: a mean of the processes' means would be another number."""
    done = together(
        f"import test_processes; test_processes.worker({str(data)!r}, {str(tmp_path)!r})"
    )
    news = [json.loads(text.splitlines()[-1]) for text in done]
    single = trainer(data, tmp_path / "one", objective(target))
    single.objective.begin(1.0, 0)  # as the workers
    items = single.corpus.items
    losses = [
        single.objective.loss(single.corpus.batch(part))
        for part in ([items[1]], [items[0], items[4]])
    ]
    assert [n["count"] for n in news] == [part.count for part in losses]
    assert losses[0].count != losses[1].count
    total = losses[0].loss + losses[1].loss
    (total / (losses[0].count + losses[1].count)).backward()
    mean = sum(part.loss.detach() / part.count for part in losses) / 2
    assert abs(float(mean) - float(total.detach()) / sum(p.count for p in losses)) > 1e-3
    for rank in range(2):
        got = load_file(tmp_path / f"gradients-{rank}.safetensors")
        for name, p in single.module.named_parameters():
            assert p.grad is not None
            scale = max(1.0, float(p.grad.abs().max()))
            assert float((got[name] - p.grad).abs().max()) < 1e-6 * scale, name
    weights = [load_file(tmp_path / f"weights-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2, 3]
    assert news[0]["tokens"] == news[1]["tokens"] > 0


def test_two_processes_train_together(target: FakeTarget, tmp_path: Path) -> None:
    """They stop together, go on together, and one of them writes."""
    from speculant.heads.weights import load_head
    from test_pipeline import tiny_model

    model, data, out = tiny_model(tmp_path / "m"), tmp_path / "data", tmp_path / "head"
    make_shards(data, target)
    paths = ", ".join(repr(str(path)) for path in (model, data, out))
    done = together(f"import test_processes; test_processes.train_worker({paths})")
    (results, steps), (others, none) = (json.loads(text.splitlines()[-1]) for text in done)
    assert results == others == [[False, 2], [True, len(steps)]]
    assert steps == list(range(1, len(steps) + 1))
    assert none == []  # only one of them has news
    assert load_head(out).config.training["steps"] == len(steps) > 2
    lines = (tmp_path / "head.run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps
