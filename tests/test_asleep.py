"""Requests that begin in a crowd and never draft: plain decoding beside rows that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake import FakeTarget
from speculant.adaptive import Adaptive, ByLoad, Costs
from speculant.control import Asked, ByPart, Fixed
from speculant.engine import Engine, generate
from speculant.proposal import Proposal
from speculant.request import Completion
from speculant.sampling import SamplingParams
from test_serve_lanes import FIRST, GREEDY, eagle, some_drafts, submit

NAMES = ["ngram", "vanilla", "eagle3", "eagle3 tree", "medusa"]


class Crowded(Fixed):
    """More than two rows are a crowd."""

    def sleeps(self, asked: Asked, rows: int) -> bool:
        return rows > 2


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def same(out: Completion, alone: Completion) -> None:
    assert out.token_ids == alone.token_ids
    assert out.origins == alone.origins
    mine, theirs = out.metrics, alone.metrics
    assert mine.num_draft_tokens == theirs.num_draft_tokens
    assert mine.num_accepted_tokens == theirs.num_accepted_tokens
    assert mine.target_forwards == theirs.target_forwards


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_asleep_beside_rows_that_draft(
    target: FakeTarget, name: str, temperature: float
) -> None:
    """Two requests draft, three begin beside them: each does what it would alone, with or without
    its draft. A draft that is told of a row it never opened fails."""
    engine = Engine(target, some_drafts(target)[name], max_rows=4, capacity=120, control=Crowded(3))
    prompts = [FIRST[: 9 + i] for i in range(5)]
    params = [
        SamplingParams(max_tokens=18 + 3 * i, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(5)
    ]
    outs: dict[int, Completion] = {}

    def begin(i: int) -> None:
        out = Completion()
        outs[engine.submit(prompts[i], params[i], out.metrics)] = out

    begin(0)
    begin(1)
    for turn in range(200):
        if turn == 2:
            for i in (2, 3, 4):
                begin(i)
        for piece in engine.step():
            outs[piece.request].add(piece)
    assert not engine.busy
    for i, out in enumerate(outs.values()):
        depth = 3 if i < 2 else 0
        draft = some_drafts(target)[name]
        same(out, generate(target, draft, prompts[i], params[i], num_draft_tokens=depth))
        assert (out.metrics.num_draft_tokens > 0) == (i < 2)


def test_requests_that_begin_together_are_a_crowd_from_the_first(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of three is awake, so nothing is tapped: the forwards are those of plain decoding."""
    engine = Engine(target, eagle(target), max_rows=3, capacity=120, control=Crowded(3))
    tapped: list[tuple[int, ...]] = []
    forward = target.forward

    def noting(*parts: Any, **more: Any) -> Any:
        tapped.append(tuple(parts[4]))
        return forward(*parts, **more)

    monkeypatch.setattr(target, "forward", noting)
    outs = engine.complete([FIRST[:9], FIRST[:5], FIRST], [GREEDY] * 3)
    assert [o.token_ids for o in outs] == [
        target.greedy(p, 24) for p in (FIRST[:9], FIRST[:5], FIRST)
    ]
    assert tapped
    assert set(tapped) == {()}
    tapped.clear()
    alone = engine.complete([FIRST[:9]], [GREEDY])  # two are no crowd, nor is one
    assert alone[0].metrics.num_draft_tokens > 0
    assert set(tapped) == {(0, 1)}


@pytest.mark.parametrize("name", ["eagle3", "ngram", "vanilla"])
def test_a_slot_from_asleep_to_awake_and_back(target: FakeTarget, name: str) -> None:
    """A sleeper takes over any cache; a draft that needs the target's states begins from nothing."""

    class Sometimes(Fixed):
        now = False

        def sleeps(self, asked: Asked, rows: int) -> bool:
            return Sometimes.now

    engine = Engine(
        target,
        some_drafts(target)[name],
        max_rows=1,
        capacity=200,
        control=Sometimes(3),
        reuse=True,
    )
    prompt, last = list(FIRST), False
    for i, asleep in enumerate([True, True, False, False, True, False]):
        Sometimes.now = asleep
        params = SamplingParams(max_tokens=9, temperature=0.0, seed=i, ignore_eos=True)
        out = submit(engine, prompt, params)
        depth, draft = 0 if asleep else 3, some_drafts(target)[name]
        same(out, generate(target, draft, prompt, params, num_draft_tokens=depth))
        assert (out.prompt_tokens > 0) == (i > 0 and (asleep or not last or name != "eagle3"))
        prompt, last = [*prompt, *out.token_ids[:6], 3], asleep


