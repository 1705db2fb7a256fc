"""Noting states while answering: those of every position but the last, whatever else is running.

Independent truth: the states of one uncached forward over the finished text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fake import LAYERS, FakeTarget, _attend
from speculant.drafts.record import PIECES, RecordDraft
from speculant.engine import PREFILL_CHUNK, Engine
from speculant.sampling import SamplingParams
from speculant.target.base import LAST

TAPS = (1, LAST, 0)


def uncached(target: FakeTarget, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Tapped states [T, n * H] of a whole text, without a cache."""
    ids, count = torch.tensor([list(tokens)]), len(tokens)
    x = target._embed(ids, torch.arange(count)[None])
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    states = {}
    for i in range(LAYERS):
        states[i] = x[0]
        q, k, v = target._project(i, x)
        x = target._rest(i, x, _attend(q, k, v, causal))
    states[LAST] = torch.nn.functional.rms_norm(x, (x.shape[-1],))[0]
    return torch.cat([states[tap] for tap in taps], dim=-1)


def record(
    target: FakeTarget, rows: int, dtype: torch.dtype = torch.float32, reuse: bool = False
) -> Engine:
    return Engine(target, RecordDraft(TAPS, dtype), max_rows=rows, capacity=400, reuse=reuse)


def run(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[tuple[list[int], Tensor | None]]:
    """The text and the noted states of every prompt, read as soon as it ends."""
    draft, texts, noted = engine.draft, {}, {}
    assert isinstance(draft, RecordDraft)
    for prompt, mine in zip(prompts, params, strict=True):
        texts[engine.submit(prompt, mine)] = list(prompt)
    while engine.busy:
        for piece in engine.step():
            texts[piece.request] += piece.token_ids
            if piece.finish_reason:
                noted[piece.request] = draft.states_of(texts[piece.request])
    return [(texts[number], noted[number]) for number in texts]


def assert_noted(target: FakeTarget, text: Sequence[int], states: Tensor | None) -> None:
    assert states is not None
    want = uncached(target, text[:-1], TAPS)
    torch.testing.assert_close(states, want, atol=1e-4, rtol=1e-4)


def params(count: int, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=temperature, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def test_states_are_the_uncached_ones(target: FakeTarget) -> None:
    """Six requests on two rows: they join and leave at other times, one prefills in two chunks."""
    lengths = [4, 1, PREFILL_CHUNK + 40, 2, 9, 3]
    prompts = [[(5 * i + 3 * j) % 31 + 1 for j in range(n)] for i, n in enumerate(lengths)]
    counts = [3, 12, 5, PIECES + 9, 1, 20]
    some = [params(n, 0.8 * (i % 2), seed=i) for i, n in enumerate(counts)]
    done = run(record(target, 2), prompts, some)
    for prompt, (text, states), count in zip(prompts, done, counts, strict=True):
        assert text[: len(prompt)] == prompt
        assert len(text) == len(prompt) + count
        assert_noted(target, text, states)


def test_a_conversation_that_goes_on_keeps_the_states_that_it_has(target: FakeTarget) -> None:
    """Of the second turn, the first is not run again; a third parts from it in the middle."""
    engine = record(target, 2, reuse=True)
    prompt = [(3 * j) % 31 + 1 for j in range(40)]
    ((first, states),) = run(engine, [prompt], [params(PIECES + 5)])
    assert_noted(target, first, states)
    engine.submit([*first, 7, 8], params(6))
    (reused,) = engine.admit().values()
    assert reused == len(first) - 1  # all that was run
    while engine.busy:
        engine.step()
    ((second, states),) = run(engine, [[*first, 7, 8]], [params(6)])
    assert_noted(target, second, states)
    other = [*second[:60], 30, 2]
    ((third, states),) = run(engine, [other], [params(9)])
    assert_noted(target, third, states)
    assert len(third) == len(other) + 9


def test_states_are_not_those_one_further(target: FakeTarget) -> None:
    """The comparison can fail: a position's states differ from its neighbour's."""
    states = uncached(target, range(1, 9), TAPS)
    assert float((states[1:] - states[:-1]).abs().amax(dim=1).min()) > 0.1


def test_an_end_within_the_text_is_noted_too(target: FakeTarget) -> None:
    """EOS ends a request and belongs to its answer: its state is not needed, that before it is."""
    prompt = [5, 9, 3]
    first = target.greedy(prompt, 4)
    stop = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(first[3],))
    ((text, states),) = run(record(target, 1), [prompt], [stop])
    assert len(text) < len(prompt) + 20
    assert_noted(target, text, states)


def test_a_request_that_is_cancelled_keeps_its_states_apart(target: FakeTarget) -> None:
    """The slot's next request starts from nothing."""
    engine = record(target, 1, reuse=True)
    number = engine.submit([5, 9, 3], params(30))
    for _ in range(4):
        engine.step()
    engine.cancel(number)
    ((text, states),) = run(engine, [[7, 8]], [params(3)])
    assert states is not None
    assert states.shape == (len(text) - 1, 3 * 16)
    assert_noted(target, text, states)
    assert isinstance(engine.draft, RecordDraft)
    assert engine.draft.states_of([7, 8, 1]) is None


def test_states_are_kept_in_half_the_room(target: FakeTarget) -> None:
    ((text, states),) = run(record(target, 1, torch.bfloat16), [[5, 9, 3]], [params(4)])
    assert states is not None
    assert states.dtype == torch.bfloat16
    want = uncached(target, text[:-1], TAPS)
    torch.testing.assert_close(states.float(), want, atol=0.05, rtol=0.01)


def test_nothing_is_drafted(target: FakeTarget) -> None:
    out = record(target, 2).complete([[5, 9, 3]], [params(8)])[0]
    assert out.token_ids == target.greedy([5, 9, 3], 8)
    assert out.metrics.num_draft_tokens == 0
