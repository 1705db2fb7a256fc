"""Talks on one engine: what each gets, that the batch stays full, what is left after a failure.

Independent truth: plain greedy decoding without a cache for answers, the engine's own run of one
prompt for states, and counts of rounds written out.
"""

from __future__ import annotations

import pytest
import torch

from fake import FakeTarget
from speculant.drafts.record import RecordDraft
from speculant.engine import Engine
from speculant.pipeline.data import EngineGenerate
from speculant.sampling import SamplingParams
from speculant.target.base import LAST
from speculant.train.responses import Answer, Talk, single

TAPS = (0, LAST)


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=2)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def chain(start: list[int], counts: list[int]) -> Talk[list[list[int]]]:
    """Each turn goes on from all that was said before; the answers."""
    said, answers = list(start), []
    for count in counts:
        answer = yield said, greedy(count)
        answers.append(answer.token_ids)
        said = [*said, *answer.token_ids, 7]
    return answers


def test_talks_get_their_own_answers_in_order(target: FakeTarget) -> None:
    starts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3], [5, 8, 9, 7, 9]]
    counts = [[4, 2, 3], [9], [1, 1, 1, 1], [], [12, 2]]
    talks = [chain(start, count) for start, count in zip(starts, counts, strict=True)]
    found = EngineGenerate(target, None, 2, 64)(talks)
    for start, count, answers in zip(starts, counts, found, strict=True):
        said = list(start)
        for number, answer in zip(count, answers, strict=True):
            assert answer == target.greedy(said, number)
            said += [*answer, 7]
        assert len(answers) == len(count)


def test_no_turn_waits_for_the_slowest_of_the_turn_before(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long answer beside a chain of short ones: as many rounds as the long one has tokens."""
    rounds: list[int] = []
    plain = Engine.round

    def counted(self: Engine, lane: object) -> list[object]:
        pieces = plain(self, lane)  # type: ignore[arg-type]
        rounds.append(len(pieces))
        return pieces  # type: ignore[return-value]

    monkeypatch.setattr(Engine, "round", counted)
    run = EngineGenerate(target, None, 2, 64)
    run([chain([1, 2], [20]), chain([3, 4], [5, 5, 5]), chain([5, 6], [5])])
    assert sum(rounds) == 40
    assert len(rounds) <= 22  # twenty when no round is spent on prefill alone


def test_states_are_those_of_a_run_alone(target: FakeTarget) -> None:
    asks = [([3, 1, 4], greedy(6)), ([1, 5, 9, 2], greedy(3)), ([3, 1, 4], greedy(6))]
    run = EngineGenerate(target, TAPS, 3, 32)
    for _ in range(2):  # nothing of the first run is in the way of the second
        answers: list[Answer] = run([single((list(ids), params)) for ids, params in asks])
        for (ids, params), answer in zip(asks, answers, strict=True):
            engine = Engine(target, RecordDraft(TAPS), max_rows=1, capacity=32)
            engine.complete([ids], [params])
            assert isinstance(engine.draft, RecordDraft)
            want = engine.draft.take()[(*ids, *answer.token_ids)]
            assert answer.states is not None
            assert torch.equal(answer.states, want)
            assert answer.states.shape[0] == len(ids) + len(answer.token_ids) - 1


def test_a_failing_talk_leaves_the_engine_free(target: FakeTarget) -> None:
    def failing() -> Talk[None]:
        yield [1, 2], greedy(3)
        raise RuntimeError("stop")

    run = EngineGenerate(target, None, 2, 64)
    with pytest.raises(RuntimeError, match="stop"):
        run([failing(), chain([3, 4], [30])])
    assert not run.engine.busy
    assert run([chain([3, 4], [5])]) == [[target.greedy([3, 4], 5)]]


def test_no_talks_at_all(target: FakeTarget) -> None:
    assert EngineGenerate(target, None, 2, 64)([]) == []
