"""Runs training talks without an engine: round by round, by a function from prompts to answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from speculant.sampling import SamplingParams
from speculant.train.responses import Answer, Ask, Generate, Talk

T = TypeVar("T")


def in_rounds(
    answer: Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Answer]],
) -> Generate:
    """Every live talk's next question is answered before any talk goes on."""

    def run(talks: Sequence[Talk[T]]) -> list[T]:
        results: dict[int, T] = {}
        asked: dict[int, Ask] = {}

        def go_on(index: int, given: Answer | None) -> None:
            try:
                asked[index] = next(talks[index]) if given is None else talks[index].send(given)
            except StopIteration as end:
                results[index] = end.value

        for index in range(len(talks)):
            go_on(index, None)
        while asked:
            live, asked = asked, {}
            answers = answer([ids for ids, _ in live.values()], [p for _, p in live.values()])
            for index, given in zip(live, answers, strict=True):
                go_on(index, given)
        return [results[i] for i in range(len(talks))]

    return run
