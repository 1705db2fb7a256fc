"""The one thread that runs the engine. Requests come in, and pieces go out, by queues.

Between two rounds it takes new requests, drops those whose client has gone or whose time is up,
gives waiting ones their slots, and prefills one chunk: running streams never wait for more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..admission import Lane
from ..engine import Engine
from ..request import RequestError
from .errors import ApiError, bad_request, broken, down, late, leaving, too_complex
from .guarded import Guarded
from .health import REASONS, Health, health_of
from .metrics import ServeMetrics
from .ticket import Choice, Event, Ticket

log = logging.getLogger("speculant.serve")

PLAIN = "none"
"""The lane that drafts nothing; it is always there."""
MOST_FAILURES = 3
"""Rounds in a row that failed without a draft, after which the engine is given up."""


class Worker:
    """Runs an engine. Everything but `submit`, `cancel`, `drain` and `stop` is the thread's own.

    lanes:    names of the engine's lanes in their order; PLAIN is one of them
    capacity: answers that may be running and waiting at once
    """

    def __init__(
        self,
        engine: Engine,
        lanes: list[str],
        metrics: ServeMetrics,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.lanes, self.metrics, self.clock = engine, lanes, metrics, clock
        self.capacity = capacity
        pairs = zip(lanes, engine.lanes, strict=True)
        self.health: dict[str, Health] = {
            name: health_of(name, lane.draft, engine.capacity, clock) for name, lane in pairs
        }
        self.draining = self.dead = False
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._inflight = 0
        self._live: dict[int, tuple[Ticket, Choice]] = {}
        self._out: list[tuple[Ticket, Event]] = []
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called from the event loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events go to this loop."""
        self._loop = loop
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises ApiError: 429 when the queue is full, 503 when it has to be."""
        if self.dead or self.draining:
            raise down() if self.dead else leaving()
        with self._lock:
            if self._inflight + len(ticket.choices) > self.capacity:
                self.metrics.refused("queue_full")
                raise ApiError(
                    429, "too many requests are waiting: try again later", "queue_full",
                    retry_after_s=self.metrics.retry_after_s(),
                )  # fmt: skip
            self._inflight += len(ticket.choices)
        now = self.clock()
        for choice in ticket.choices:
            choice.times.arrived = now
        self._commands.put(("submit", ticket))
        if self.dead:  # it ended meanwhile, and may not have seen the ticket
            raise down()

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone, or has all it wants: free what the request still holds."""
        if any(choice.finish_reason is None for choice in ticket.choices):
            self._commands.put(("cancel", ticket))

    def drain(self) -> None:
        """Refuse new requests and those still waiting; finish the running ones."""
        self.draining = True
        self._commands.put(("drain", None))

    def stop(self) -> None:
        """End everything now, and wait for the thread."""
        self.draining = True
        self._commands.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._expire()
                self._turn()
                self._flush()
        except Exception:
            log.exception("the engine stopped")
        self.dead = True
        self._fail([choice for _, choice in self._live.values()], down())
        self._refuse_rest()
        self._flush()

    def _take_commands(self) -> bool:
        """Carry out what was asked since the last round; waits while there is nothing else to do."""
        wait = not self.engine.busy
        while True:
            try:
                what, ticket = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if what == "stop":
                return False
            if ticket is None:  # drain: a request of which a part runs is finished as a whole
                self._fail([c for t, c in self._live.values() if not t.running], leaving())
            elif what == "submit":
                self._submit(ticket)
            else:
                self._cancel(ticket.choices)

    def _refuse_rest(self) -> None:
        """Answer what was queued while the thread ended."""
        while not self._commands.empty():
            what, ticket = self._commands.get()
            if what == "submit" and ticket is not None:
                self._fail(ticket.choices, down(), ticket)

    def _submit(self, ticket: Ticket) -> None:
        for choice in ticket.choices:
            choice.served_by = choice.draft if self.health[choice.draft].usable() else PLAIN
            try:
                choice.number = self.engine.submit(
                    choice.ids,
                    choice.params,
                    choice.counters,
                    lane=self.lanes.index(choice.served_by),
                    num_draft_tokens=choice.num_draft_tokens,
                    constraint=choice.constraint,
                    group=ticket.group,
                )
            except RequestError as error:
                self._fail([choice], bad_request(str(error)), ticket)
                continue
            self._live[choice.number] = (ticket, choice)
            if self.draining:
                self._fail([choice], leaving())

    def _expire(self) -> None:
        now = self.clock()
        over = [choice for ticket, choice in self._live.values() if now > ticket.deadline]
        self._fail(over, late())

    def _turn(self) -> None:
        """Admission, a chunk of prefill, and a round of every lane."""
        for number, reused in self.engine.admit().items():
            _, choice = self._live[number]
            choice.reused, choice.times.admitted = reused, self.clock()
            self.metrics.admitted(choice)
        running = [c for _, c in self._live.values() if c.times.admitted is not None]
        self.metrics.load(len(running), len(self._live) - len(running))
        self._guarded(self.engine.prefill, self._unread)
        for name, lane in zip(self.lanes, self.engine.lanes, strict=True):
            rows = [c for c in running if c.served_by == name and c.number in self._live]
            if rows:
                a_round = partial(self._round, name, lane, rows)
                self._guarded(a_round, partial(self._ended_by, name, rows))
        self._retire()

    def _guarded(self, action: Callable[[], Any], victims: Callable[[], list[Choice]]) -> None:
        """Run a part of a turn. When it fails, its victims do, with 500."""
        try:
            action()
        except Exception:
            log.exception("the engine failed in a round")
            self._fail(victims(), broken())
            if self._failures >= MOST_FAILURES:
                raise

    def _unread(self) -> list[Choice]:
        """Answers whose prompt is not in the cache yet: those that a failed prefill ends."""
        self._failures += 1
        read = {number for number, _ in self.engine.slots()}
        return [c for _, c in self._live.values() if c.times.admitted and c.number not in read]

    def _ended_by(self, name: str, rows: list[Choice]) -> list[Choice]:
        """Answers that a failed round ends. With a draft, which is then off, the others go on: the
        round committed nothing of theirs, so that they can have it again without one."""
        if name == PLAIN:
            self._failures += 1
            return [c for c in rows if c.number in self._live]
        self._switch_off(name, "error")
        held, numbers = self.engine.lengths(), {c.number for c in rows}
        mine = [(number, c) for number, (_, c) in self._live.items() if number in numbers]
        return [c for number, c in mine if held.get(number) != len(c.ids) + c.emitted]

    def _retire(self) -> None:
        """Take drafts that failed meanwhile out of use."""
        for name, lane in zip(self.lanes, self.engine.lanes, strict=True):
            failed = isinstance(lane.draft, Guarded) and lane.draft.failed
            if failed and self.health[name].reason != "error":
                self._switch_off(name, "error")

    def _round(self, name: str, lane: Lane, rows: list[Choice]) -> None:
        """A round of a lane; tells the draft's health, and hands out the pieces."""
        pieces = self.engine.round(lane)
        now, self._failures = self.clock(), 0
        reasons: set[str | None] = set()
        for piece in pieces:
            ticket, choice = self._live[piece.request]
            if piece.error:
                log.error("%s", piece.error)
                unfit = choice.constraint is not None and choice.constraint.error
                self._fail([choice], too_complex() if unfit else broken())
                continue
            self.metrics.round(ticket, choice, piece, now)
            choice.emitted += len(piece.token_ids)
            if piece.drafted is not None:
                length = len(choice.ids) + choice.emitted
                reasons.add(self.health[name].observe(piece.drafted, length))
            if piece.finish_reason:
                self._end(choice, piece.finish_reason)
                self.metrics.ended(ticket, choice)
            self._out.append((ticket, Event(choice, piece)))
        for reason in filter(None, reasons):
            self._switch_off(name, reason)

    def _switch_off(self, name: str, reason: str) -> None:
        """A draft misbehaves: everything it served goes on without one."""
        log.warning("draft %s is switched off: %s", name, REASONS[reason])
        self.health[name].switch_off(reason)
        self.metrics.switched_off(name, reason)
        self.engine.reroute(self.lanes.index(name), self.lanes.index(PLAIN))
        for _, choice in self._live.values():
            if choice.served_by == name:
                choice.served_by = PLAIN

    def _cancel(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            if choice.number in self._live:
                self.engine.cancel(choice.number)
                self.metrics.cancelled("cancelled")
                self._end(choice, "cancelled")

    def _fail(self, choices: list[Choice], error: ApiError, ticket: Ticket | None = None) -> None:
        """End answers with an error. ticket: of choices that never reached the engine."""
        for choice in choices:
            owner = ticket if choice.number is None else self._live[choice.number][0]
            assert owner is not None
            if choice.number is not None and not self.dead:
                self.engine.cancel(choice.number)
            self.metrics.cancelled(error.code or "error")
            self._end(choice, "error")
            self._out.append((owner, Event(choice, error=error)))

    def _end(self, choice: Choice, reason: str) -> None:
        choice.finish_reason, choice.times.ended = reason, self.clock()
        if choice.number is not None:
            self._live.pop(choice.number, None)
        with self._lock:
            self._inflight -= 1

    def _flush(self) -> None:
        """Hand what happened to the event loop, in one wake-up."""
        out, self._out = self._out, []
        if not self._live:
            self.metrics.load(0, 0)
        if out and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, out)


def _put(out: list[tuple[Ticket, Event]]) -> None:
    for ticket, event in out:
        ticket.events.put_nowait(event)
