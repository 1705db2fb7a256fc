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
from speculant.pipeline.talks import EngineTalks
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
    found = EngineTalks(target, None, 2, 64).run(talks)
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
    run = EngineTalks(target, None, 2, 64)
    run.run([chain([1, 2], [20]), chain([3, 4], [5, 5, 5]), chain([5, 6], [5])])
    assert sum(rounds) == 40
    assert len(rounds) <= 22  # twenty when no round is spent on prefill alone


def test_states_are_those_of_a_run_alone(target: FakeTarget) -> None:
    asks = [([3, 1, 4], greedy(6)), ([1, 5, 9, 2], greedy(3)), ([3, 1, 4], greedy(6))]
    run = EngineTalks(target, TAPS, 3, 32)
    for _ in range(2):  # nothing of the first run is in the way of the second
        answers: list[Answer] = run.run([single((list(ids), params)) for ids, params in asks])
        for (ids, params), answer in zip(asks, answers, strict=True):
            engine = Engine(target, RecordDraft(TAPS), max_rows=1, capacity=32)
            engine.complete([ids], [params])
            assert isinstance(engine.draft, RecordDraft)
            want = engine.draft.states_of([*ids, *answer.token_ids])
            assert answer.states is not None
            assert want is not None
            assert torch.equal(answer.states, want)
            assert answer.states.shape[0] == len(ids) + len(answer.token_ids) - 1


def test_a_failing_talk_leaves_the_engine_free(target: FakeTarget) -> None:
    def failing() -> Talk[None]:
        yield [1, 2], greedy(3)
        raise RuntimeError("stop")

    run = EngineTalks(target, None, 2, 64)
    with pytest.raises(RuntimeError, match="stop"):
        run.run([failing(), chain([3, 4], [30])])
    assert not run.engine.busy
    assert run.run([chain([3, 4], [5])]) == [[target.greedy([3, 4], 5)]]


def test_no_talks_at_all(target: FakeTarget) -> None:
    assert EngineTalks(target, None, 2, 64).run([]) == []


def pair_of(starts: list[list[int]], count: int) -> Talk[list[list[list[int]]]]:
    """Two chains side by side, then two more."""
    first: list[list[list[int]]] = yield [chain(start, [count]) for start in starts]
    second: list[list[list[int]]] = yield [chain(start, [count, 2]) for start in starts]
    nothing: list[int] = yield []
    assert nothing == []
    return [*first, *second]


def test_talks_within_talks(target: FakeTarget) -> None:
    starts = [[[3, 1], [4, 1, 5]], [[9, 2], [6]], [[5, 3], [5]]]
    found = EngineTalks(target, None, 3, 64).run([pair_of(s, 4) for s in starts])
    for mine, results in zip(starts, found, strict=True):
        for start, one, two in zip(mine, results[:2], results[2:], strict=True):
            answer = target.greedy(start, 4)
            assert one == [answer]
            assert two == [answer, target.greedy([*start, *answer, 7], 2)]


def test_the_next_talk_begins_while_the_last_ones_end(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A talk of one long chain leaves places free: the next two begin beside it, and results come
    in order."""
    rounds: list[int] = []
    plain = Engine.round

    def counted(self: Engine, lane: object) -> list[object]:
        pieces = plain(self, lane)  # type: ignore[arg-type]
        rounds.append(len(pieces))
        return pieces  # type: ignore[return-value]

    monkeypatch.setattr(Engine, "round", counted)
    talks = [pair_of([[1, 2]], 20), pair_of([[3, 4]], 20), pair_of([[5, 6], [7]], 5)]
    opened: list[int] = []

    def more() -> Talk[list[list[list[int]]]] | None:
        if len(opened) == len(talks):
            return None
        opened.append(len(rounds))
        return talks[len(opened) - 1]

    run = EngineTalks(target, None, 4, 64)
    found = list(run.stream(more))
    assert [len(results) for results in found] == [2, 2, 4]
    assert found[0][0] == [target.greedy([1, 2], 20)]
    assert opened[:2] == [0, 0]
    assert len(rounds) < 50  # one after the other they take 42 + 42 + 12
    assert run.generated == sum(rounds) == 2 * 42 + 2 * 12


def test_more_may_come_of_what_was_returned(target: FakeTarget) -> None:
    """Nothing at first; then, of what the consumer saw, another one."""
    seen: list[int] = []

    def more() -> Talk[Answer] | None:
        if len(seen) in (0, 1) and len(given) == len(seen):
            given.append(1)
            return single(([1, 2], greedy(3)))
        return None

    given: list[int] = []
    for answer in EngineTalks(target, None, 2, 64).stream(more):
        seen.append(len(answer.token_ids))
    assert seen == [3, 3]
