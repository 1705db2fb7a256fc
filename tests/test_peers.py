"""Peers of the benchmark: the protocol against a tiny engine, who is found, transformers' own.

Independent truth: an engine whose answers are known, and a model's whole forwards, token by token.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fake import FakeTarget
from speculant.bench import peer_process
from speculant.bench.peer_files import find_gguf, openvino_model
from speculant.bench.peer_process import PeerError, ProcessPeer, decode_ms
from speculant.bench.peer_transformers import Shared, TransformersPeer
from speculant.bench.peers import PEERS, find_peers

ENGINE = """
import os, sys, time

def load(job):
    print("noise on standard output")
    if job.get("broken"):
        raise RuntimeError("no such\\nmodel")
    def run(ids, max_tokens):
        if ids == [13]:
            raise ValueError("thirteen")
        if ids == [99]:
            print("some words", file=sys.stderr)
            print("FatalError: out of everything", file=sys.stderr, flush=True)
            os._exit(3)
        if ids == [60]:
            time.sleep(60)
        tokens = [ids[-1] + i + 1 for i in range(max_tokens)]
        os.write(1, b"more noise, straight to the descriptor\\n")
        return tokens, [(100.0, 1)] + [(100.0 + 7 * i, i + 1) for i in range(1, max_tokens)]
    return f"engine {os.getpid()} {os.environ['FLAG']} {job['model']}", run
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return path


def peer(engine: Path, python: str = sys.executable, **job: Any) -> ProcessPeer:
    told = {"model": "tiny", **job}
    return ProcessPeer("tiny", "float32", (Path(python), engine), lambda: told, {"FLAG": "up"})


def gone(pid: int) -> bool:
    """True when no process has this id: it was ended and waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pid_of(running: ProcessPeer) -> int:
    return int(running.version.split()[1])


def test_time_counts_from_the_end_of_the_first_step() -> None:
    assert decode_ms([(100.0, 1), (110.0, 2), (130.0, 4)]) == 30.0
    # 3 of 7 tokens came with the prefill: 4 in 20 ms, so 6 would take 30
    assert decode_ms([(100.0, 3), (108.0, 5), (120.0, 7)]) == pytest.approx(30.0)
    assert decode_ms([(100.0, 5)]) == 0.0


def test_a_process_loads_runs_and_ends(engine: Path) -> None:
    with peer(engine) as running:
        pid = pid_of(running)
        assert running.version.split()[2:] == ["up", "tiny"]
        assert running.run([5, 8], 4) == ([9, 10, 11, 12], 21.0)
        assert running.run([1], 1) == ([2], 0.0)
        assert not gone(pid)
    assert gone(pid)


def test_a_failed_run_is_one_line_and_the_process_goes_on(engine: Path) -> None:
    with peer(engine) as running:
        with pytest.raises(PeerError, match=r"^tiny: ValueError: thirteen$"):
            running.run([13], 4)
        assert running.run([5], 1)[0] == [6]


def test_a_process_that_dies_says_why(engine: Path) -> None:
    with peer(engine) as running:
        with pytest.raises(PeerError, match=r"^tiny stopped: FatalError: out of everything$"):
            running.run([99], 4)
        with pytest.raises(PeerError, match="not running"):
            running.run([5], 4)


def test_what_does_not_load_leaves_no_process(engine: Path) -> None:
    broken = peer(engine, broken=True)
    with pytest.raises(PeerError, match=r"^tiny: RuntimeError: no such model$"):
        broken.__enter__()
    assert broken._process is None


def test_a_python_that_is_not_there(engine: Path) -> None:
    with pytest.raises(PeerError, match="cannot be run"):
        peer(engine, python="/nowhere/python").__enter__()


def test_no_answer_in_time_ends_it(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peer(engine) as running:
        pid = pid_of(running)
        monkeypatch.setattr(peer_process, "RUN_S", 0.3)
        with pytest.raises(PeerError, match="no answer within"):
            running.run([60], 4)
        assert gone(pid)


def test_several_are_alive_at_once(engine: Path) -> None:
    with ExitStack() as stack:
        running = [stack.enter_context(peer(engine)) for _ in range(2)]
        assert [p.run([3], 2)[0] for p in running] == [[4, 5], [4, 5]]
        pids = [pid_of(p) for p in running]
    assert len(set(pids)) == 2
    assert all(map(gone, pids))


SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip


def save_llama(folder: Path, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    save_llama(made, 1)
    return made


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the peers' environments."""
    place = tmp_path / "venvs"
    monkeypatch.setenv("SPECULANT_PEERS", str(place))
    return place


def greedy(model: LlamaForCausalLM, ids: list[int], count: int, eos: list[int]) -> list[int]:
    """Argmax of whole forwards, one token at a time, up to a stop."""
    out: list[int] = []
    while len(out) < count and not (out and out[-1] in eos):
        with torch.no_grad():
            logits = model(torch.tensor([ids + out]), use_cache=False).logits[0, -1]
        out.append(int(logits.argmax()))
    return out


OPTIONS = [({}, False), ({"prompt_lookup_num_tokens": 4}, False), ({}, True)]


