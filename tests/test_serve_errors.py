"""Errors in OpenAI's shape with the right status, as OpenAI's client and a raw socket see them."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import MODEL, Running, byte_tokenizer, raw, serving, tiny_target
from speculant.serve.settings import Settings

TALK: list[Any] = [{"role": "user", "content": "hello"}]
SECRET = "xyzzy-secret-words"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(max_rows=2, max_body_bytes=4096, tasks=("maths",)) as server:
        yield server


def post(running: Running, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """(status, object, headers) of a raw POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(running, "POST", path, data, **{"Content-Type": "application/json", **headers})


def ask(running: Running, method: str, path: str, data: bytes = b"", **headers: str) -> Any:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=10)
    connection.request(method, path, data or None, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text), answer.headers


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": TALK, "max_tokens": 4, **more}


@pytest.mark.parametrize(
    ("extra", "status", "code", "param"),
    [
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"tools": []}, 400, "unsupported_parameter", "tools"),
        ({"best": None}, 400, "unsupported_parameter", "best"),
        ({"max_tokens": "4"}, 422, "invalid_value", "max_tokens"),
        ({"max_tokens": 0}, 422, "invalid_value", "max_tokens"),
        ({"temperature": 2.1}, 422, "invalid_value", "temperature"),
        ({"temperature": True}, 422, "invalid_value", "temperature"),
        ({"top_p": 0}, 422, "invalid_value", "top_p"),
        ({"seed": -1}, 422, "invalid_value", "seed"),
        ({"n": 17}, 422, "invalid_value", "n"),
        ({"messages": []}, 422, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 422, "invalid_value", None),
        ({"messages": [{"role": "user"}]}, 422, "missing_required_parameter", None),
        ({"messages": [{"role": "user", "content": "x", SECRET: 1}]}, 400, None, None),
        ({"logit_bias": {SECRET: 1}}, 422, "invalid_value", None),
        ({"logit_bias": {"5": 101}}, 422, "invalid_value", None),
        ({"logit_bias": {"258": 1}}, 400, "invalid_value", None),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
        ({"return_rounds": True}, 400, "invalid_value", "return_rounds"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded", None),
        ({"speculation": "eagle9"}, 400, "invalid_value", "speculation"),
        ({"speculation": 9}, 400, "invalid_value", "speculation"),
        ({"speculation": -1}, 422, "invalid_value", "speculation"),
        ({"task": "poems"}, 400, "invalid_value", "task"),
        ({"min_tokens": 9}, 400, "invalid_value", None),
        ({"response_format": {"type": "xml"}}, 422, "invalid_value", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            422,
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, None, None),
    ],
)
def test_statuses(
    running: Running, extra: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    got, body, _ = post(running, chat(**extra))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (got, body["error"]["code"]) == (status, code or body["error"]["code"])
    assert param is None or body["error"]["param"] == param
    assert body["error"]["message"].count("\n") == 0
    assert SECRET not in json.dumps(body)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 422),
        (b"null", 422),
        (b"[" * 4000, 400),
        (b'{"a":' * 600 + b"1" + b"}" * 600, 400),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', 400),
        (b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":NaN}', 422),
        (b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1e999}', 422),
        (b'{"model":"tiny","prompt":"a","messages":[],"seed":1' + b"0" * 400 + b"}", 400),
    ],
)  # fmt: skip
def test_malformed_bodies(running: Running, data: bytes, status: int) -> None:
    got, body, _ = post(running, data)
    assert got == status, body
    assert body["error"]["type"] == "invalid_request_error"


def test_a_lone_surrogate_is_no_text(running: Running) -> None:
    body = b'{"model": "tiny", "prompt": "\\ud800"}'
    assert post(running, body, "/v1/completions")[0] == 400


def test_too_large(running: Running) -> None:
    status, body, _ = post(running, chat(messages=[{"role": "user", "content": SECRET * 400}]))
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    chunked = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    )
    chunked += b"Content-Type: application/json\r\nConnection: close\r\n\r\n"
    answer = raw(running.url, chunked + 3 * (b"800\r\n" + b" " * 0x800 + b"\r\n") + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]


