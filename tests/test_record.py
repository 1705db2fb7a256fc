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
    target: FakeTarget, rows: int, dtype: torch.dtype = torch.float32
) -> tuple[Engine, RecordDraft]:
    engine = Engine(target, RecordDraft(TAPS, dtype), max_rows=rows, capacity=400)
    assert isinstance(engine.draft, RecordDraft)
    return engine, engine.draft


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
    engine, draft = record(target, 2)
    some = [params(n, 0.8 * (i % 2), seed=i) for i, n in enumerate(counts)]
    done = engine.complete(prompts, some)
    noted = draft.take()
    assert len(noted) == 6
    for prompt, out, count in zip(prompts, done, counts, strict=True):
        text = (*prompt, *out.token_ids)
        assert len(text) == len(prompt) + count
        want = uncached(target, text[:-1], TAPS)
        torch.testing.assert_close(noted[text], want, atol=1e-4, rtol=1e-4)
    assert draft.take() == {}


def test_states_are_not_those_one_further(target: FakeTarget) -> None:
    """The comparison can fail: a position's states differ from its neighbour's."""
    states = uncached(target, range(1, 9), TAPS)
    assert float((states[1:] - states[:-1]).abs().amax(dim=1).min()) > 0.1


def test_an_end_within_the_text_is_noted_too(target: FakeTarget) -> None:
    """EOS ends a request and belongs to its answer: its state is not needed, that before it is."""
    prompt = [5, 9, 3]
    first = target.greedy(prompt, 4)
    engine, draft = record(target, 1)
    stop = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(first[3],))
    out = engine.complete([prompt], [stop])[0]
    assert out.finish_reason == "stop"
    text = (*prompt, *out.token_ids)
    states = draft.take()[text]
    torch.testing.assert_close(states, uncached(target, text[:-1], TAPS), atol=1e-4, rtol=1e-4)


def test_a_request_that_is_cancelled_keeps_its_states_apart(target: FakeTarget) -> None:
    """The slot's next request starts from nothing."""
    engine, draft = record(target, 1)
    number = engine.submit([5, 9, 3], params(30))
    for _ in range(4):
        engine.step()
    engine.cancel(number)
    out = engine.complete([[7, 8]], [params(3)])[0]
    noted = draft.take()
    text = (7, 8, *out.token_ids)
    assert noted[text].shape == (len(text) - 1, 3 * 16)
    torch.testing.assert_close(noted[text], uncached(target, text[:-1], TAPS), atol=1e-4, rtol=1e-4)


def test_states_are_kept_in_half_the_room(target: FakeTarget) -> None:
    engine, draft = record(target, 1, torch.bfloat16)
    out = engine.complete([[5, 9, 3]], [params(4)])[0]
    states = draft.take()[(5, 9, 3, *out.token_ids)]
    assert states.dtype == torch.bfloat16
    want = uncached(target, (5, 9, 3, *out.token_ids[:-1]), TAPS)
    torch.testing.assert_close(states.float(), want, atol=0.05, rtol=0.01)


def test_nothing_is_drafted(target: FakeTarget) -> None:
    engine, _ = record(target, 2)
    out = engine.complete([[5, 9, 3]], [params(8)])[0]
    assert out.token_ids == target.greedy([5, 9, 3], 8)
    assert out.metrics.num_draft_tokens == 0
