"""What goes wrong while requests run: clients that leave, full queues, time, drafts, shutdown."""

from __future__ import annotations

import concurrent.futures
import math
import socket
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest
import torch
from torch import Tensor

from fake import FakeTarget
from scripted import Sampled, Scripted
from serving import MODEL, VOCAB, Running, byte_tokenizer, serving, tiny_target, wait_until
from speculant.drafts import load_draft
from speculant.drafts.base import DraftRow
from speculant.engine import generate
from speculant.proposal import Proposal
from speculant.sampling import SamplingParams

TALK: list[Any] = [{"role": "user", "content": "hello"}]


class Slow(FakeTarget):
    """Takes its time, so that a test can act while a request runs. `pace`: seconds a forward."""

    pace = 0.01

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        time.sleep(self.pace)
        return super().forward(*args, **kwargs)


def slow(pace: float = 0.01) -> Slow:
    target = Slow(
        1, VOCAB, context_length=1024, name=MODEL, sharpness=3.0, tokenizer=byte_tokenizer()
    )  # type: ignore[arg-type]
    target.pace = pace
    return target


def plain(target: FakeTarget) -> dict[str, Any]:
    return {"none": load_draft("none", target)}


def ask(running: Running, **more: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 20, "temperature": 0}
    extra = {"ignore_eos": True, **more.pop("extra_body", {})}
    return running.client().chat.completions.create(**{**body, **more}, extra_body=extra)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_round(stream: bool) -> None:
    target = slow(0.05)
    with serving(target, plain(target), max_rows=1) as running:
        with pytest.raises(openai.APITimeoutError) if not stream else _nothing():
            if stream:
                left = ask(running, max_tokens=900, stream=True)
                next(iter(left))
                next(iter(left))
                left.close()
            else:
                ask(running, max_tokens=900, timeout=0.3)
        before = target.num_forwards
        running.idle(5)
        assert target.num_forwards - before <= 3
        assert ask(running, max_tokens=2).usage.completion_tokens == 2
        text = running.service.metrics.render().decode()
        assert f'request_failed_total{{model_name="{MODEL}",reason="cancelled"}} 1.0' in text


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def test_a_full_queue_is_429_with_retry_after() -> None:
    target = slow(0.02)
    with serving(target, plain(target), max_rows=1, max_queue=1) as running:
        streams = [ask(running, max_tokens=200, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            ask(running)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.RateLimitError):
            ask(running, n=2)
        for stream in streams:
            stream.close()
        running.idle()
        assert ask(running).usage.completion_tokens == 20


def test_openais_client_retries_after_429() -> None:
    target = slow(0.01)
    with serving(target, plain(target), max_rows=1, max_queue=0) as running:
        busy = ask(running, max_tokens=60, stream=True)
        patient = running.client(max_retries=3)
        out = patient.chat.completions.create(model=MODEL, messages=TALK, max_tokens=3)
        assert out.choices[0].finish_reason in ("length", "stop")
        busy.close()


@pytest.mark.parametrize("stream", [True, False])
def test_requests_have_a_deadline(stream: bool) -> None:
    target = slow(0.02)
    with serving(target, plain(target), max_rows=1, request_timeout_s=0.3) as running:
        began = time.monotonic()
        if stream:
            with pytest.raises(openai.APIError, match="longer than"):
                list(ask(running, max_tokens=900, stream=True))
        else:
            with pytest.raises(openai.InternalServerError) as caught:
                running.client(max_retries=2).chat.completions.create(
                    model=MODEL, messages=TALK, max_tokens=900, extra_body={"ignore_eos": True}
                )
            assert caught.value.status_code == 503
        assert time.monotonic() - began < 3
        running.idle()
        assert ask(running, max_tokens=2).usage.completion_tokens == 2


def test_a_long_prompt_does_not_stall_a_running_stream() -> None:
    """While a prompt of three chunks is prefilled, a stream gets a token a turn."""
    target = slow(0.005)
    with serving(target, plain(target), max_rows=2) as running:
        moments: list[str] = []
        real = running.worker.engine.prefill
        worker = running.worker
        chunks: list[int] = []

        def prefill() -> None:
            pending = [r.pending for r in worker.engine._running if r.pending > 256]
            chunks.extend(pending)
            moments.append("long" if pending else "none")
            real()

        worker.engine.prefill = prefill
        stream = ask(running, max_tokens=100, stream=True)
        seen = iter(stream)
        for _ in range(5):
            next(seen)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            long: list[Any] = [{"role": "user", "content": "a" * 800}]
            later = pool.submit(ask, running, messages=long, max_tokens=2)
            later.result()
        before = len(list(seen))
        assert before > 50
        assert len(chunks) >= 3
        assert all(c - d == 256 for c, d in pairwise(chunks))


def test_admission_takes_turns_between_requests() -> None:
    """A request for 8 answers does not keep a later one waiting for all of them."""
    target = slow(0.002)
    with serving(target, plain(target), max_rows=1) as running:
        order: list[str] = []

        def run(name: str, n: int) -> None:
            ask(running, n=n, max_tokens=10)
            order.append(name)

        first = threading.Thread(target=run, args=("eight", 8))
        first.start()
        wait_until(lambda: running.worker._inflight == 8)
        second = threading.Thread(target=run, args=("one", 1))
        second.start()
        for thread in (first, second):
            thread.join(20)
        assert order == ["one", "eight"]


def test_many_clients_get_what_the_library_gives() -> None:
    """Sixteen at once on four slots, sampled: each as if it were alone."""
    target = tiny_target()
    with serving(target, max_rows=4) as running, concurrent.futures.ThreadPoolExecutor(16) as pool:
        drafts = ("ngram", "vanilla", "none", 2)
        asked = [
            {"seed": i, "temperature": 0.3 * (i % 4), "max_tokens": 10 + i,
             "extra_body": {"speculation": drafts[i % 4]}}
            for i in range(16)
        ]  # fmt: skip
        answers = list(pool.map(lambda more: ask(running, **more), asked))
    from serving import usual_drafts

    for more, out in zip(asked, answers, strict=True):
        given = more["extra_body"]["speculation"]  # type: ignore[index]
        name, depth = ("ngram", given) if isinstance(given, int) else (given, None)
        options = {} if depth is None else {"num_draft_tokens": depth}
        params = {k: v for k, v in more.items() if k != "extra_body"}
        want = generate(
            target, usual_drafts(target)[name], TALK,
            SamplingParams(**params, ignore_eos=True), **options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert out.choices[0].message.content == want.text


def state(running: Running, name: str) -> dict[str, Any]:
    drafts = httpx2.get(f"{running.url}/speculation").json()["drafts"]
    return next(d for d in drafts if d["name"] == name)  # type: ignore[no-any-return]


def test_a_draft_of_which_nothing_is_accepted_is_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tiny_target()
    params = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
    want = generate(target, load_draft("none", target), TALK, params)
    never = next(t for t in range(VOCAB) if t not in want.token_ids)
    drafts = {"wrong": Scripted(lambda tokens, budget: [never], 1), **plain(target)}
    with serving(target, drafts) as running:
        out = ask(running, max_tokens=600)
        assert out.choices[0].message.content == want.text
        assert "draft wrong is switched off" in caplog.text
        told = state(running, "wrong")
        assert (told["enabled"], told["reason"]) == (False, "acceptance")
        again = ask(running, max_tokens=20)
        assert again.metrics["speculative_decoding"]["draft"] == "none"
        text = running.service.metrics.render().decode()
        assert (
            'draft_switched_off_total{draft="wrong",model_name="tiny",reason="acceptance"} 1'
            in text
        )
        assert 'draft_enabled{draft="wrong",model_name="tiny"} 0.0' in text
        running.worker.health["wrong"].off_until = 0.0  # the pause is over
        assert ask(running).metrics["speculative_decoding"]["draft"] == "wrong"


def test_nan_in_a_draft_switches_it_off() -> None:
    target = tiny_target()
    small = tiny_target(7, tokenizer=target.tokenizer)
    small.head.fill_(math.nan)
    drafts = {"vanilla": load_draft("vanilla", target, model=small), **plain(target)}
    with serving(target, drafts) as running:
        params = SamplingParams(max_tokens=200, seed=3, ignore_eos=True)
        want = generate(target, load_draft("none", target), TALK, params)
        out = ask(running, max_tokens=200, seed=3, temperature=1)
        assert out.choices[0].message.content == want.text
        assert state(running, "vanilla")["reason"] == "nan"


def test_a_draft_that_fails_ends_its_rows_alone() -> None:
    target = slow(0.003)

    class Failing(Scripted):
        def propose(self, rows: Sequence[DraftRow]) -> Proposal:
            if any(len(row.tokens) > 60 for row in rows):
                raise RuntimeError("boom")
            return super().propose(rows)

    drafts = {"failing": Failing(lambda tokens, budget: []), **plain(target)}
    with serving(target, drafts, max_rows=4) as running:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = pool.submit(ask, running, max_tokens=200, extra_body={"speculation": False})
            with pytest.raises(openai.InternalServerError) as caught:
                ask(running, max_tokens=100)
            assert caught.value.status_code == 500
            assert "boom" not in str(caught.value)
            assert other.result().usage.completion_tokens == 200
        assert state(running, "failing")["reason"] == "error"
        assert ask(running, max_tokens=100).usage.completion_tokens == 100


def test_a_target_that_breaks_fails_its_request_alone() -> None:
    from fake import Broken

    target: Any = Broken(1, VOCAB, context_length=1024, name=MODEL, tokenizer=byte_tokenizer())  # type: ignore[arg-type]
    target.position = 150
    with serving(target, plain(target), max_rows=2) as running:
        with pytest.raises(openai.InternalServerError):
            ask(running, max_tokens=300)
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(ask(running, max_tokens=300, stream=True))
        assert ask(running, max_tokens=20).usage.completion_tokens == 20
        assert httpx2.get(f"{running.url}/health").status_code == 200


def test_an_engine_that_stops_says_so() -> None:
    target = tiny_target()
    with serving(target, plain(target)) as running:
        ask(running)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise MemoryError

        target.forward = fail  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                ask(running)
        wait_until(lambda: running.worker.dead)
        assert httpx2.get(f"{running.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            ask(running)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_stopped")


def test_shutdown_finishes_what_runs_and_refuses_what_waits() -> None:
    target = slow(0.01)
    with (
        serving(target, plain(target), max_rows=1) as running,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        kept = httpx2.Client()
        assert kept.get(f"{running.url}/health").status_code == 200
        stream = iter(ask(running, max_tokens=100, stream=True))
        next(stream)
        next(stream)
        waiting = pool.submit(ask, running)
        wait_until(lambda: running.worker._inflight == 2)
        running.server.should_exit = True
        with pytest.raises(openai.InternalServerError) as caught:
            waiting.result()
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        running.thread.join(10)
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{running.url}/health")


def test_a_slow_reader_holds_no_slot() -> None:
    target = tiny_target()
    with serving(target, plain(target), max_rows=1) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = b'{"model":"tiny","prompt":"a","max_tokens":300,"ignore_eos":true,"stream":true}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        with socket.socket() as slow_reader:
            slow_reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow_reader.connect((host, int(port)))
            slow_reader.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            assert ask(running, max_tokens=5).usage.completion_tokens == 5
            running.idle()
            whole = b""
            while b"[DONE]" not in whole:
                whole += slow_reader.recv(256)
        assert whole.count(b"data: ") > 300


def test_the_deadline_of_a_worker_that_waits() -> None:
    """A request in the queue is over in time too."""
    target = slow(0.02)
    with serving(target, plain(target), max_rows=1, request_timeout_s=0.5) as running:
        stream = ask(running, max_tokens=900, stream=True)
        with pytest.raises(openai.InternalServerError, match="longer than"):
            ask(running, max_tokens=900)
        stream.close()


def test_sampled_drafts_stay_in_distribution_when_switched_off() -> None:
    """Health is judged by counts of whole rounds, never by a token that was drawn (law 3)."""
    from speculant.serve.health import Health
    from speculant.step import Drafted

    health = Health("d", True, 10**6, time.monotonic)
    bad = Drafted([1], [-1], [], 1)
    assert [health.observe(bad, 5) for _ in range(512)][-2:] == [None, "acceptance"]
    health.switch_off("acceptance")
    assert not health.usable()
    assert health.pause_s == 600
    good = Health("d", True, 10**6, time.monotonic)
    assert all(good.observe(Drafted([1], [-1], [0], 1), 5) is None for _ in range(2000))
    silent = Health("d", True, 100, time.monotonic)
    none = Drafted([], [], [], 4)
    assert all(silent.observe(none, 200) is None for _ in range(500))  # beyond its context
    assert [silent.observe(none, 5) for _ in range(128)][-1] == "nan"
    assert all(silent.observe(Drafted([], [], [], 0), 5) is None for _ in range(500))
    assert isinstance(Sampled(lambda tokens: torch.ones(3)), Scripted)
