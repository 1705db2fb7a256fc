"""What goes wrong while requests run: clients that leave, full queues, time, drafts, shutdown."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest

from serving import (
    MODEL,
    TALK,
    VOCAB,
    ask,
    byte_tokenizer,
    plain,
    serving,
    slow,
    tiny_target,
    usual_drafts,
    wait_until,
)
from speculant.engine import generate
from speculant.sampling import SamplingParams


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_round(stream: bool) -> None:
    target = slow(0.05)
    with serving(target, plain(target), max_rows=1) as running:
        with pytest.raises(openai.APITimeoutError) if not stream else nullcontext():
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
        real = running.worker.engine.prefill
        worker = running.worker
        chunks: list[int] = []

        def prefill() -> None:
            pending = [r.pending for r in worker.engine._running if r.pending > 256]
            chunks.extend(pending)
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


def test_users_take_turns() -> None:
    """One user's five requests, and then another's one: it is served second."""
    target = slow(0.002)
    with serving(target, plain(target), max_rows=1) as running:
        order: list[str] = []

        def run(user: str) -> None:
            ask(running, user=user, max_tokens=10)
            order.append(user)

        busy = ask(running, max_tokens=100, stream=True)
        next(iter(busy))
        threads = []
        for place, user in enumerate(["many", "many", "many", "many", "many", "one"]):
            threads.append(threading.Thread(target=run, args=(user,)))
            threads[-1].start()
            wait_until(lambda: running.worker._inflight == place + 2)  # noqa: B023
        busy.close()
        for thread in threads:
            thread.join(20)
        assert order[1] == "one"
        assert len(order) == 6


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["queue", "prefill"])
def test_a_client_that_leaves_before_its_first_token(stream: bool, where: str) -> None:
    """In the queue its place is free, in a long prompt its slot, within a forward."""
    target = slow(0.05)
    with serving(target, plain(target), max_rows=1) as running:
        ask(running, max_tokens=1)  # whatever has to be imported first
        busy = ask(running, max_tokens=900, stream=True) if where == "queue" else None
        if busy:
            next(iter(busy))
        target.pace = 0.05 if busy else 0.5
        held = 1 if busy else 0
        prompt: list[Any] = [{"role": "user", "content": "a" * 1000}]
        with pytest.raises(openai.APITimeoutError):
            list(ask(running, messages=prompt, max_tokens=5, stream=stream, timeout=0.7))
        before = target.num_forwards
        wait_until(lambda: running.worker._inflight == held, 5)
        assert target.num_forwards - before <= 3
        target.pace = 0.0
        if busy:
            busy.close()


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
