"""What the routes share: the model, the worker, and the way from a request to its answer."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..target.base import Target
from . import replies
from .asked import Reader
from .errors import ApiError, bad_request, broken
from .grammar import Grammars
from .metrics import ServeMetrics
from .replies import Answer, Head
from .schema import ChatRequest, CompletionRequest
from .settings import Settings
from .ticket import Event, Ticket
from .worker import Worker

log = logging.getLogger("speculant.serve")


class Service:
    """One model, served."""

    def __init__(
        self,
        target: Target,
        worker: Worker,
        reader: Reader,
        metrics: ServeMetrics,
        settings: Settings,
    ) -> None:
        self.target, self.worker, self.reader = target, worker, reader
        self.metrics, self.settings = metrics, settings
        self.grammars: Grammars = reader.grammars
        self.created = int(time.time())

    def model(self, name: str) -> dict[str, Any]:
        """The model object of the API. Raises ApiError (404) for another name."""
        if name != self.settings.model_name:
            raise ApiError(404, "there is no such model here", "model_not_found", "model")
        return {"id": name, "object": "model", "created": self.created, "owned_by": "speculant"}

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Serve a request, whole or as a stream."""
        self.model(asked.model)
        if asked.stream_options is not None and not asked.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if asked.return_rounds and not asked.stream:
            raise bad_request("return_rounds needs stream: true", "return_rounds")
        if asked.task is not None and asked.task not in self.settings.tasks:
            raise bad_request("task: this server knows no such task (see --task)", "task")
        if self.settings.log_prompts:
            log.info("request %r", asked.model_dump(exclude_unset=True))
        choices = await run_in_threadpool(self.reader.choices, asked)
        ticket = Ticket(
            choices,
            group=uuid.uuid4() if asked.user is None else asked.user,
            task=asked.task or "",
            deadline=self.worker.clock() + self.settings.request_timeout_s,
        )
        self.worker.submit(ticket)
        head = self._head(isinstance(asked, ChatRequest))
        if asked.stream:
            chunks = self._chunks(asked, ticket, head)
            limit = self.settings.request_timeout_s + self.settings.body_timeout_s
            return EventStream(chunks, limit, lambda: self.worker.cancel(ticket))
        return await self._whole(ticket, head, request)

    def _head(self, chat: bool) -> Head:
        number = uuid.uuid4().hex
        kind = "chatcmpl" if chat else "cmpl"
        name = self.settings.model_name
        return Head(f"{kind}-{number}", int(time.time()), name, f"speculant-{__version__}", chat)

    def _answers(self, ticket: Ticket, chat: bool) -> dict[int, Answer]:
        tokenizer = self.target.tokenizer
        parts = (chat, self.grammars.token_bytes, tokenizer.decode, self.grammars.eos_ids)
        return {choice.index: Answer(choice, *parts) for choice in ticket.choices}

    async def _whole(self, ticket: Ticket, head: Head, request: Request) -> Response:
        """Wait for every answer, or for the client to go."""
        answers = self._answers(ticket, head.chat)
        gone = asyncio.create_task(_tell_gone(request, ticket))
        try:
            async for event in _events(ticket):
                answers[event.choice.index].add(_piece(event))
        finally:
            gone.cancel()
            self.worker.cancel(ticket)
        body = head.body("", [answer.whole() for answer in answers.values()])
        body["usage"], body["metrics"] = replies.usage(ticket), replies.metrics(ticket)
        return JSONResponse(body)

    async def _chunks(
        self, asked: ChatRequest | CompletionRequest, ticket: Ticket, head: Head
    ) -> AsyncIterator[bytes]:
        """Server-sent events. The last chunk of the stream carries `metrics`."""
        answers = self._answers(ticket, head.chat)
        counted = bool(asked.stream_options and asked.stream_options.include_usage)
        if head.chat:
            for index in answers:
                delta = {"role": "assistant", "content": "", "refusal": None}
                yield _event(head.body(".chunk", [_entry(index, {"delta": delta})]), counted)
        try:
            open_answers = len(answers)
            async for event in _events(ticket):
                piece, answer = _piece(event), answers[event.choice.index]
                before = len(answer.text)
                entries = answer.add(piece)
                text = {"delta": {"content": piece.text}} if head.chat else {"text": piece.text}
                if head.chat and not piece.text:
                    text = {"delta": {}}
                entry = _entry(event.choice.index, text, piece.finish_reason)
                entry["logprobs"] = answer.shown(entries, before)
                body = head.body(".chunk", [entry])
                extra: dict[str, Any] = {"tokens": answer.tokens(piece)}
                if asked.return_rounds:
                    extra["round"] = replies.round_info(piece.drafted, answer.bytes_of)
                body["speculant"] = extra
                open_answers -= piece.finish_reason is not None
                if not open_answers and not counted:
                    body["metrics"] = replies.metrics(ticket)
                yield _event(body, counted)
        except ApiError as error:
            yield b"data: " + to_json(error.body()) + b"\n\n"
            return
        if counted:
            body = head.body(".chunk", [])
            body["usage"], body["metrics"] = replies.usage(ticket), replies.metrics(ticket)
            yield _event(body, False)
        yield b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events that end with the client, or after `limit_s` seconds of slow reading."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], limit_s: float, ended: Callable[[], None]
    ) -> None:
        super().__init__(chunks)
        self.limit_s, self.ended = limit_s, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await asyncio.wait_for(super().__call__(scope, receive, send), self.limit_s)
        finally:
            self.ended()


async def _events(ticket: Ticket) -> AsyncIterator[Event]:
    """Events until every answer is complete. Raises ApiError when one failed."""
    waiting = len(ticket.choices)
    while waiting:
        event = await ticket.events.get()
        if event is None:
            raise ApiError(499, "the client closed the request", "client_closed_request")
        if event.error is not None:
            raise event.error
        waiting -= event.piece is not None and event.piece.finish_reason is not None
        yield event


async def _tell_gone(request: Request, ticket: Ticket) -> None:
    """Put None among a ticket's events when its client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.events.put_nowait(None)


def _piece(event: Event) -> Any:
    if event.piece is None:
        raise broken()
    return event.piece


def _entry(index: int, text: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """An entry in a chunk's `choices`."""
    return {"index": index, **text, "logprobs": None, "finish_reason": reason}


def _event(body: dict[str, Any], counted: bool) -> bytes:
    """A chunk as an event; with include_usage every chunk but the last says `usage: null`."""
    if counted:
        body["usage"] = None
    return b"data: " + to_json(body) + b"\n\n"
