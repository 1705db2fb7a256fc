"""The gate in front of the application: who may ask, how much, and what the answer's headers say."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, bad_request
from .settings import Settings

KEYED = ("/v1/", "/metrics", "/speculation")
"""Beginnings of the paths that need the key, where there is one: not /health, nor the page."""
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; img-src 'self' data:"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Of every answer. No Access-Control header is among them: other origins cannot read anything."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """Checks a request before the application sees it. It reads the body, whose
    limits would otherwise be found out deep inside the framework."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.encode() not in present
                    ),
                ]
            await send(message)

        try:
            headers = {
                k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]
            }
            self._check(scope, headers)
            try:
                body = await asyncio.wait_for(self._read(receive), self.settings.body_timeout_s)
            except asyncio.TimeoutError:
                raise ApiError(408, "the body took too long to arrive", "timeout") from None
            await self.app(scope, body, sending)
        except ApiError as error:
            if started:  # the answer is on its way: all that is left is to end it
                raise
            close = {"Connection": "close"} if error.status in (408, 413) else {}
            if error.status == 401:
                close["WWW-Authenticate"] = "Bearer"
            await error.response(close)(scope, receive, sending)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise ApiError for a host, a key, a length or a type that will not do."""
        local = (*LOCAL, self.settings.host)
        if self.settings.loopback and _host(headers.get("host", "")) not in local:
            # a page of another site that had its name point here would send its own
            raise ApiError(403, "this host name is not served here", "wrong_host")
        path: str = scope["path"]
        key, given = self.settings.api_key, headers.get("authorization", "")
        if key is not None and path.startswith(KEYED) and not _matches(given, key):
            raise ApiError(401, "no valid API key was given", "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise self._too_large()
        if scope["query_string"] and path.startswith("/v1/"):
            message = "parameters go into the body, not behind the path"
            raise bad_request(message, code="unsupported_parameter")
        if scope["method"] == "POST" and path.startswith("/v1/"):
            # a form of another site can post text without asking; it cannot post JSON
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "the body must be application/json", "unsupported_media_type")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise ApiError(415, "the body must not be compressed", "unsupported_media_type")

    async def _read(self, receive: Receive) -> Receive:
        """Read the whole body, within its limits; a `receive` that gives it and goes on."""
        parts: list[bytes] = []
        taken, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                break
            parts.append(message.get("body", b""))
            taken, more = taken + len(parts[-1]), message.get("more_body", False)
            if taken > self.settings.max_body_bytes:
                raise self._too_large()
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts)}]

        async def receiving() -> Message:
            return whole.pop() if whole else await receive()

        return receiving

    def _too_large(self) -> ApiError:
        most = self.settings.max_body_bytes
        return ApiError(413, f"the body is larger than {most} bytes", "body_too_large")


def _host(header: str) -> str:
    """The host of a Host header, without its port."""
    name = header if header.endswith("]") else header.rsplit(":", 1)[0]
    return name.lower()


def _matches(header: str, key: str) -> bool:
    """True for `Bearer KEY`, in a time that does not tell how much of the key was right."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return same and scheme.lower() == "bearer"


def openapi_security() -> dict[str, Any]:
    """The bearer scheme, for the OpenAPI schema."""
    return {"bearer": {"type": "http", "scheme": "bearer"}}
