"""The routes. Bodies are checked by `schema`, access by `security.Guard`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..adaptive import ByLoad
from ..control import Control
from ..drafts import DRAFTS
from .errors import ApiError, from_validation
from .schema import ChatRequest, CompletionRequest, ErrorBody
from .security import Guard, openapi_security
from .service import Service

PAGE = Path(__file__).parent / "page"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


def create_app(service: Service) -> FastAPI:
    """The application of a service, whose worker starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        import asyncio

        service.worker.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            service.worker.stop()

    app = FastAPI(
        title="Speculant",
        version=__version__,
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect is no answer in OpenAI's shape
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.add_middleware(Guard, settings=service.settings)
    _errors(app)
    _routes(app, service)
    _describe(app, service)
    # not a mount, which would answer 404 where a path exists and the method does not
    files = StaticFiles(directory=PAGE, html=True, check_dir=False)

    async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            raise HTTPException(404)  # whatever the method: files would answer a POST with 405
        await files(scope, receive, send)

    app.router.default = elsewhere
    return app


def _routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=STREAMS, response_class=JSONResponse)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """The assistant's next turn of a conversation."""
        return await service.answer(asked, request)

    @app.post("/v1/completions", responses=STREAMS, response_class=JSONResponse)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """How a text goes on."""
        return await service.answer(asked, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [service.model(service.settings.model_name)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The model by its name."""
        return service.model(model)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while requests are taken, else 503."""
        if service.worker.dead:
            raise ApiError(503, "the engine stopped", "engine_stopped")
        if service.worker.draining:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        usable = {name: h.reason is None for name, h in service.worker.health.items()}
        service.metrics.drafts(usable)
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/speculation")
    async def speculation() -> dict[str, Any]:
        """The drafts that a request may choose, and what the page needs to know."""
        return describe(service)


def describe(service: Service) -> dict[str, Any]:
    """Model, limits and drafts. depth: most tokens deep; nodes: most tokens of a round; round_ms:
    rows at once -> what a round of each depth costs, by --adaptive's measurement; null: fixed."""
    drafts = []
    lanes = zip(service.worker.lanes, service.worker.engine.lanes, strict=True)
    for name, lane in lanes:
        info, health = lane.draft.info, service.worker.health[name]
        text = DRAFTS[info.name][0] if info.name in DRAFTS else info.name
        parts = {"name": name, "draft": info.name, "description": text}
        depth, tree = service.reader.drafts[name], info.max_nodes > info.depth
        sizes = {"depth": depth, "nodes": info.max_nodes, "tree": tree}
        state = {"enabled": health.reason is None, "reason": health.reason}
        drafts.append({**parts, **sizes, **state, "round_ms": _round_ms(lane.control)})
    return {
        "model": service.settings.model_name,
        "chat": service.target.tokenizer.has_chat_template,
        "context": service.reader.capacity,
        "default": service.worker.lanes[0],
        "drafts": drafts,
        "tasks": list(service.settings.tasks),
    }


def _round_ms(control: Control) -> dict[int, dict[int, float]] | None:
    if not isinstance(control, ByLoad):
        return None
    return {
        rows: {d: round(ms, 3) for d, ms in zip(costs.depths, costs.round_ms(), strict=True)}
        for rows, costs in control.tables.items()
    }


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this path", 405: "this method is not allowed here"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = words.get(error.status_code, "the request could not be read")
        return ApiError(error.status_code, message, code).response(error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed on this request", "internal_error").response()


def _describe(app: FastAPI, service: Service) -> None:
    """The OpenAPI schema, with the key where one is needed."""
    if service.settings.api_key is None:
        return
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = openapi_security()
        schema["security"] = [{"bearer": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