@pytest.mark.parametrize(("options", "is_assisted"), OPTIONS, ids=["plain", "lookup", "assisted"])
def test_transformers_gives_the_models_greedy_text(
    folder: Path, tmp_path: Path, options: dict[str, Any], is_assisted: bool
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    prompt = [5, 9, 30, 5, 9, 30, 5, 9]
    free = greedy(model, prompt, 12, [])
    assert len(set(free)) > 3
    stop = free[6]  # an end in the middle, included as our engine includes it
    save_llama(tmp_path / "draft", 2)
    for eos in ([], [stop]):
        shared = Shared(folder, "float32", "cpu", eos)
        draft = (lambda: tmp_path / "draft") if is_assisted else None
        with TransformersPeer("t", shared, 1, options, draft) as running:
            tokens, ms = running.run(prompt, 12)
        assert tokens == greedy(model, prompt, 12, eos)
        assert ms > 0


def test_what_is_not_installed_is_not_in_the_list(
    folder: Path, venvs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [p.name for p in find_peers(str(folder), FakeTarget(), {}, None, 1)]
    assert names == ["transformers", "transformers prompt-lookup"]
    assert capsys.readouterr().err == ""
    heads = {"vanilla": "anywhere"}
    asked = ["vllm", "transformers assisted", "llama.cpp", "transformers"]
    found = find_peers(str(folder), FakeTarget(), heads, asked, 1)
    assert [p.name for p in found] == ["transformers", "transformers assisted"]
    assert {p.weights for p in found} == {"float32"}
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "speculant: llama.cpp is left out: not installed: make peers-llama",
        "speculant: vllm is left out: not installed: make peers-vllm",
    ]
    with pytest.raises(
        ValueError, match=r"--peers: unknown peer 'llama': the peers are transf.*or none"
    ):
        find_peers(str(folder), FakeTarget(), {}, ["llama"], 1)
    assert find_peers(str(folder), FakeTarget(), {}, [], 1) == []


def test_what_is_installed_needs_its_files(
    folder: Path, venvs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llama", "vllm", "openvino"):
        (venvs / name).mkdir(parents=True)
        (venvs / name / ".installed").touch()
    found = find_peers(str(folder), FakeTarget(), {"eagle3": "a"}, list(PEERS), 2)
    names = [p.name for p in found]
    assert names == ["transformers", "transformers prompt-lookup", "vllm", "vllm ngram",
                     "vllm eagle3", "openvino", "openvino prompt-lookup"]  # fmt: skip
    err = capsys.readouterr().err
    assert f"llama.cpp is left out: needs a GGUF file, and none belongs to {folder}" in err
    assert "openvino assisted is left out: needs a head of kind vanilla" in err
    with pytest.raises(PeerError, match="cannot be run"):  # this one is a folder without a Python
        found[2].__enter__()


def test_the_gguf_of_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    assert find_gguf(place) is None
    (tmp_path / "other.gguf").touch()
    assert find_gguf(place) is None
    (tmp_path / "model.gguf").touch()
    assert find_gguf(place) == tmp_path / "model.gguf"
    (place / "a.gguf").touch()
    assert find_gguf(place) == place / "a.gguf"


@pytest.mark.real
def test_the_bundled_models_gguf(bundled: Path) -> None:
    assert (find_gguf(bundled) or bundled / "none").read_bytes()[:4] == b"GGUF"


def test_a_conversion_is_made_once_and_again_when_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECULANT_CACHE", str(tmp_path / "cache"))
    model, tool = tmp_path / "model", tmp_path / "tool"
    model.mkdir()
    (model / "config.json").write_text("{}")
    tool.write_text('#!/bin/sh\nfor out; do :; done\nmkdir "$out" && echo "$@" > "$out/words"\n')
    tool.chmod(0o755)
    made = openvino_model(model, tool)
    assert f"--model {model}" in (made / "words").read_text()
    tool.write_text("#!/bin/sh\necho gone wrong >&2\nexit 1\n")
    assert openvino_model(model, tool) == made
    (model / "config.json").write_text('{"a": 1}')
    with pytest.raises(PeerError, match="conversion failed: gone wrong"):
        openvino_model(model, tool)
    assert [path.name for path in made.parent.iterdir()] == [made.name]  # nothing half made


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> None:
    """These tests take minutes and gigabytes: they run when they are asked for."""
    if "peers" not in request.config.getoption("markexpr"):
        pytest.skip("make test-peers runs it")


@pytest.mark.peers
@pytest.mark.parametrize("name", list(PEERS))
@pytest.mark.usefixtures("chosen")
def test_an_installed_engine_answers(bundled: Path, name: str) -> None:
    """In float32 with our text; else as long a text, which another rounding may have changed."""
    from speculant import SamplingParams, generate, load_draft, load_target
    from speculant.drafts import bundled_head
    from speculant.request import prompt_ids

    target = load_target("smollm2-135m-instruct")
    heads = {kind: str(bundled_head(kind)) for kind in ("eagle3", "vanilla")}
    found = find_peers(str(bundled), target, heads, [name], 1)
    if not found:
        pytest.skip(f"{name} is not installed here")
    ids = prompt_ids(target, "Explain in a few sentences why the sky is blue.")
    params = SamplingParams(max_tokens=12, temperature=0.0)
    ours = generate(target, load_draft("none", target), ids, params).token_ids
    with found[0] as running:
        tokens, ms = running.run(ids, 12)
    assert ms > 0
    assert tokens == ours or (found[0].weights != "float32" and len(tokens) == len(ours))
