"""Many requests at once: slots, admission, chunked prefill, streaming."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from .control import Fixed
from .decode import Decoder, Row
from .drafts.base import Draft
from .history import History
from .metrics import Counters
from .request import Completion, Piece, Prompt, RequestError, check_request, prompt_ids
from .sampling import Random, SamplingParams
from .target.base import Target
from .text import TextStream

PREFILL_CHUNK = 256
"""Prompt tokens of one prefill forward: large enough to be compute-bound, small enough that
running requests do not stall and no large mask or activation is built."""


@dataclass
class _Request:
    """A request in the queue, and once admitted its row. Nothing large waits in the queue."""

    number: int
    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    random: Random
    counters: Counters
    cached: int = 0  # prompt tokens already prefilled
    row: Row | None = None

    @property
    def pending(self) -> int:
        """Prompt tokens still to prefill; the last one is the first root and never is."""
        return len(self.ids) - 1 - self.cached

    @property
    def running(self) -> Row:
        """The row of an admitted request."""
        assert self.row is not None
        return self.row


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
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: it must be at least 1")
        context = target.info.context_length
        self.target = target
        self.draft = copy(draft)  # its per-slot state is this engine's alone, from `start` on
        self.capacity = min(capacity or context, context)
        most = draft.info.depth
        if num_draft_tokens is not None and most and num_draft_tokens > most:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}: this {draft.info.name} draft was made for "
                f"at most {most}"
            )
        self.control = Fixed(most if num_draft_tokens is None else min(num_draft_tokens, most))
        room = self.capacity + 1 + draft.info.max_nodes + draft.info.max_window
        self.cache = target.new_cache(max_rows, room)
        self.decoder = Decoder(target, self.draft, self.cache, rule)
        self.draft.start(max_rows, room)
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
        eos = frozenset() if params.ignore_eos else self.target.tokenizer.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        check_request(ids, params, stop_ids, self.target.info.vocab_size)
        if len(ids) >= self.capacity:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {self.capacity}: "
                "shorten the prompt"
            )
        counters = Counters() if counters is None else counters
        request = _Request(self._next, ids, params, stop_ids, Random(params.seed), counters)
        self._waiting.append(request)
        self._next += 1
        return request.number

    def cancel(self, number: int) -> None:
        """Drop a request, waiting or running; its slot is free for the next step."""
        self._waiting = deque(r for r in self._waiting if r.number != number)
        for request in [r for r in self._running if r.number == number]:
            self._leave(request)

    def step(self) -> list[Piece]:
        """Admit, prefill about a chunk's worth of prompts, run one round; pieces in slot order."""
        self._admit()
        self._prefill()
        ready = [r for r in self._running if not r.pending]
        if not ready:
            return []
        rows = [request.running for request in ready]
        for row in rows:
            row.budget = self.control.budget(row.text.remaining)
        pieces = []
        for request, row, step in zip(ready, rows, self.decoder.round(rows), strict=True):
            reason = "error" if step.error else row.text.finish_reason
            parts = (step.tokens, step.origins, step.logprobs, reason, step.error)
            pieces.append(Piece(request.number, row.text.release(), *parts))
            if reason:
                self._leave(request)
        return pieces

    def slots(self) -> list[tuple[int, int]]:
        """(request, cache slot) of every running request whose prompt is cached."""
        return [(r.number, r.running.slot) for r in self._running if not r.pending]

    def complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Run prompts to the end, batched; completions in the order of the prompts.

        Raises RequestError before anything runs when a prompt cannot be served, and
        FloatingPointError when the target's logits broke.
        """
        done: dict[int, Completion] = {}
        try:
            for prompt, mine in zip(prompts, params, strict=True):
                number = self.submit(prompt, mine)
                request = self._waiting[-1]
                seed, counters = request.random.seed, request.counters
                done[number] = Completion(
                    prompt_tokens=len(request.ids), seed=seed, metrics=counters
                )
            while any(not out.finish_reason for out in done.values()):
                for piece in self.step():
                    if piece.error:
                        raise FloatingPointError(piece.error)
                    if piece.request in done:
                        done[piece.request].add(piece)
        finally:
            for number, out in done.items():
                if not out.finish_reason:
                    self.cancel(number)
        return list(done.values())

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            info, params, ids = self.target.info, request.params, request.ids
            limit = min(params.max_tokens, self.capacity - len(ids))
            stops = [token for token in request.stop_ids if token < info.vocab_size]
            request.row = Row(
                slot=heapq.heappop(self._free),
                tokens=list(ids),
                params=params,
                random=request.random,
                history=History(params, info.vocab_size, ids, stops, info.device),
                text=TextStream(self.target.tokenizer.decode, params, request.stop_ids, limit),
                counters=request.counters,
            )
            self.draft.open(request.row)
            self._running.append(request)
        self._running.sort(key=lambda r: r.running.slot)  # neighbouring slots make one cache view

    def _prefill(self) -> None:
        """Prefill prompts, oldest first, up to about one chunk's worth of tokens."""
        room = PREFILL_CHUNK
        for request in sorted(self._running, key=lambda r: r.number):
            while request.pending and room > 0:
                # chunk edges depend on the prompt alone, so that a row computes what it would alone
                end = request.cached + min(request.pending, PREFILL_CHUNK)
                self.decoder.prefill(request.running, request.cached, end)
                room -= end - request.cached
                request.cached = end

    def _leave(self, request: _Request) -> None:
        row = request.running
        self._running.remove(request)
        self.cache.truncate(row.slot, 0)
        if not row.text.finish_reason:  # it broke or was cancelled: NaN may lie in its entries
            self.cache.data[:, :, row.slot] = 0
        self.draft.close(row.slot)
        heapq.heappush(self._free, row.slot)


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
            for piece in engine.step():
                if piece.error:
                    raise FloatingPointError(piece.error)
                yield piece
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