def test_every_lane_has_its_own_crowd(target: FakeTarget) -> None:
    """Two groups take turns for places: how many of each will run says who waits, not its place."""
    engine = Engine(
        target, eagle(target), max_rows=6, capacity=120, control=Crowded(4),
        others=[some_drafts(target)["ngram"]],
    )  # fmt: skip
    engine.lanes[1].control = Crowded(4)
    for lane, count in ((0, 5), (1, 3)):
        for _ in range(count):
            engine.submit(FIRST, GREEDY, lane=lane, group=lane)
    engine.admit()
    assert {r.lane.index: r.running.asleep for r in engine._running} == {0: True, 1: True}


def test_a_request_that_may_not_draft_sleeps(target: FakeTarget) -> None:
    engine = Engine(target, eagle(target), max_rows=2, capacity=200, reuse=True)
    out = submit(engine, FIRST, GREEDY, num_draft_tokens=0)
    assert out.token_ids == target.greedy(FIRST, 24)
    again = submit(engine, FIRST, GREEDY)  # nothing of the draft's is there to be resumed
    same(again, generate(target, eagle(target), FIRST, GREEDY))
    look = Engine(target, some_drafts(target)["lookahead"], max_rows=2, capacity=200)
    number = look.submit(FIRST, GREEDY, num_draft_tokens=0)
    look.admit()
    (row,) = [r.running for r in look._running if r.number == number]
    assert not row.asleep  # its window rides along


def test_rerouting_a_sleeper_wakes_it(target: FakeTarget) -> None:
    engine = Engine(
        target,
        eagle(target),
        max_rows=3,
        capacity=120,
        control=Crowded(4),
        others=[some_drafts(target)["ngram"]],
    )
    numbers = [engine.submit([*FIRST[:6]] * 3, GREEDY) for _ in range(3)]
    outs = {number: Completion() for number in numbers}
    for turn in range(60):
        if turn == 3:
            engine.reroute(0, 1)
        for piece in engine.step():
            outs[piece.request].add(piece)
            assert turn >= 3 or not piece.drafted or not piece.drafted.tokens
    assert all(o.token_ids == target.greedy([*FIRST[:6]] * 3, 24) for o in outs.values())


def test_cancelling_a_sleeper(target: FakeTarget) -> None:
    engine = Engine(target, eagle(target), max_rows=3, capacity=120, control=Crowded(4))
    numbers = [engine.submit(FIRST[: 5 + i], GREEDY) for i in range(3)]
    engine.step()
    engine.cancel(numbers[1])
    rest = {n: Completion() for n in numbers}
    while engine.busy:
        for piece in engine.step():
            rest[piece.request].add(piece)
    later = engine.complete([FIRST], [GREEDY])
    assert later[0].token_ids == target.greedy(FIRST, 24)
    assert later[0].metrics.num_draft_tokens > 0


FLAT = Costs((0, 1, 2), (1, 2, 3), ((1, 10.0), (3, 10.5)), (0.0, 0.5, 1.0))
STEEP = Costs((0, 1, 2), (8, 16, 24), ((8, 10.0), (24, 30.0)), (0.0, 0.5, 1.0))


def test_who_sleeps() -> None:
    """Where even a very good draft would not pay; not by the batch where the text depends on it."""
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)
    assert not Fixed(4).sleeps(greedy, 64)
    assert not Adaptive(FLAT).sleeps(greedy, 64)
    assert Adaptive(STEEP).sleeps(greedy, 1)
    tables = {1: FLAT, 8: STEEP}
    for samples in (False, True):
        control = ByLoad(tables, samples)
        assert [control.sleeps(greedy, n) for n in (1, 4, 5, 40)] == [False, False, True, True]
        assert [control.sleeps(sampled, n) for n in (1, 40)] == [False, not samples]
        control.enter([greedy], 39)  # the crowd counts, asleep or not
        assert not control.drafts
        control.enter([greedy])
        assert control.drafts
    parts = ByPart(4, [ByLoad(tables, False), ByLoad(tables, True)])
    assert parts.sleeps(greedy, 40)
    assert not parts.sleeps(sampled, 40)
    assert not parts.sleeps(greedy, 1)


@pytest.mark.parametrize("probs", [False, True])
def test_spread_and_selected_again(probs: bool) -> None:
    ids, above = torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([[-1, 0, 0], [-1, -1, 1]])
    given = torch.rand(2, 3, 11) if probs else None
    mine = Proposal(ids, above, given, torch.tensor([3, 2]))
    wide = mine.spread([1, 3], 5)
    assert wide.num_nodes.tolist() == [0, 3, 0, 2, 0]
    back = wide.select(torch.tensor([1, 3]))
    assert torch.equal(back.tokens, ids)
    assert torch.equal(back.parents, above)
    assert (back.draft_probs is None) == (given is None)
    assert given is None or torch.equal(back.draft_probs, given)  # type: ignore[arg-type]
    assert wide.parents[0].tolist() == [-1, 0, 1]  # padding goes on like a chain
