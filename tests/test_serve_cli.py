"""`speculant serve` as a user meets it: a real process, mistakes, and vLLM in its place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner, Result

from serving import byte_tokenizer, wait_until
from speculant.cli import app
from speculant.serve.launch import speculative_config
from test_load import tiny_llama

HERE = Path(__file__).parent


def run(*args: object, **env: str) -> Result:
    words = ["serve", *map(str, args)]
    return CliRunner().invoke(app, words, prog_name="speculant", env={"COLUMNS": "100", **env})


def fails(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"speculant: [^\n]+\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--draft", "nonsense"), ["unknown draft"]),
        (("--host", "0.0.0.0"), ["--host 0.0.0.0", "--api-key", "--allow-public"]),
        (("--port", "70000"), ["--port is 70000"]),
        (("--max-rows", "0"), ["--max-rows is 0"]),
        (("--context", "0"), ["--context is 0"]),
        (("--max-queue", "-1"), ["--max-queue is -1"]),
        (("--request-timeout", "0"), ["--request-timeout is 0"]),
        (("--engine", "llama"), ["unknown engine 'llama'", "vllm"]),
        (("--tensor-parallel-size", "2"), ["no such option", "--tensor-parallel-size"]),
        (("extra",), ["no such option or argument: extra"]),
        (("--dry-run",), ["--dry-run goes with --engine vllm"]),
        (("--rule", "loose"), ["unknown rule"]),
        (("--offer", "nonsense"), ["unknown draft 'nonsense'"]),
        (("--offer", "ngram:8"), ["--offer ngram:8", "nodes"]),
        (("--api-key", "é"), ["--api-key"]),
        (("--engine", "vllm", "--draft", "lookahead"), ["vLLM has no such method"]),
        (("--engine", "vllm", "--draft", "vanilla"), ["--draft-model"]),
        (("--engine", "vllm", "--tree", "8", "--draft", "ngram"), ["vLLM drafts chains"]),
        (("--engine", "vllm", "--host", "0.0.0.0"), ["--api-key"]),
        (("--engine", "vllm", "--adaptive"), ["--adaptive is our engine's"]),
        (("--engine", "vllm", "--max-rows", "4"), ["--max-rows is our engine's"]),
        (("--engine", "vllm", "--no-prefix-reuse"), ["--prefix-reuse is our engine's"]),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: list[str]
) -> None:
    monkeypatch.setattr("speculant.target.load.resolve", lambda source: (Path("/m"), "m"))
    fails(run(*args), 2, *words)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "speculant.commands.serve.find_spec",
        lambda name: None if name in ("fastapi", "llguidance") else real(name),
    )
    fails(run(), 2, "fastapi, llguidance", "pip install 'speculant[serve]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 258, "max_position_embeddings": 512}
    ends = {"bos_token_id": 256, "eos_token_id": 257}
    tiny_llama(**sizes, **ends).save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    config = {"chat_template": tokenizer.template, "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


class Process:
    """`speculant serve` in a process of its own, until a line tells its address."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "speculant.cli", "serve", "--port", "0", "--threads", "1"]
        self.child = subprocess.Popen(
            [*command, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.child.stdout is not None
        self.line = self.child.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", self.line)
        assert found, self.child.communicate()[1]
        self.url = found[0]
        wait_until(lambda: self.healthy(), 30)

    def healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health").status_code == 200
        except httpx2.TransportError:
            return False

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    started = Process(
        "--target", folder, "--context", "300", "--offer", "lookahead", "--max-rows", 2,
        "--adaptive",
    )  # fmt: skip
    yield started
    started.child.kill()
    started.child.wait()


def test_a_real_process(process: Process) -> None:
    """It answers; SIGTERM lets a running stream end whole, and the process ends with 0."""
    client = process.client()
    model = client.models.list().data[0].id
    assert model == "tiny"
    assert process.line.startswith("tiny at http://127.0.0.1:")
    offered = httpx2.get(f"{process.url}/speculation").json()["drafts"]
    names = [d["name"] for d in offered]
    assert names == ["ngram", "lookahead", "none"]
    assert [bool(d["round_ms"]) for d in offered] == [True, True, False]
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": model, "messages": talk, "max_tokens": 250}
    texts = {
        client.chat.completions.create(
            **asked, temperature=0, extra_body={"speculation": name}
        ).choices[0].message.content
        for name in names
    }  # fmt: skip
    assert len(texts) == 1
    stream = iter(
        client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    )
    next(stream)
    process.child.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert process.child.wait(20) == 0
    assert process.child.stderr is not None
    assert process.child.stderr.read() == ""


def test_a_taken_port_is_one_line(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(run("--target", folder, "--port", port), 1, f"port {port}", "in use")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 8}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "medusa", "architectures": ["MedusaModel"]}, "medusa"),
    ],
)
def test_configurations_for_vllm(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert speculative_config(str(tmp_path), None, 4, None) == {
        "method": method, "model": str(tmp_path), "num_speculative_tokens": 4,
    }  # fmt: skip


def test_vllm_is_run_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the vllm command notes what it was called with; the key is in no argument."""
    note = tmp_path / "note.json"
    script = tmp_path / "vllm"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], os.environ.get('VLLM_API_KEY')], open({str(note)!r}, 'w'))\n"
    )
    script.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPECULANT_API_KEY": "secret"}
    command = [
        sys.executable,
        "-m",
        "speculant.cli",
        "serve",
        "--engine",
        "vllm",
        "--target",
        model,
    ]
    more = ["--draft", "ngram", "-n", "5", "--host", "0.0.0.0", "--tensor-parallel-size", "2"]
    subprocess.run(
        [*map(str, command), *more, "--pipeline-parallel-size", "3"], env=env, check=True
    )
    words, key = json.loads(note.read_text())
    assert words[:2] == ["serve", str(model)]
    assert key == "secret"
    assert "secret" not in " ".join(words)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }  # fmt: skip
    assert words[-4:] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"]


def test_vllm_is_shown_no_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads every safetensors file of a folder, and stops at ours."""
    from speculant.target.quantised import FILE

    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", FILE):
        (model / name).write_text("x")
    monkeypatch.setenv("SPECULANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("speculant.target.load.resolve", lambda source: (model, "m"))
    monkeypatch.setattr("speculant.serve.launch.shutil.which", lambda name: "/bin/vllm")
    monkeypatch.setattr("speculant.serve.launch._interpreter", lambda script: None)
    out = run("--engine", "vllm", "--draft", "none", "--dry-run")
    folder = Path(json.loads(out.stdout)["command"][2])
    # vLLM loads every *.safetensors of a folder
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert (folder / "config.json").read_text() == "x"


def test_vllm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("speculant.target.load.resolve", lambda source: (tmp_path, "m"))
    monkeypatch.setattr("speculant.serve.launch.shutil.which", lambda name: None)
    monkeypatch.setattr("speculant.serve.launch.sys.executable", str(tmp_path / "python"))
    fails(run("--engine", "vllm"), 1, "vLLM is not installed")
    out = run("--engine", "vllm", "--draft", "none", "--dry-run", "--max-num-seqs", 4)
    told = json.loads(out.stdout)
    assert told["speculative_config"] is None
    assert told["command"][:3] == ["vllm", "serve", str(tmp_path)]
    assert told["command"][-2:] == ["--max-num-seqs", "4"]
