"""Errors in OpenAI's shape. A body never holds a path, a prompt or what a client sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from .schema import FIELDS

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Status -> the `type` of OpenAI's error object; any other status is an invalid_request_error."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""What a parameter's name may look like to be repeated in an error."""


class ApiError(Exception):
    """An error to answer with. retry_after_s: when trying again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Whether and when to retry. OpenAI's client obeys both."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"X-Should-Retry": "false"} if self.status >= 500 else {}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The whole answer."""
        both = {**self.headers(), **(headers or {})}
        return JSONResponse(self.body(), self.status, both)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: what was asked for cannot be done, or contradicts itself."""
    return ApiError(400, message, code or "invalid_value", param)


def down() -> ApiError:
    """503: the engine's thread has ended."""
    return ApiError(503, "the engine stopped", "engine_stopped")


def leaving() -> ApiError:
    """503: SIGTERM has come."""
    return ApiError(503, "the server is shutting down", "shutting_down", retry_after_s=5)


def broken() -> ApiError:
    """500: the engine failed on this request; the log says why."""
    return ApiError(500, "the engine failed on this request", "engine_error")


def too_complex() -> ApiError:
    """400: a schema that compiled, and then took too much to follow."""
    message = "response_format: the schema is too complex to follow"
    return bad_request(message, "response_format", "schema_too_complex")


def late() -> ApiError:
    """503: the deadline has passed. Trying again would only add to the load."""
    return ApiError(503, "the request took longer than the server allows", "timeout")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """pydantic's errors as one of ours: 400 for no JSON or no such parameter, 422 for a value."""
    worst = min(errors, key=_weight)
    kind, place = worst["type"], [p for p in worst["loc"] if p != "body"]
    if kind == "json_invalid":
        return bad_request("the body is not JSON", code="invalid_json")
    if not place:
        return ApiError(422, "the body must be a JSON object", "invalid_type")
    param = _path(place)
    if kind == "extra_forbidden":
        # a key that a client made up is named at the top level only: deeper ones may be a prompt's
        shown = str(place[0]) if len(place) == 1 and NAME.fullmatch(str(place[0])) else None
        message = f"parameter {shown!r} is not supported" if shown else "unsupported parameter"
        return ApiError(400, message, "unsupported_parameter", shown)
    if kind == "missing":
        return ApiError(422, f"{param} is missing", "missing_required_parameter", param)
    return ApiError(422, f"{param}: {worst['msg']}", "invalid_value", param)


def _weight(error: Mapping[str, Any]) -> int:
    """Which of several errors tells most. Of a union's branches, all but one say: another type."""
    kind = error["type"]
    if kind in ("json_invalid", "extra_forbidden"):
        return 0 if kind == "json_invalid" else 1
    return 3 if kind.endswith("_type") else 2


def _path(place: Sequence[str | int]) -> str:
    """messages.0.content; pydantic's names of a union's branches, and keys of maps, are left out."""
    at = [*place].index("response_format") + 1 if "response_format" in place else len(place)
    named = (*place[:at], *place[at + 1 :])  # its branches are named as their `type`, fields too
    return ".".join(str(part) for part in named if isinstance(part, int) or part in FIELDS)
