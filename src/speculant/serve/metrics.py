"""Prometheus metrics: vLLM's names under the prefix `speculant:` (docs/serve.md has the table)."""

from __future__ import annotations

from collections import deque

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from ..request import Piece
from .ticket import Choice, Ticket

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
           20, 40, 80, 160, 640)  # fmt: skip
"""Buckets of every histogram, in seconds: fine enough for a token, wide enough for an answer."""
RECENT = 64
"""Answers whose time is averaged for Retry-After."""


class ServeMetrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._recent: deque[float] = deque(maxlen=RECENT)
        draft, task = ["draft"], ["draft", "task"]
        self.num_drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted", task)
        self.num_draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Drafted tokens", task
        )
        self.num_accepted = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", task
        )
        self.per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted at a position, from 0",
            [*task, "position"],
        )
        self.depths = self._counter(
            "draft_depth", "Rounds by how deep the draft was asked to go", [*task, "depth"]
        )
        self.forwards = self._counter(
            "target_forwards", "Target forwards, counted once a request in them", task
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generated = self._counter("generation_tokens", "Generated tokens", task)
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens not run again")
        self.success = self._counter("request_success", "Answers", ["finished_reason", "task"])
        self.failed = self._counter("request_failed", "Answers that were cut short", ["reason"])
        self.rejected = self._counter("request_refused", "Requests refused", ["reason"])
        self.off = self._counter("draft_switched_off", "Drafts switched off", [*draft, "reason"])
        self.enabled = self._gauge("draft_enabled", "1: the draft serves requests", draft)
        self.running = self._gauge("num_requests_running", "Answers in a slot")
        self.waiting = self._gauge("num_requests_waiting", "Answers waiting for a slot")
        self.first_token = self._seconds("time_to_first_token", "From arrival")
        self.between = self._seconds("inter_token_latency", "A round's time over its tokens")
        self.whole = self._seconds("e2e_request_latency", "From arrival to the last token")
        self.queued = self._seconds("request_queue_time", "From arrival to a slot")
        self.prefilled = self._seconds("request_prefill_time", "From a slot to the first token")
        self.decoded = self._seconds("request_decode_time", "From the first token to the last")

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        names = ["model_name", *(labels or [])]
        return Counter(f"speculant:{name}", text, names, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        names = ["model_name", *(labels or [])]
        return Gauge(f"speculant:{name}", text, names, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"speculant:{name}_seconds", text, ["model_name"], registry=self.registry,
            buckets=SECONDS,
        )  # fmt: skip

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def retry_after_s(self) -> int:
        """A guess at when a slot is free: as long as recent answers took, in whole seconds."""
        recent = list(self._recent)
        return max(1, min(60, round(sum(recent) / len(recent)))) if recent else 1

    def load(self, running: int, waiting: int) -> None:
        """Answers in slots and in the queue."""
        self.running.labels(self._model).set(running)
        self.waiting.labels(self._model).set(waiting)

    def admitted(self, choice: Choice) -> None:
        """An answer got its slot."""
        times = choice.times
        assert times.admitted is not None
        self.queued.labels(self._model).observe(times.admitted - times.arrived)
        self.prompt_tokens.labels(self._model).inc(len(choice.ids))
        self.prefix_queries.labels(self._model).inc(len(choice.ids))
        self.prefix_hits.labels(self._model).inc(choice.reused)

    def round(self, ticket: Ticket, choice: Choice, piece: Piece, now: float) -> None:
        """A round of one answer. Notes its depth, and the times of its first and newest token."""
        times, count = choice.times, len(piece.token_ids)
        labels = (self._model, choice.served_by, ticket.task)
        self.forwards.labels(*labels).inc()
        self.generated.labels(*labels).inc(count)
        if times.first_token is None:
            times.first_token = now
            self.first_token.labels(self._model).observe(now - times.arrived)
            if times.admitted is not None:
                self.prefilled.labels(self._model).observe(now - times.admitted)
        elif times.last_token is not None:
            for _ in range(count):
                self.between.labels(self._model).observe((now - times.last_token) / count)
        times.last_token = now
        drafted = piece.drafted
        if drafted is not None:
            choice.depths[drafted.budget] += 1
            self.depths.labels(*labels, str(drafted.budget)).inc()
        if drafted is not None and drafted.tokens:
            self.num_drafts.labels(*labels).inc()
            self.num_draft_tokens.labels(*labels).inc(len(drafted.tokens))
            self.num_accepted.labels(*labels).inc(len(drafted.path))
            for position in range(len(drafted.path)):
                self.per_position.labels(*labels, str(position)).inc()

    def ended(self, ticket: Ticket, choice: Choice) -> None:
        """An answer is complete."""
        times = choice.times
        assert times.ended is not None
        assert times.first_token is not None
        self._recent.append(times.ended - times.arrived)
        self.whole.labels(self._model).observe(times.ended - times.arrived)
        self.decoded.labels(self._model).observe(times.ended - times.first_token)
        self.success.labels(self._model, choice.finish_reason, ticket.task).inc()

    def cancelled(self, reason: str) -> None:
        """An answer ended early: its client left, its time was up, or it failed."""
        self.failed.labels(self._model, reason).inc()

    def refused(self, reason: str) -> None:
        """A request was not taken."""
        self.rejected.labels(self._model, reason).inc()

    def drafts(self, usable: dict[str, bool]) -> None:
        """Which drafts serve requests."""
        for name, on in usable.items():
            self.enabled.labels(self._model, name).set(on)

    def switched_off(self, draft: str, reason: str) -> None:
        """A draft misbehaved."""
        self.off.labels(self._model, draft, reason).inc()
        self.enabled.labels(self._model, draft).set(0)
