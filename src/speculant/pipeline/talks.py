"""Talks on one engine: every question of every talk takes the next free place of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, TypeVar

from ..drafts.none import NoDraft
from ..drafts.record import RecordDraft
from ..engine import Engine
from ..request import Completion
from ..sampling import SamplingParams
from ..target.base import Target
from ..train.responses import Answer, Ask, Talk

T = TypeVar("T")


@dataclass
class _Node:
    """A talk that goes on. above, place: the talk that waits for it, and for which result.

    top: which of the talks that were streamed it belongs to
    results, missing: of the talks it waits for itself
    """

    talk: Talk[Any]
    top: int
    above: _Node | None = None
    place: int = 0
    begun: bool = False
    results: list[Any] = field(default_factory=list)
    missing: int = 0


class EngineTalks:
    """Runs talks on one engine, `rows` at once; with taps, the states of every answer are noted.

    No speculation: at so many rows a forward is bound by arithmetic, and drafts would only add work.
    A talk that goes on comes before one that begins, and an older one before a newer. What it said
    before is still in the place that it left, and is not run again.
    """

    def __init__(
        self, target: Target, taps: Sequence[int] | None, rows: int, capacity: int
    ) -> None:
        draft = NoDraft() if taps is None else RecordDraft(taps)
        self.engine = Engine(target, draft, max_rows=rows, capacity=capacity, reuse=True)
        self.rows = rows
        self.generated = 0
        """Tokens generated so far."""

    def run(self, talks: Sequence[Talk[T]]) -> list[T]:
        """What each talk returned, in order."""
        rest = iter(talks)
        return list(self.stream(lambda: next(rest, None)))

    def stream(self, more: Callable[[], Talk[T] | None]) -> Iterator[T]:
        """What each talk that `more` gives returned, in order.

        more: called when a place is free and nothing waits for it; None: nothing now. It ends when
              there is nothing and nothing runs. Raises FloatingPointError when the logits broke.
        """
        results: dict[int, T] = {}
        ready: list[tuple[int, bool, int, _Node, Ask]] = []  # a heap
        running: dict[int, tuple[_Node, list[int], Completion]] = {}
        opened = given = pushed = 0

        def go_on(node: _Node, value: Any) -> None:
            """Send a talk what it waits for, and see to what it wants then."""
            nonlocal pushed
            fresh, node.begun = not node.begun, True
            try:
                asked = next(node.talk) if fresh else node.talk.send(value)
            except StopIteration as end:
                finish(node, end.value)
                return
            if isinstance(asked, list):
                node.results, node.missing = [None] * len(asked), len(asked)
                for place, talk in enumerate(asked):
                    go_on(_Node(talk, node.top, node, place), None)
                if not asked:
                    go_on(node, [])
            else:
                pushed += 1
                heappush(ready, (node.top, fresh, pushed, node, asked))

        def finish(node: _Node, value: Any) -> None:
            if node.above is None:
                results[node.top] = value
                return
            node.above.results[node.place] = value
            node.above.missing -= 1
            if not node.above.missing:
                go_on(node.above, node.above.results)

        def submit(node: _Node, ids: list[int], params: SamplingParams) -> None:
            number = self.engine.submit(ids, params)
            running[number] = (node, ids, Completion(prompt_tokens=len(ids)))

        try:
            while True:
                while len(running) < self.rows:
                    if ready:
                        *_, node, (ids, params) = heappop(ready)
                        submit(node, ids, params)
                    elif (talk := more()) is not None:
                        go_on(_Node(talk, opened), None)
                        opened += 1
                    else:
                        break
                while given in results:
                    yield results.pop(given)
                    given += 1
                if not running:  # what was just returned may have changed what is wanted
                    if (talk := more()) is None:
                        return
                    go_on(_Node(talk, opened), None)
                    opened += 1
                    continue
                for node, answer in self._step(running):
                    go_on(node, answer)
        finally:
            for number in running:
                self.engine.cancel(number)

    def _step(
        self, running: dict[int, tuple[_Node, list[int], Completion]]
    ) -> list[tuple[_Node, Answer]]:
        """A round of the engine; the answers that ended, which run no more."""
        pieces = self.engine.step()
        draft, ended = self.engine.draft, []
        for piece in pieces:
            if piece.error:
                raise FloatingPointError(piece.error)
            node, ids, out = running[piece.request]
            out.add(piece)
            self.generated += len(piece.token_ids)
            if piece.finish_reason:
                del running[piece.request]
                states = None
                if isinstance(draft, RecordDraft):
                    states = draft.states_of([*ids, *out.token_ids])
                ended.append((node, Answer(out.token_ids, out.text, out.finish_reason, states)))
        return ended
