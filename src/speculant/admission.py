"""From a queued request to a row of the cache and back: slots, what they still hold, and turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cache import KVCache
from .constraint import ConstrainedHistory, Constraint
from .control import Control
from .decode import Decoder, Row
from .drafts.base import Draft
from .history import History
from .metrics import Counters
from .request import FairQueue
from .sampling import Random, SamplingParams
from .slots import Slots, Taken
from .target.base import Target
from .text import TextStream
from .track import Track


@dataclass
class Lane:
    """A draft with the rows that it drafts for. Every lane runs rounds of its own."""

    index: int
    draft: Draft
    decoder: Decoder
    control: Control


@dataclass
class Request:
    """A request in the queue, and once admitted its row. Nothing large waits in the queue."""

    number: int
    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    random: Random
    counters: Counters
    lane: Lane
    most: int | None = None  # deepest draft of a round; None: as the lane's control says
    constraint: Constraint | None = None
    cached: int = 0  # prompt tokens in the cache
    reused: int = 0  # of these, tokens that an earlier request left there
    turn: int = 0  # when it last got a chunk of prefill
    row: Row | None = None
    track: Track = field(default_factory=Track)  # how its drafts have fared

    @property
    def pending(self) -> int:
        """Prompt tokens still to prefill; the last one is the first root and never is."""
        return len(self.ids) - 1 - self.cached

    @property
    def running(self) -> Row:
        """The row of an admitted request."""
        assert self.row is not None
        return self.row


class Admission:
    """Gives the slots of a cache to requests in turn, and takes them back.

    capacity: most tokens (prompt + output) of a request
    reuse:    keep what a finished request left in its slot, for one that begins the same way
    """

    def __init__(self, target: Target, cache: KVCache, capacity: int, reuse: bool) -> None:
        self.target, self.cache, self.capacity, self.reuse = target, cache, capacity, reuse
        self.slots = Slots(len(cache.lengths))
        self.waiting: FairQueue[Request] = FairQueue()

    def admit(self, lanes: list[Lane], running: Sequence[Request]) -> list[Request]:
        """Give free slots to waiting requests, as long as there are both."""
        admitted = []
        load, free = Counter(request.lane.index for request in running), len(self.slots)
        for lane, count in Counter(request.lane.index for request in self.waiting).items():
            load[lane] += min(count, free)
        while self.waiting and self.slots:
            request = self.waiting.pop()
            taken = self.slots.take(request.ids)
            request.row = self._row(request, taken.slot)
            request.row.asleep = _sleeps(request, load[request.lane.index])
            request.reused = request.cached = self._open(request, taken, lanes)
            admitted.append(request)
        return admitted

    def leave(self, request: Request, sound: bool) -> None:
        """Free a request's slot. sound: it ended by itself; else NaN may lie in its row."""
        row, lane = request.running, request.lane
        if self.reuse and sound:
            self.slots.hold(row.slot, row.tokens[:-1], None if row.asleep else lane.index)
            return
        self.cache.truncate(row.slot, 0)
        if not sound:
            used = len(row.tokens) + 1 + lane.draft.info.max_nodes + lane.draft.info.max_window
            self.cache.data[:, :, row.slot, :, :used] = 0
        if not row.asleep:
            lane.draft.close(row.slot)
        self.slots.give(row.slot)

    def _row(self, request: Request, slot: int) -> Row:
        info, params, ids = self.target.info, request.params, request.ids
        limit = min(params.max_tokens, self.capacity - len(ids))
        stops = [token for token in request.stop_ids if token < info.vocab_size]
        parts = (params, info.vocab_size, ids, stops, info.device)
        held_to = request.constraint
        return Row(
            slot=slot,
            tokens=list(ids),
            params=params,
            random=request.random,
            history=ConstrainedHistory(held_to, *parts) if held_to else History(*parts),
            text=TextStream(self.target.tokenizer.decode, params, request.stop_ids, limit),
            counters=request.counters,
        )

    def _open(self, request: Request, taken: Taken, lanes: list[Lane]) -> int:
        """Make the draft and the cache ready for a request; how many tokens need no prefill."""
        row, kept = request.running, 0
        held, draft = taken.held, request.lane.draft
        shared = min(taken.shared, len(row.tokens) - 1) if held and self.reuse else 0
        if held and held.lane == request.lane.index and shared and not row.asleep:
            kept = draft.resume(row, shared)
        else:
            if held and held.lane is not None:
                lanes[held.lane].draft.close(row.slot)
            if not row.asleep:
                draft.open(row)
            slept = held is not None and held.lane is None
            if row.asleep or (slept and not draft.info.taps):
                kept = shared  # nobody needs more than the target's own cache
        self.cache.truncate(row.slot, kept)
        return kept


def _sleeps(request: Request, rows: int) -> bool:
    """Whether a request that begins as one of so many rows of its lane goes without its draft.

    A draft with a window runs it in every row's forward, and is told what came of it.
    """
    if request.lane.draft.info.max_window:
        return False
    return request.most == 0 or request.lane.control.sleeps(request.params, rows)
