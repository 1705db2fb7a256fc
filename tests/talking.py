"""Runs training talks without an engine: round by round, by a function from prompts to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from speculant.sampling import SamplingParams
from speculant.train.responses import Answer, Ask, Talk

T = TypeVar("T")
Answers = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Answer]]


def in_rounds(talk: Talk[T], answer: Answers) -> T:
    """What a talk returns. Of talks side by side, every one's next question is answered before any
    goes on."""
    return _side_by_side([talk], answer)[0]


class InRounds:
    """Implements `pipeline.data.Talks`, one talk after the other."""

    generated = 0

    def __init__(self, answer: Answers) -> None:
        self.answer = answer

    def stream(self, more: Callable[[], Talk[T] | None]) -> Iterator[T]:
        while (talk := more()) is not None:
            yield in_rounds(talk, self.answer)


def _side_by_side(talks: Sequence[Talk[T]], answer: Answers) -> list[T]:
    results: dict[int, T] = {}
    asked: dict[int, Ask] = {}

    def go_on(index: int, given: Any) -> None:
        try:
            wanted = next(talks[index]) if given is None else talks[index].send(given)
            while isinstance(wanted, list):
                wanted = talks[index].send(_side_by_side(wanted, answer))
            asked[index] = wanted
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(talks)):
        go_on(index, None)
    while asked:
        live = dict(asked)
        asked.clear()
        answers = answer([ids for ids, _ in live.values()], [p for _, p in live.values()])
        for index, given in zip(live, answers, strict=True):
            go_on(index, given)
    return [results[i] for i in range(len(talks))]
