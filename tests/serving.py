"""A server for tests: a tiny random target with a real tokenizer, in a real uvicorn thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fake import FakeTarget
from speculant.drafts import load_draft
from speculant.drafts.base import Draft
from speculant.serve.build import build_service
from speculant.serve.run import Server, bind, make_server
from speculant.serve.service import Service
from speculant.serve.settings import Settings
from speculant.target.tokenizer import FileTokenizer

MODEL = "tiny"
TALK: list[Any] = [{"role": "user", "content": "hello"}]
VOCAB, EOS = 258, 257
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{{ '<s>assistant:' }}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> FileTokenizer:
    """A token a byte, a mark before every turn (256) and EOS (257)."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return FileTokenizer(backend, frozenset({EOS}), template)


def byte_id(character: str) -> int:
    """The token of an ASCII character."""
    return byte_tokenizer().encode(character)[0]


def tiny_target(seed: int = 1, **more: Any) -> FakeTarget:
    options: dict[str, Any] = {"context_length": 1024, "name": MODEL, "sharpness": 3.0}
    tokenizer: Any = more.pop("tokenizer", None) or byte_tokenizer()
    return FakeTarget(seed, VOCAB, tokenizer=tokenizer, **{**options, **more})


def usual_drafts(target: FakeTarget) -> dict[str, Draft]:
    """n-gram (the default), a small model, and none."""
    small = tiny_target(7, tokenizer=target.tokenizer)
    return {
        "ngram": load_draft("ngram", target),
        "vanilla": load_draft("vanilla", target, model=small, num_draft_tokens=3),
        "none": load_draft("none", target),
    }


@dataclass
class Running:
    """A server that runs."""

    service: Service
    server: Server
    thread: threading.Thread
    url: str

    @property
    def worker(self) -> Any:
        return self.service.worker

    def client(self, **more: Any) -> openai.OpenAI:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 30}
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**options, **more})

    def idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs and nothing waits."""
        wait_until(lambda: not self.worker._live and self.worker._inflight == 0, seconds)


def wait_until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@contextmanager
def serving(
    target: FakeTarget | None = None, drafts: Mapping[str, Draft] | None = None, **more: Any
) -> Iterator[Running]:
    """A server on a free port. more: of `Settings`, or of `build_service`."""
    target = target or tiny_target()
    drafts = usual_drafts(target) if drafts is None else drafts
    mine = {name: more.pop(name) for name in list(more) if name in Settings.__dataclass_fields__}
    settings = Settings(**{"model_name": MODEL, "port": 0, **mine})
    service = build_service(target, drafts, settings, **more)
    bound = bind(settings.host, 0)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    running = Running(service, server, thread, url)
    wait_until(lambda: server.started)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


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


def state(running: Running, name: str) -> dict[str, Any]:
    drafts = httpx2.get(f"{running.url}/speculation").json()["drafts"]
    return next(d for d in drafts if d["name"] == name)  # type: ignore[no-any-return]


def raw(url: str, request: bytes, seconds: float = 10.0) -> bytes:
    """What a server answers to these bytes, until it closes or the time is over."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