def test_openais_client_raises_its_own_errors(running: Running) -> None:
    client = running.client()
    create: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-5", messages=TALK)
    with pytest.raises(openai.BadRequestError, match="not supported") as caught:
        create(model=MODEL, messages=TALK, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    with pytest.raises(openai.UnprocessableEntityError):
        create(model=MODEL, messages=TALK, temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_paths_and_methods(running: Running) -> None:
    assert ask(running, "GET", "/v1/nothing")[0] == 404
    assert ask(running, "GET", "/v1/chat/completions")[0] == 405
    assert ask(running, "GET", "/../../etc/passwd")[0] == 404
    assert ask(running, "GET", "/%2e%2e/app.py")[0] == 404
    assert ask(running, "DELETE", "/health")[0] == 405
    assert ask(running, "POST", "/")[0] == 405
    for path in ("/v1/responses", "/v1/embeddings", "/v1/chat/completions/", "/v1/"):
        status, body, _ = post(running, chat(), path)
        assert (status, body["error"]["code"]) == (404, "not_found"), path
    with pytest.raises(openai.NotFoundError):
        running.client().responses.create(model=MODEL, input="x")


def test_nothing_behind_the_path_and_nothing_compressed(running: Running) -> None:
    """What would be ignored is refused: parameters in the query, an encoding of the body."""
    create: Any = running.client().chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=TALK, max_tokens=2, extra_query={"seed": 1})
    assert caught.value.code == "unsupported_parameter"
    assert ask(running, "GET", "/v1/models?limit=1")[0] == 400
    for encoding, status in (("gzip", 415), ("identity", 200)):
        assert post(running, chat(), **{"Content-Encoding": encoding})[0] == status


def test_without_a_chat_template() -> None:
    tokenizer = byte_tokenizer(template=None)
    target = tiny_target(tokenizer=tokenizer)
    with serving(target) as running:
        status, body, _ = post(running, chat())
        assert (status, body["error"]["param"]) == (400, "messages")
        assert running.client().completions.create(model=MODEL, prompt="a").choices[0].text


def test_keys() -> None:
    with serving(api_key="open-sesame") as running:
        good = {"Authorization": "Bearer open-sesame"}
        for wrong in ("", "Bearer open", "open-sesame", "Basic open-sesame", "Bearer \xe9"):
            status, body, headers = post(running, chat(), Authorization=wrong)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        assert post(running, chat(), **good)[0] == 200
        for path in ("/metrics", "/v1/models", "/speculation"):
            assert ask(running, "GET", path)[0] == 401
        assert ask(running, "GET", "/health")[0] == 200
        assert running.client(api_key="open-sesame").models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.AuthenticationError):
            running.client(api_key="x").models.list()
        schema = ask(running, "GET", "/openapi.json")[1]
        assert schema["security"] == [{"bearer": []}]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculant.serve import security

    seen = []
    real = security.hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: seen.append(1) or real(a, b))
    assert security._matches("Bearer k", "k")
    assert not security._matches("Bearer j", "k")
    assert len(seen) == 2


def test_headers(running: Running) -> None:
    """Of the API, of errors and of the page's files alike; and nothing that opens other origins."""
    for method, path in (("GET", "/health"), ("GET", "/v1/nothing"), ("GET", "/nothing.js")):
        headers = ask(running, method, path, Origin="http://elsewhere.example")[2]
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert "Server" not in headers
    preflight = ask(running, "OPTIONS", "/v1/chat/completions", Origin="http://elsewhere.example")
    assert preflight[0] == 405


def test_other_sites_cannot_post_or_rebind(running: Running) -> None:
    body = json.dumps(chat()).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert post(running, body, **{"Content-Type": kind})[0] == 415
    assert post(running, body, **{"Content-Type": "application/json; charset=utf-8"})[0] == 200
    for host, status in (("evil.example", 403), ("evil.example:8000", 403), ("localhost:1", 200),
                         ("[::1]:80", 200), ("LOCALHOST", 200), ("", 403)):  # fmt: skip
        assert post(running, body, Host=host)[0] == status, host


def test_a_body_that_does_not_arrive() -> None:
    with serving(body_timeout_s=0.3) as running:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        import socket

        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_bug_shows_nothing_of_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as running:

        def bug(asked: Any) -> Any:
            raise RuntimeError(f"/some/path {SECRET}")

        monkeypatch.setattr(type(running.service.reader), "choices", lambda self, asked: bug(asked))
        status, body, _ = post(running, chat())
    assert (status, body["error"]["message"]) == (500, "the server failed on this request")
    assert "path" not in json.dumps(body)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_in_the_log(caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    with caplog.at_level(logging.DEBUG), serving(log_prompts=log_prompts) as running:
        assert post(running, chat(messages=[{"role": "user", "content": SECRET}]))[0] == 200
        post(running, chat(messages=[{"role": "user", "content": SECRET, "x": SECRET}]))
    assert (SECRET in caplog.text) == log_prompts


def test_a_public_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            Settings("m", host=host)
        Settings("m", host=host, api_key="k")
        Settings("m", host=host, allow_public=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.3.4.5"):
        Settings("m", host=host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"max_queue": -1},
        {"api_key": " "},
        {"request_timeout_s": 0.0},
        {"max_body_bytes": 5},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|give"):
        Settings("m", **wrong)
