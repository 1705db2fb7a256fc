"""Many requests at once: slots, admission, chunked prefill, streaming."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .control import Fixed
from .decode import Decoder, Row, TokenLogprob
from .drafts.base import Draft
from .metrics import Counters
from .sampling import History, Random, SamplingParams
from .target.base import Target
from .text import TextStream

PREFILL_CHUNK = 256
"""Prompt tokens of one prefill forward: large enough to be compute-bound, small enough that
running requests do not stall and no large mask or activation is built."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A user message (or plain text for a model without a chat template), token ids, or messages."""


class RequestError(ValueError):
    """A request that cannot be served; the message is one line for the user."""


@dataclass(frozen=True)
class Piece:
    """What one step added to one request. `text` may lag behind `token_ids`."""

    request: int
    text: str
    token_ids: list[int]
    origins: list[str]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None


@dataclass
class Completion:
    """A finished request.

    text ends before a stop string and leaves out special tokens; token_ids holds every committed
    token, EOS or the one that completed a stop string included.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    seed: int = 0
    metrics: Counters = field(default_factory=Counters)

    def add(self, piece: Piece) -> None:
        """Append what a step gave."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.origins += piece.origins
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        self.finish_reason = piece.finish_reason or ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: text, token_ids, finish_reason, usage, metrics and, where asked, logprobs."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "metrics": self.metrics.as_dict(),
        }
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in self.logprobs
            ]
        return out


@dataclass
class _Request:
    number: int
    row: Row
    prompt_tokens: int
    cached: int = 0  # prompt tokens already prefilled

    @property
    def pending(self) -> int:
        """Prompt tokens still to prefill; the last one is the first root and never is."""
        return self.prompt_tokens - 1 - self.cached


class Engine:
    """Continuous batching: requests take slots, join and leave between rounds.

    max_rows:  requests that run at once
    capacity:  most tokens (prompt + output) of a request; at most the target's context
    num_draft_tokens: depth to draft a round; None takes the draft's own
    rule:      acceptance rule of sampled chains, "block" or "token"
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        *,
        max_rows: int = 1,
        capacity: int | None = None,
        num_draft_tokens: int | None = None,
        rule: str = "block",
    ) -> None:
        context = target.info.context_length
        self.target, self.draft = target, draft
        self.capacity = min(capacity or context, context)
        depth = draft.info.max_nodes if num_draft_tokens is None else num_draft_tokens
        self.control = Fixed(min(depth, draft.info.max_nodes))
        room = self.capacity + 1 + draft.info.max_nodes + draft.info.max_window
        self.cache = target.new_cache(max_rows, room)
        self.decoder = Decoder(target, draft, self.cache, rule)
        draft.start(max_rows, room)
        self._free = list(range(max_rows))
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._next = 0

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._running)

    def submit(
        self, prompt: Prompt, params: SamplingParams, counters: Counters | None = None
    ) -> int:
        """Queue a request; its number. Raises RequestError for a prompt that cannot be served.

        counters: where to count; the engine's own by default (`Engine.counters`).
        """
        ids = prompt_ids(self.target, prompt)
        vocab = self.target.info.vocab_size
        _check_ids(ids, params, vocab)
        if len(ids) >= self.capacity:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {self.capacity}: "
                "shorten the prompt"
            )
        eos = frozenset() if params.ignore_eos else self.target.tokenizer.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        limit = min(params.max_tokens, self.capacity - len(ids))
        row = Row(
            slot=-1,
            tokens=list(ids),
            params=params,
            random=Random(params.seed),
            history=History(params, vocab, ids, (i for i in stop_ids if i < vocab)),
            text=TextStream(self.target.tokenizer.decode, params, stop_ids, limit),
            counters=Counters() if counters is None else counters,
        )
        self._waiting.append(_Request(self._next, row, len(ids)))
        self._next += 1
        return self._next - 1

    def cancel(self, number: int) -> None:
        """Drop a request, waiting or running; its slot is free for the next step."""
        self._waiting = deque(r for r in self._waiting if r.number != number)
        for request in [r for r in self._running if r.number == number]:
            self._leave(request)

    def step(self) -> list[Piece]:
        """Admit, prefill at most one chunk, run one round; what it gave, in slot order."""
        self._admit()
        self._prefill()
        ready = [r for r in self._running if not r.pending]
        if not ready:
            return []
        for request in ready:
            request.row.budget = self.control.budget(request.row.text.remaining)
        steps = self.decoder.round([r.row for r in ready])
        pieces = []
        for request, step in zip(ready, steps, strict=True):
            text = request.row.text
            parts = (step.tokens, step.origins, step.logprobs, text.finish_reason)
            pieces.append(Piece(request.number, text.release(), *parts))
            if text.finish_reason:
                self._leave(request)
        return pieces

    def slots(self) -> list[tuple[int, int]]:
        """(request, cache slot) of every running request whose prompt is cached."""
        return [(r.number, r.row.slot) for r in self._running if not r.pending]

    def counters(self, number: int) -> Counters:
        """Counters of a waiting or running request."""
        return next(r.row.counters for r in [*self._running, *self._waiting] if r.number == number)

    def complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Run prompts to the end, batched; completions in the order of the prompts."""
        done: dict[int, Completion] = {}
        for prompt, mine in zip(prompts, params, strict=True):
            number = self.submit(prompt, mine)
            row = self._waiting[-1].row
            done[number] = Completion(
                prompt_tokens=len(row.tokens), seed=row.random.seed, metrics=row.counters
            )
        while self.busy:
            for piece in self.step():
                if piece.request in done:
                    done[piece.request].add(piece)
        return list(done.values())

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.row.slot = heapq.heappop(self._free)
            self.draft.open(request.row)
            self._running.append(request)
        self._running.sort(key=lambda r: r.row.slot)  # neighbouring slots make one cache view

    def _prefill(self) -> None:
        """Prefill prompts, oldest first, up to one chunk's worth of tokens."""
        room = PREFILL_CHUNK
        for request in sorted(self._running, key=lambda r: r.number):
            while request.pending and room > 0:
                # chunk edges depend on the prompt alone, so that a row computes what it would alone
                end = request.cached + min(request.pending, PREFILL_CHUNK)
                self.decoder.prefill(request.row, request.cached, end)
                room -= end - request.cached
                request.cached = end

    def _leave(self, request: _Request) -> None:
        slot = request.row.slot
        self._running.remove(request)
        self.cache.truncate(slot, 0)
        self.draft.close(slot)
        heapq.heappush(self._free, slot)


def prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a string is a user message where the model has a chat template."""
    tokenizer = target.tokenizer
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty: give at least one character")
        if tokenizer.has_chat_template:
            return tokenizer.chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token or message")
    if isinstance(prompt[0], Mapping):
        if not tokenizer.has_chat_template:
            raise RequestError(f"{target.info.name} has no chat template: pass text or token ids")
        return tokenizer.chat([dict(message) for message in prompt])  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def _check_ids(ids: Sequence[int], params: SamplingParams, vocab: int) -> None:
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    for name, tokens in (("prompt", ids), ("logit_bias", params.logit_bias)):
        wrong = [t for t in tokens if not 0 <= t < vocab]
        if wrong:
            raise RequestError(f"{name}: token id {wrong[0]} is outside 0..{vocab - 1}")


def generate(
    target: Target,
    draft: Draft,
    prompt: Prompt,
    params: SamplingParams | None = None,
    **options: Any,
) -> Completion:
    """Generate one completion. `options`: num_draft_tokens, rule (see `Engine`).

    Raises RequestError (a ValueError) for a prompt that cannot be served.
    """
    return generate_many(target, draft, [prompt], params, **options)[0]


def generate_many(
    target: Target,
    draft: Draft,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    max_rows: int = 32,
    **options: Any,
) -> list[Completion]:
    """Generate for many prompts, at most `max_rows` at once; completions in the prompts' order."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    ids = [prompt_ids(target, prompt) for prompt in prompts]
    engine = _engine_for(target, draft, ids, params, max_rows, options)
    return engine.complete(ids, params)


def stream(
    target: Target,
    draft: Draft,
    prompt: Prompt,
    params: SamplingParams | None = None,
    counters: Counters | None = None,
    **options: Any,
) -> Iterator[Piece]:
    """Generate piece by piece. Nothing that was yielded is ever taken back.

    counters: filled as the request goes on; `options` as for `generate`.
    """
    params = params or SamplingParams()
    ids = prompt_ids(target, prompt)
    engine = _engine_for(target, draft, [ids], [params], 1, options)
    number = engine.submit(ids, params, counters)
    try:
        while engine.busy:
            yield from engine.step()
    finally:  # the caller may stop early: leave the draft clean
        engine.cancel(number)


def _engine_for(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    max_rows: int,
    options: dict[str, Any],
) -> Engine:
    """An engine with a cache as large as these requests need, and no larger."""
    need = max(
        (len(ids) + mine.max_tokens for ids, mine in zip(prompts, params, strict=True)), default=1
    )
    rows = max(1, min(max_rows, len(prompts)))
    capacity = min(need, target.info.context_length)
    return Engine(target, draft, max_rows=rows, capacity=capacity, **options)
