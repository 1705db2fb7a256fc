"""`speculant check --endpoint` against servers of known character: exact ones pass, and each kind of
error is found by the check that should find it.

The servers are real ones on a port of this machine; behind them a small target samples exactly, or
spoilt in one way.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fake import FakeTarget
from speculant.check import endpoint as module
from speculant.check.client import Endpoint, EndpointError
from speculant.check.endpoint import pearson, run_endpoint_checks
from speculant.cli import app

Spoil = Callable[[torch.Tensor, int], torch.Tensor]
"""Probabilities [V] and the number of the generated token -> what the server samples from."""


def exactly(probs: torch.Tensor, number: int) -> torch.Tensor:
    return probs


def too_hot(probs: torch.Tensor, number: int) -> torch.Tensor:
    """Wrong from the second token on, as a broken rejection sampler is."""
    return probs if number == 0 else probs.pow(0.6) / probs.pow(0.6).sum()


class Server:
    """Answers OpenAI's completions for a target. style: how it names tokens."""

    def __init__(
        self, target: FakeTarget, spoil: Spoil = exactly, style: str = "token_ids"
    ) -> None:
        self.target, self.spoil, self.style = target, spoil, style
        self.random = torch.Generator().manual_seed(7)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.drafts: int | None = 5
        self.drafting = True
        self.greedy_error = False

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    def metrics(self) -> str:
        if self.drafts is None:
            return ""
        return f'vllm:spec_decode_num_drafts_total{{model="fake"}} {float(self.drafts)}\n'

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == "fake"
        choices = [self.one(asked) for _ in range(asked.get("n", 1))]
        if self.drafts is not None and self.drafting:
            self.drafts += 1
        return {"choices": choices}

    def one(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = []
        while len(tokens) < asked["max_tokens"]:
            logits = self.logits([*asked["prompt"], *tokens])
            if asked["temperature"] == 0:
                token = int(logits.argmax())
                if self.greedy_error and len(tokens) == 6:
                    token = int(logits.topk(2).indices[1])
            else:
                probs = (logits / asked["temperature"]).softmax(-1)
                probs = self.spoil(probs, len(tokens))
                token = int(torch.multinomial(probs, 1, generator=self.random))
            if token in self.target.tokenizer.eos_ids:
                break  # left out of the answer, as some servers do
            tokens.append(token)
        reason = "length" if len(tokens) == asked["max_tokens"] else "stop"
        choice: dict[str, Any] = {"text": "x", "finish_reason": reason}
        if self.style == "token_ids":
            choice["token_ids"] = tokens
        elif "logprobs" in asked:
            names = {"ids": lambda t: f"token_id:{t}", "text": lambda t: chr(96 + t)}
            choice["logprobs"] = {"tokens": [names[self.style](t) for t in tokens]}
        return choice

    def logits(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = self.target.logits(tokens)[-1].double()
        return self.known[key]


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = server.metrics() if self.path == "/metrics" else json.dumps(server.models())
            self.reply(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(json.dumps(server.complete(asked)))

        def reply(self, body: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *words: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}"
    finally:
        web.shutdown()
        web.server_close()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A small target, unsure enough to tell; two short prompts and short greedy texts."""
    monkeypatch.setattr(module, "PROMPTS", ("a b", "cd"))
    monkeypatch.setattr(module, "GREEDY_TOKENS", 8)
    return FakeTarget(seed=1, sharpness=2.0, vocab_size=32)


def failed(target: FakeTarget, url: str, **options: Any) -> set[str]:
    report = run_endpoint_checks(target, Endpoint(url, target.tokenizer), samples=600, **options)
    return {check.name for check in report.checks if not check.passed}


@pytest.mark.parametrize("style", ["token_ids", "ids", "text"])
def test_an_exact_server_passes(target: FakeTarget, style: str) -> None:
    with serving(Server(target, style=style)) as url:
        temperature = 0.7 if style == "ids" else 1.0
        assert failed(target, f"{url}/v1/", temperature=temperature) == set()


def test_wrong_sampling_behind_the_first_token_is_found(target: FakeTarget) -> None:
    """What stock vLLM 0.32 does on a CPU: greedy and first tokens are right."""
    with serving(Server(target, too_hot)) as url:
        assert failed(target, url) & {"2nd token", "3rd token"}
        assert not failed(target, url) & {"greedy", "1st token"}


def test_another_temperature_is_found(target: FakeTarget) -> None:
    with serving(
        Server(target, lambda probs, number: probs.pow(0.5) / probs.pow(0.5).sum())
    ) as url:
        assert "1st token" in failed(target, url)


def test_another_greedy_text_is_found(target: FakeTarget) -> None:
    server = Server(target)
    server.greedy_error = True
    with serving(server) as url, serving(Server(target)) as plain:
        assert failed(target, url) == {"greedy"}
        baseline = Endpoint(plain, target.tokenizer)
        assert failed(target, url, baseline=baseline) == {"greedy", "baseline"}
        assert failed(target, plain, baseline=baseline) == set()


@pytest.mark.parametrize(
    ("drafts", "drafting", "silent"), [(5, True, False), (5, False, True), (None, True, False)]
)
def test_a_server_that_drafts_nothing_is_told(
    target: FakeTarget, drafts: int | None, drafting: bool, silent: bool
) -> None:
    """By its own counters: an exact answer of a server that does not speculate shows little."""
    server = Server(target)
    server.drafts, server.drafting = drafts, drafting
    with serving(server) as url:
        report = run_endpoint_checks(target, Endpoint(url, target.tokenizer), samples=500)
        assert report.silent is silent
        assert report.passed


def test_pearson_against_its_definition() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.03, 0.02], dtype=torch.float64)
    counts = Counter({0: 40, 1: 40, 2: 15, 3: 4, 4: 1})
    want = 10**2 / 50 + 10**2 / 30 + 0 / 15 + 0 / 5
    assert pearson(counts, probs) == (pytest.approx(want), 3)
    few = Counter(
        {0: 10, 1: 6, 2: 3, 3: 1}
    )  # expects 10, 6, 3, 0.6, 0.4: the last three join the 6
    assert pearson(few, probs) == (pytest.approx(0.0), 1)
    sure = torch.tensor([0.99, 0.01], dtype=torch.float64)
    assert pearson(Counter({0: 49, 1: 1}), sure) == (pytest.approx(0.0), 0)


def test_false_alarms_are_rare() -> None:
    """700 honest experiments: a share of about 0.05 lies above the 95 % point, as chi-square says."""
    scipy = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(0)
    probs = torch.randn(60, generator=random).mul(1.5).double().softmax(0)
    above = 0
    for _ in range(700):
        drawn = torch.multinomial(probs, 60, replacement=True, generator=random).tolist()
        statistic, freedom = pearson(Counter(drawn), probs)
        above += statistic > scipy.chi2.ppf(0.95, freedom)
    assert 0.03 < above / 700 < 0.08


def test_servers_that_are_not_there(target: FakeTarget) -> None:
    with pytest.raises(ValueError, match="is no address of a server"):
        Endpoint("localhost:8000", target.tokenizer)
    with pytest.raises(EndpointError, match="no answer"):
        Endpoint("http://127.0.0.1:9", target.tokenizer)


def test_the_command(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.target.load.load_target", lambda *a, **k: target)

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["check", *words], env={"COLUMNS": "200"})

    with serving(Server(target)) as url, serving(Server(target, too_hot)) as wrong:
        done = run("--endpoint", url, "--samples", "500")
        assert done.exit_code == 0, done.output
        assert "verdict: lossless" in done.stdout
        done = run("--endpoint", wrong, "--samples", "600", "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["passed"] is False
        for words, told in (
            (("--endpoint", url, "--samples", "10"), "needs at least 500"),
            (("--endpoint", url, "--draft", "none"), "--draft goes with a local pair"),
            (("--endpoint", url, "-t", "0"), "temperature is 0.0"),
            (("--endpoint", "here"), "is no address"),
            (("--baseline", url), "go with --endpoint"),
        ):
            done = run(*words)
            assert done.exit_code == 2, done.output
            assert told in done.stderr
            assert done.stderr.count("\n") == 1
