"""Many requests at once: slots, admission, chunked prefill, streaming."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from typing import Any

from .admission import Admission, Lane, Request
from .constraint import Constraint
from .control import Control, Fixed
from .decode import Decoder
from .drafts.base import Draft
from .metrics import Counters
from .request import Completion, Piece, Prompt, check_request, prompt_ids
from .sampling import Random, SamplingParams
from .target.base import Target

PREFILL_CHUNK, PREFILL_ROOM = 64, 256
"""Prompt tokens of one prefill forward on a CPU, and of all between two rounds: large enough to be
compute-bound, small enough that running requests do not stall, and that the kernel attends, whose
results do not depend on the chunks (`attention.FEW`). Elsewhere a chunk takes all of the room."""


class Engine:
    """Continuous batching: requests take slots, join and leave between rounds.

    max_rows:  requests that run at once
    capacity:  most tokens (prompt + output) of a request; at most the target's context
    num_draft_tokens: depth to draft a round; None takes the draft's own
    control:   how deep the first lane drafts a round, instead of num_draft_tokens
    rule:      acceptance rule of sampled chains, "block" or "token"
    others:    further drafts, for requests that choose one: lanes 1, 2, ...; `draft` is lane 0
    reuse:     keep what a finished request left in its slot, for one that begins the same way
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        *,
        max_rows: int = 1,
        capacity: int | None = None,
        num_draft_tokens: int | None = None,
        control: Control | None = None,
        rule: str = "block",
        others: Sequence[Draft] = (),
        reuse: bool = False,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: it must be at least 1")
        context = target.info.context_length
        self.target = target
        self.capacity = min(capacity or context, context)
        most = draft.info.depth
        if num_draft_tokens is not None and most and num_draft_tokens > most:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}: this {draft.info.name} draft was made for "
                f"at most {most}"
            )
        drafts = [copy(each) for each in (draft, *others)]  # per-slot state is this engine's alone
        room = self.capacity + 1 + max(d.info.max_nodes + d.info.max_window for d in drafts)
        self.cache = target.new_cache(max_rows, room)
        self.lanes: list[Lane] = []
        for index, each in enumerate(drafts):
            each.start(max_rows, room)
            decoder = Decoder(target, each, self.cache, rule)
            self.lanes.append(Lane(index, each, decoder, Fixed(each.info.depth)))
        depth = most if num_draft_tokens is None else min(num_draft_tokens, most)
        self.lanes[0].control = control or Fixed(depth)
        self._admission = Admission(target, self.cache, self.capacity, reuse)
        self._running: list[Request] = []
        self._next = self._turn = 0

    @property
    def draft(self) -> Draft:
        """The first lane's draft."""
        return self.lanes[0].draft

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._admission.waiting or self._running)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        counters: Counters | None = None,
        *,
        lane: int = 0,
        num_draft_tokens: int | None = None,
        constraint: Constraint | None = None,
        group: Hashable = None,
    ) -> int:
        """Queue a request; its number. Raises RequestError for a prompt that cannot be served.

        counters:   where to count; by default the request's own
        lane:       which draft serves it; num_draft_tokens: at most so deep, 0 drafts nothing
        constraint: the form its output is held to
        group:      requests of one group take turns with other groups' for admission
        """
        ids = prompt_ids(self.target, prompt)
        counters = Counters() if counters is None else counters
        request = self._request(ids, params, counters, self.lanes[lane])
        request.most, request.constraint = num_draft_tokens, constraint
        self._admission.waiting.push(("alone", request.number) if group is None else group, request)
        return request.number

    def _request(
        self, ids: list[int], params: SamplingParams, counters: Counters, lane: Lane
    ) -> Request:
        """A request, checked, with the next number."""
        eos = frozenset() if params.ignore_eos else self.target.tokenizer.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        check_request(ids, params, stop_ids, self.target.info.vocab_size, self.capacity)
        self._next += 1
        return Request(self._next - 1, ids, params, stop_ids, Random(params.seed), counters, lane)

    def cancel(self, number: int) -> None:
        """Drop a request, waiting or running; its slot is free for the next step."""
        self._admission.waiting.drop(lambda request: request.number == number)
        for request in [r for r in self._running if r.number == number]:
            self._leave(request, sound=False)

    def reroute(self, lane: int, to: int) -> None:
        """Let another lane's draft serve all requests of a lane. It must tap no hidden states."""
        new = self.lanes[to]
        if new.draft.info.taps:
            raise ValueError(f"{new.draft.info.name} needs hidden states from the prompt on")
        for request in (*self._admission.waiting, *self._running):
            if request.lane.index == lane:
                if request.row is not None:
                    if not request.row.asleep:
                        request.lane.draft.close(request.row.slot)
                    request.row.asleep = False
                    new.draft.open(request.row)
                request.lane = new

    def step(self) -> list[Piece]:
        """Admit, prefill about PREFILL_ROOM tokens, run one round; pieces in slot order."""
        self.admit()
        self.prefill()
        return [piece for lane in self.lanes for piece in self.round(lane)]

    def round(self, lane: Lane) -> list[Piece]:
        """One round of a lane's rows whose prompts are cached; pieces in slot order."""
        ready = [r for r in self._running if r.lane is lane and not r.pending]
        if not ready:
            return []
        rows = [request.running for request in ready]
        awake = [row.params for row in rows if not row.asleep]
        lane.control.enter(awake, len(rows) - len(awake))
        drafts = lane.control.drafts
        for request, row in zip(ready, rows, strict=True):
            may = drafts and not row.asleep
            depth = lane.control.budget(row.text.remaining, request.track) if may else 0
            row.budget = depth if request.most is None else min(depth, request.most)
            row.prices = lane.control.prices(request.track)
        pieces = []
        for request, row, step in zip(ready, rows, lane.decoder.round(rows), strict=True):
            error = step.error or (request.constraint and request.constraint.error)
            if error:
                pieces.append(Piece(request.number, "", [], [], None, "error", error))
            else:
                if step.drafted is not None and step.drafted.budget:
                    drafted = step.drafted
                    told = (drafted.depth, len(drafted.path), len(drafted.tokens))
                    lane.control.learn(request.track, *told)
                parts = (step.tokens, step.origins, step.logprobs, row.text.finish_reason)
                text = row.text.release()
                pieces.append(Piece(request.number, text, *parts, drafted=step.drafted))
            if error or row.text.finish_reason:
                self._leave(request, sound=not error)
        return pieces

    def slots(self) -> list[tuple[int, int]]:
        """(request, cache slot) of every running request whose prompt is cached."""
        return [(r.number, r.running.slot) for r in self._running if not r.pending]

    def lengths(self) -> dict[int, int]:
        """Request -> tokens that its row holds, prompt and committed output, of every running one."""
        return {r.number: len(r.running.tokens) for r in self._running}

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
                ids, counters = prompt_ids(self.target, prompt), Counters()
                request = self._request(ids, mine, counters, self.lanes[0])
                self._admission.waiting.push(request.number, request)
                out = Completion(prompt_tokens=len(ids), seed=request.random.seed, metrics=counters)
                done[request.number] = out
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

    def admit(self) -> dict[int, int]:
        """Give free slots to waiting requests. Request -> prompt tokens that need no prefill."""
        admitted = self._admission.admit(self.lanes, self._running)
        for request in admitted:
            request.turn = self._turn
        self._running += admitted
        self._running.sort(key=lambda r: r.running.slot)  # neighbouring slots make one cache view
        return {request.number: request.reused for request in admitted}

    def prefill(self) -> None:
        """Prefill prompts, a chunk each in turn, up to about PREFILL_ROOM tokens."""
        on_cpu = self.target.info.device.type == "cpu"
        room, chunk = PREFILL_ROOM, PREFILL_CHUNK if on_cpu else PREFILL_ROOM
        while waiting := [request for request in self._running if request.pending]:
            self._turn += 1
            for request in sorted(waiting, key=lambda r: (r.turn, r.number)):
                if room <= 0:
                    return
                # chunk edges depend on the prompt alone, so that a row computes what it would alone
                end = request.cached + min(request.pending, chunk)
                request.lane.decoder.prefill(request.running, request.cached, end)
                room -= end - request.cached
                request.cached, request.turn = end, self._turn

    def _leave(self, request: Request, sound: bool) -> None:
        self._running.remove(request)
        self._admission.leave(request, sound)


def generate(
    target: Target,
    draft: Draft,
    prompt: Prompt,
    params: SamplingParams | None = None,
    **options: Any,
) -> Completion:
    """Generate one completion. `options`: num_draft_tokens, control, rule (see `Engine`).

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
