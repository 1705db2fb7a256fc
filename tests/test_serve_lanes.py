"""The engine's part of serving: lanes, turns, held slots, warm requests that accept as cold ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake import HIDDEN, FakeTarget
from speculant.drafts import load_draft
from speculant.drafts.base import Draft
from speculant.drafts.eagle import EagleDraft
from speculant.drafts.medusa import MedusaDraft
from speculant.engine import Engine, generate
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.request import Completion, FairQueue
from speculant.sampling import SamplingParams
from speculant.slots import Slots

FIRST = [5, 9, 3, 7, 1, 2, 8, 6, 4, 11, 13, 12, 10, 15, 14, 20, 21, 22, 23, 24]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def eagle(target: FakeTarget, tree: int = 0) -> EagleDraft:
    torch.manual_seed(5)
    config = Eagle3Config(
        hidden_size=HIDDEN, intermediate_size=24, num_heads=4, kv_heads=2, head_dim=6,
        vocab_size=32, draft_vocab_size=32, taps=(0, 1),
    )  # fmt: skip
    head = Eagle3Head(config)
    head.set_vocabulary(torch.arange(32))
    return EagleDraft(head.eval(), target.embed, 32, 4, tree)


def medusa(target: FakeTarget) -> MedusaDraft:
    torch.manual_seed(6)
    config = MedusaConfig(
        hidden_size=HIDDEN, vocab_size=32, num_heads=3, accuracies=((0.5, 0.2),) * 3
    )
    return MedusaDraft(MedusaHead(config).eval(), target.unembed, 8)


def some_drafts(target: FakeTarget) -> dict[str, Draft]:
    small = FakeTarget(seed=3)
    return {
        "none": load_draft("none", target),
        "ngram": load_draft("ngram", target),
        "lookahead": load_draft("lookahead", target),
        "vanilla": load_draft("vanilla", target, model=small, num_draft_tokens=3),
        "eagle3": eagle(target),
        "eagle3 tree": eagle(target, 9),
        "medusa": medusa(target),
    }


def finish(engine: Engine, *numbers: int) -> list[Completion]:
    outs = {number: Completion() for number in numbers}
    while engine.busy:
        for piece in engine.step():
            assert piece.error is None
            outs[piece.request].add(piece)
    return list(outs.values())


def submit(engine: Engine, prompt: list[int], params: SamplingParams, **more: Any) -> Completion:
    """Run one request to its end, with its counts."""
    out = Completion()
    number = engine.submit(prompt, params, out.metrics, **more)
    reused = engine.admit()[number]
    while engine.busy:
        for piece in engine.step():
            out.add(piece)
    out.prompt_tokens = reused
    return out


@pytest.mark.parametrize("name", list(some_drafts(FakeTarget())))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_warm_requests_accept_as_cold_ones(
    target: FakeTarget, name: str, temperature: float
) -> None:
    """The next turn of a conversation, one that goes another way, and one from the middle."""
    engine = Engine(target, some_drafts(target)[name], capacity=200, reuse=True)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=4, ignore_eos=True)
    first = submit(engine, FIRST, params)
    assert first.prompt_tokens == 0
    for prompt in (
        [*FIRST, *first.token_ids, 3, 1, 4, 1, 5],
        [*FIRST, *first.token_ids[:6], 30, 29, 28],
        [*FIRST[:18], 30],
    ):
        before = target.num_forwards
        warm = submit(engine, list(prompt), params)
        assert warm.prompt_tokens >= 15
        cold = generate(target, some_drafts(target)[name], list(prompt), params)
        assert warm.token_ids == cold.token_ids
        assert warm.metrics.num_draft_tokens == cold.metrics.num_draft_tokens
        assert warm.metrics.num_accepted_tokens == cold.metrics.num_accepted_tokens
        assert before < target.num_forwards
    other = submit(engine, [1, 2, 3], params)
    assert other.prompt_tokens == 0
    assert (
        other.token_ids == generate(target, some_drafts(target)[name], [1, 2, 3], params).token_ids
    )


def test_a_held_slot_goes_to_another_lane(target: FakeTarget) -> None:
    """Whatever the lanes before and after: the text is a cold request's."""
    drafts = some_drafts(target)
    names = list(drafts)
    first, *others = drafts.values()
    engine = Engine(target, first, max_rows=1, capacity=200, others=others, reuse=True)
    prompt = list(FIRST)
    for i in range(10):
        lane = (3 * i + i // 7) % len(names)
        params = SamplingParams(max_tokens=12, temperature=0.7, seed=i, ignore_eos=True)
        out = submit(engine, prompt, params, lane=lane)
        cold = generate(target, some_drafts(target)[names[lane]], prompt, params)
        assert out.token_ids == cold.token_ids, names[lane]
        prompt = prompt + out.token_ids[: i % 5]


def test_lanes_side_by_side(target: FakeTarget) -> None:
    """Requests of every draft in one batch: each as if it were alone with its draft."""
    drafts = some_drafts(target)
    first, *others = drafts.values()
    engine = Engine(target, first, max_rows=4, capacity=120, others=others)
    numbers, wanted = [], []
    for i, name in enumerate([*drafts, *drafts]):
        params = SamplingParams(
            max_tokens=4 + i, temperature=0.3 * (i % 4), seed=i, ignore_eos=True
        )
        prompt = FIRST[i % 5 : 8 + i % 9]
        depth = {"ngram": 2, "eagle3": 1}.get(name)
        lane = list(drafts).index(name)
        numbers.append(engine.submit(prompt, params, lane=lane, num_draft_tokens=depth))
        options = {} if depth is None else {"num_draft_tokens": depth}
        wanted.append(generate(target, some_drafts(target)[name], prompt, params, **options))
    for out, want in zip(finish(engine, *numbers), wanted, strict=True):
        assert out.token_ids == want.token_ids
        assert out.origins == want.origins


def test_rerouting_in_the_middle(target: FakeTarget) -> None:
    """Greedy text does not change when the draft is taken away, nor when it comes back."""
    engine = Engine(
        target, eagle(target), max_rows=3, capacity=120, others=[load_draft("none", target)]
    )
    numbers = [engine.submit(FIRST[: 5 + i], GREEDY) for i in range(5)]
    outs = {number: Completion() for number in numbers}
    for turn in range(200):
        if turn == 2:
            engine.reroute(0, 1)
        for piece in engine.step():
            outs[piece.request].add(piece)
            if turn > 2:
                assert piece.drafted is not None
                assert piece.drafted.tokens == []
    for i, out in enumerate(outs.values()):
        assert out.token_ids == target.greedy(FIRST[: 5 + i], 24)
    again = submit(engine, FIRST, GREEDY)
    assert again.token_ids == target.greedy(FIRST, 24)
    assert again.metrics.num_draft_tokens > 0
    with pytest.raises(ValueError, match="hidden states"):
        engine.reroute(1, 0)


def test_a_cancelled_row_leaves_its_neighbours_and_its_slot_clean(target: FakeTarget) -> None:
    engine = Engine(target, eagle(target), max_rows=2, capacity=120, reuse=True)
    gone, stays = engine.submit(FIRST, GREEDY), engine.submit(FIRST[:7], GREEDY)
    for _ in range(3):
        engine.step()
    slot = dict(engine.slots())[gone]
    engine.cancel(gone)
    assert engine.cache.lengths[slot] == 0
    assert not engine.cache.data[:, :, slot].any()
    later = engine.submit(FIRST, GREEDY)
    out = {number: Completion() for number in (stays, later)}
    tokens: dict[int, list[int]] = {stays: [], later: []}
    while engine.busy:
        for piece in engine.step():
            out[piece.request].add(piece)
            tokens[piece.request] += piece.token_ids
    assert tokens[later] == target.greedy(FIRST, 24)
    assert tokens[stays] == target.greedy(FIRST[:7], 24)[-len(tokens[stays]) :]


def test_prompts_are_prefilled_in_turns(target: FakeTarget) -> None:
    """A short prompt that comes behind a long one waits for a chunk of it, not for all."""
    engine = Engine(FakeTarget(seed=1, context_length=2048), load_draft("none", target), max_rows=2)
    long, short = engine.submit([1, 2] * 600, GREEDY), engine.submit([3] * 200, GREEDY)
    first: list[int] = []
    while len(set(first)) < 2:
        first += [piece.request for piece in engine.step()]
    assert first[0] == short
    assert first.index(long) >= 3


def test_slots_choose_what_is_held() -> None:
    slots = Slots(3)
    a, b = slots.take([1]).slot, slots.take([2]).slot
    assert (a, b) == (0, 1)
    slots.hold(a, list(range(40)), 0)
    slots.hold(b, list(range(20)) + [99] * 20, 1)
    taken = slots.take([*range(30), 7])
    assert (taken.slot, taken.shared, taken.held and taken.held.lane) == (a, 30, 0)
    assert slots.take([5, 6]).slot == 2  # an empty one before one that holds something
    last = slots.take([5, 6])
    assert (last.slot, last.shared) == (b, 0)
    assert last.held is not None
    assert not slots
    slots.give(1)
    assert slots.take([0]).held is None


def test_the_queue_is_fair() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "a4", "b2", "c1"):
        queue.push(item[0], item)
    assert len(queue) == 7
    queue.drop(lambda item: item == "a2")
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "b1", "c1", "a3", "b2", "a4"]
