"""Sampling against Hugging Face's logits processors and against real commitment.

Independent truths: transformers' `LogitsProcessorList` in its own order, a full sort for top-p,
the exact edges of a cumulative sum for `draw`, and, for drafted positions, a second `History`
into which the same tokens were really committed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculant.history import History
from speculant.native.layers import likeliest
from speculant.sampling import (
    TOP_P_SHORTLIST,
    Random,
    SamplingParams,
    broken_rows,
    draw,
    to_probs,
)

BELOW_ONE = 1 - 2**-53
INF = math.inf
NAN = math.nan


def hugging_face(
    logits: Tensor, p: SamplingParams, prompt: list[int], output: list[int], stop_ids: list[int]
) -> Tensor:
    """Probabilities [V] of logits [V] after prompt and output, by transformers alone."""
    steps: list[Any] = []
    if p.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(k,): v for k, v in p.logit_bias.items()}))
    if p.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, stop_ids))
    if p.temperature != 1:
        steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        steps.append(MinPLogitsWarper(p.min_p))
    scores = LogitsProcessorList(steps)(torch.tensor([prompt + output]), logits[None])
    return scores.softmax(dim=-1)[0]


def nucleus_by_sorting(probs: Tensor, top_p: float) -> Tensor:
    """Top-p of one row [V], by a full sort and a running sum in Python."""
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += float(probs[i])
    out = torch.zeros_like(probs)
    out[kept] = probs[kept]
    return out / out.sum()


def random_params(g: np.random.Generator, **fixed: Any) -> SamplingParams:
    def maybe(off: Any, *on: Any) -> Any:
        return off if g.random() < 0.4 else on[int(g.integers(len(on)))]

    fields = {
        "temperature": float(g.uniform(0.2, 2.0)),
        "top_k": maybe(0, 1, 3, 10, 1000),
        "top_p": maybe(1.0, 0.05, 0.5, 0.9, 0.99),
        "min_p": maybe(0.0, 0.02, 0.3, 1.0),
    }
    return SamplingParams(**(fields | fixed))


# --------------------------------------------------- against Hugging Face


@pytest.mark.parametrize("seed", range(60))
def test_warpers_are_hugging_faces(seed: int) -> None:
    g = np.random.default_rng(seed)
    p = random_params(g)
    logits = torch.tensor(3 * g.standard_normal((6, 40)))
    logits[:3][torch.tensor(g.random((3, 40)) < 0.3)] = -INF
    logits[:, 7] = 1.0
    expected = torch.stack([hugging_face(row, p, [], [], []) for row in logits])
    torch.testing.assert_close(to_probs(logits, p), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_ties(seed: int) -> None:
    """With ties the kept set may differ only in which of equal tokens it holds."""
    g = np.random.default_rng(seed)
    p = random_params(g, temperature=1.0)
    logits = torch.tensor(np.round(2 * g.standard_normal(30)))
    logits[torch.tensor(g.random(30) < 0.2)] = -INF
    logits[3] = 0.0
    mine, theirs = to_probs(logits, p), hugging_face(logits, p, [], [], [])
    torch.testing.assert_close(mine.sort().values, theirs.sort().values, rtol=1e-9, atol=1e-12)
    kept = mine > 0
    if not bool(kept.all()):
        assert logits[kept].min() >= logits[~kept].max()


@pytest.mark.parametrize("seed", range(40))
def test_the_whole_chain_is_hugging_faces(seed: int) -> None:
    """Bias, repetition penalty, min_tokens and the warpers together, at a drafted position."""
    g = np.random.default_rng(seed)
    vocab, stop_ids = 25, [2, 5]
    prompt, output = g.integers(0, vocab, 6).tolist(), g.integers(0, vocab, 5).tolist()
    p = random_params(
        g,
        repetition_penalty=float(g.choice([0.8, 1.0, 1.3])),
        min_tokens=int(g.integers(0, 8)),
        logit_bias={int(t): float(g.normal()) for t in g.integers(0, vocab, 2)},
    )
    logits = torch.tensor(3 * g.standard_normal(vocab), dtype=torch.float64)
    expected = hugging_face(logits, p, prompt, output, stop_ids)
    committed = int(g.integers(0, 6))  # the rest of the output is only drafted
    history = History(p, vocab, prompt, stop_ids)
    history.commit(output[:committed])
    adjusted = history.adjust(logits[None], [output[committed:]])
    torch.testing.assert_close(to_probs(adjusted, p)[0], expected, rtol=1e-5, atol=1e-7)


def test_greedy_is_argmax_with_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, -INF, 1.0]])
    for temperature in (0.0, 1e-6, 1e-5, 9.9e-5):
        params = SamplingParams(temperature=temperature, top_k=2, top_p=0.1, min_p=0.9)
        assert params.greedy
        assert to_probs(logits, params).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert not SamplingParams(temperature=1e-4).greedy
    warm = to_probs(torch.tensor([40.0, 39.0, -80.0]), SamplingParams(temperature=1e-4))
    assert warm.tolist() == [1, 0, 0]


def test_top_k_alone_means_temperature_1() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    params = SamplingParams(top_k=2)
    assert not params.greedy
    expected = torch.tensor([0.0, math.e, 1.0, 0.0]) / (math.e + 1)
    torch.testing.assert_close(to_probs(logits, params), expected)


# ------------------------------------------------------------------ top-p


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_in_a_large_vocabulary(spread: float, top_p: float) -> None:
    """The shortlist of likeliest tokens and the full sort behind it, against one full sort."""
    vocab = 2000
    assert vocab > TOP_P_SHORTLIST
    g = torch.Generator().manual_seed(int(10 * spread))
    logits = spread * torch.randn(vocab, generator=g, dtype=torch.float64)
    mine = to_probs(logits, SamplingParams(top_p=top_p))
    expected = nucleus_by_sorting(logits.softmax(dim=-1), top_p)
    torch.testing.assert_close(mine.sort().values, expected.sort().values)
    if spread:
        torch.testing.assert_close(mine, expected)


def test_top_p_of_a_row_does_not_depend_on_the_batch() -> None:
    """Law 8: with ties at the edge too, next to a row that needs the full sort or not."""
    g = torch.Generator().manual_seed(0)
    flat = torch.zeros(2000)
    params = SamplingParams(top_p=0.55)
    for _ in range(20):
        peaked = torch.full((2000,), -20.0)
        peaked[torch.randperm(2000, generator=g)[:10]] = 1.0
        alone = to_probs(peaked[None], params)[0]
        assert (alone > 0).sum() == 6
        assert torch.equal(to_probs(torch.stack([peaked, flat]), params)[0], alone)
        assert torch.equal(to_probs(torch.stack([peaked, peaked]), params)[1], alone)


# ------------------------------------------------------------------- draw


def test_draw_on_exact_edges() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125, 0.0], dtype=torch.float64)
    uniforms = torch.tensor(
        [0, 0.25 - 2**-54, 0.25, 0.75 - 2**-53, 0.75, 0.875, BELOW_ONE], dtype=torch.float64
    )
    drawn = draw(probs.expand(len(uniforms), -1), uniforms)
    assert drawn.tolist() == [0, 0, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_has_cells_as_wide_as_the_probabilities(dtype: torch.dtype) -> None:
    """Every token is drawn exactly between its two edges: frequencies without sampling."""
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(20, 30, generator=g, dtype=dtype)
    probs = probs.masked_fill(torch.rand(20, 30, generator=g) < 0.4, 0.0)
    probs[:, 11] += 0.1
    probs = probs / probs.sum(-1, keepdim=True)
    for row in probs:
        exact = np.cumsum(row.double().numpy())
        edges = np.concatenate([[0.0], exact / exact[-1]])
        for x in row.nonzero().squeeze(1).tolist():
            inside = torch.tensor([edges[x] + 1e-12, edges[x + 1] - 1e-12], dtype=torch.float64)
            assert draw(row.expand(2, -1), inside).tolist() == [x, x]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 300),
    zeros=st.floats(0, 1),
    scale=st.sampled_from([1.0, 0.999999, 1.000001, 1e-30]),
    uniform=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2**-24, BELOW_ONE]),
)
def test_draw_never_gives_probability_0(
    seed: int, vocab: int, zeros: float, scale: float, uniform: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    probs = torch.rand(4, vocab, generator=g).softmax(-1) * scale
    probs = probs.masked_fill(torch.rand(4, vocab, generator=g) < zeros, 0.0)
    some = torch.randint(vocab, (4, 1), generator=g)
    probs = probs.scatter(1, some, 1e-6 * scale)
    drawn = draw(probs, torch.full((4,), uniform, dtype=torch.float64))
    assert bool((probs.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0], [NAN, 0.5, 0.5]])
def test_draw_refuses_what_is_no_distribution(row: list[float]) -> None:
    """Nothing to draw from (every token forbidden): an error, never the id V."""
    probs = torch.tensor([[0.5, 0.25, 0.25], row])
    with pytest.raises((ValueError, FloatingPointError)):
        draw(probs, torch.full((2,), 0.5, dtype=torch.float64))


def test_draw_keeps_leading_shapes() -> None:
    probs = torch.eye(4).expand(3, 4, 4)
    assert draw(probs, torch.zeros(3, 4, dtype=torch.float64)).tolist() == [[0, 1, 2, 3]] * 3


# -------------------------------------------------------------- validation

WRONG = [
    ("max_tokens", [0, -1, 2.5, NAN, True]),
    ("temperature", [-0.1, NAN, INF, True]),
    ("top_k", [-1, 1.5, NAN, True]),
    ("top_p", [0, 0.0, -0.5, 1.0001, NAN, True]),
    ("min_p", [-0.1, 1.1, NAN, True]),
    ("repetition_penalty", [0.0, -1.0, 1e-39, 1e9, NAN, INF, True]),
    ("presence_penalty", [NAN, INF, -INF, True]),
    ("frequency_penalty", [NAN, INF, -INF, True]),
    ("logit_bias", [{1: NAN}, {1: INF}, {-1: 1.0}, {True: 1.0}, {1.5: 1.0}]),
    ("min_tokens", [-1, 257, 1.0, NAN, True]),
    ("stop", ["", ["a", ""], [5]]),
    ("stop_token_ids", [[-1], [1.5], [True]]),
    ("seed", [-1, 2**63, 0.5, NAN, True]),
    ("logprobs", [-1, 101, 1.0, NAN, True]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG for value in values]
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    shown = (value,) if isinstance(value, str) else value
    assert str(error.value).startswith(f"{name} is {shown!r}: it must be ")


def test_every_field_has_its_rule() -> None:
    fields = set(SamplingParams.__dataclass_fields__) - {"ignore_eos"}
    assert {name for name, _ in WRONG} == fields


def test_edge_values_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=10**6, seed=2**63 - 1, logprobs=0)
    SamplingParams(logit_bias={0: -INF}, max_tokens=1, min_tokens=1, temperature=1e-300)
    assert SamplingParams(stop="END").stop == ("END",)


# --------------------------------------------------------------- histories


@st.composite
def histories(draw_: st.DrawFn) -> tuple[SamplingParams, list[int], list[int], list[int]]:
    """Parameters, prompt, committed output and drafted path over ten tokens."""
    ids = st.integers(0, 9)
    params = SamplingParams(
        repetition_penalty=draw_(st.sampled_from([0.7, 1.0, 1.5])),
        presence_penalty=draw_(st.sampled_from([-0.5, 0.0, 0.7])),
        frequency_penalty=draw_(st.sampled_from([-0.3, 0.0, 0.4])),
        logit_bias=draw_(st.dictionaries(ids, st.sampled_from([-INF, -1.5, 2.0]), max_size=2)),
        min_tokens=draw_(st.integers(0, 8)),
    )
    prompt = draw_(st.lists(ids, min_size=1, max_size=5))
    output, path = draw_(st.lists(ids, max_size=5)), draw_(st.lists(ids, max_size=5))
    return params, prompt, output, path


@settings(max_examples=200, deadline=None)
@given(case=histories(), seed=st.integers(0, 1000))
def test_a_drafted_position_is_a_committed_one(
    case: tuple[SamplingParams, list[int], list[int], list[int]], seed: int
) -> None:
    params, prompt, output, path = case
    logits = torch.randn(len(path) + 1, 10, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    drafted = History(params, 10, prompt, [0, 3])
    drafted.commit(output)
    paths = [path[:i] for i in range(len(path) + 1)]
    together = drafted.adjust(logits, paths)
    assert torch.equal(logits, before)  # the raw logits stay what they were
    really = History(params, 10, prompt, [0, 3])
    really.commit(output)
    for i in range(len(path) + 1):
        assert torch.equal(really.adjust(logits[i : i + 1], [[]])[0], together[i])
        really.commit(path[i : i + 1])
    # rejected: the drafted tokens left no trace
    fresh = History(params, 10, prompt, [0, 3])
    fresh.commit(output)
    assert torch.equal(drafted.adjust(logits[:1], [[]]), fresh.adjust(logits[:1], [[]]))


def test_penalties_by_hand() -> None:
    """OpenAI's: output tokens only, presence once, frequency per occurrence; HF's: prompt too."""
    logits = torch.tensor([[2.0, 2.0, 2.0, -2.0]])
    history = History(
        SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5),
        4,
        prompt=[0, 0, 3],
    )
    assert history.adjust(logits, [[]]).tolist() == [[1.0, 2.0, 2.0, -4.0]]
    history.commit([1, 1])
    assert history.adjust(logits, [[]]).tolist() == [[1.0, 1 - 1.25, 2.0, -4.0]]
    assert history.adjust(logits, [[1, 2, 1]]).tolist() == [[1.0, 1 - 2.25, 1 - 0.75, -4.0]]


def test_min_tokens_counts_tokens_and_blocks_every_stop_id() -> None:
    logits = torch.zeros(4, 5)
    history = History(SamplingParams(min_tokens=3), 5, [1], stop_ids=[4, 0, 4])
    blocked = [-INF, 0, 0, 0, -INF]
    paths = [[], [1], [1, 2], [1, 2, 3]]
    assert history.adjust(logits, paths).tolist() == [blocked, blocked, blocked, [0] * 5]
    history.commit([1, 1])  # one round, two tokens
    assert history.adjust(logits[:2], paths[:2]).tolist() == [blocked, [0] * 5]
    history.commit([1])
    assert history.adjust(logits[:1], [[]]).tolist() == [[0] * 5]


def test_inactive_history_changes_nothing() -> None:
    history = History(SamplingParams(temperature=0.3, top_k=4), 5, [1])
    assert not history.active
    logits = torch.randn(1, 5)
    assert torch.equal(history.adjust(logits, [[1]]), logits)


def test_bias_forbids_and_forces() -> None:
    history = History(SamplingParams(logit_bias={1: -INF, 2: 100.0}), 3, [0])
    probs = to_probs(history.adjust(torch.tensor([[0.0, 50.0, 0.0]]), [[]]), SamplingParams())
    assert probs[0, 1] == 0
    assert probs[0, 2] == pytest.approx(1)


# ---------------------------------------------------------- broken_rows


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_broken_logits_name_the_position(bad: float) -> None:
    logits = torch.zeros(2, 3, 4)
    logits[:, :, 1] = -INF
    positions = torch.tensor([[5, 6, 7], [8, 9, 10]])
    real = torch.tensor([[True, True], [True, True]])
    assert broken_rows(likeliest(logits)[1], positions, real) == {}
    logits[1, 2] = bad
    found = broken_rows(likeliest(logits)[1], positions, real)
    assert list(found) == [1]
    assert "position 10 " in found[1]
    real[1, 1] = False  # padding may be anything
    assert broken_rows(likeliest(logits)[1], positions, real) == {}


@pytest.mark.parametrize("path", ["torch", "compiled"])
def test_the_likeliest_of_every_position(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the lowest id, wherever in the vocabulary; NaN and infinities are told apart."""
    if path == "torch":
        monkeypatch.setattr("speculant.native.layers.library", lambda: None)
    logits = torch.randn(3, 4, 2500, generator=torch.Generator().manual_seed(9))
    logits[0, 0, [2100, 1100, 2499]] = 9.0
    logits[0, 1, [1024, 1023]] = 9.0
    logits[0, 2] = -1.0
    logits[1, 0, 2499], logits[1, 1, 0], logits[1, 2, 7] = NAN, INF, -INF
    logits[1, 3] = -INF
    ids, fine = likeliest(logits)
    assert ids[0, :3].tolist() == [1100, 1023, 0]
    assert fine.tolist() == [[True] * 4, [False, False, True, False], [True] * 4]
    assert torch.equal(ids[fine], logits.argmax(dim=-1)[fine])
    assert bool(((ids >= 0) & (ids < 2500)).all())
    for part in (logits[:, :2], logits[1:, 1:], logits[..., :2000], logits[:, :, ::2]):
        best, good = likeliest(part)
        want = part.max(dim=-1)
        assert torch.equal(good, want.values.isfinite())
        assert torch.equal(best[good], part.argmax(dim=-1)[good])


# ---------------------------------------------------------------- random


def test_peek_does_not_use_up_and_take_does() -> None:
    random = Random(7)
    first = random.peek(3)
    assert random.peek(3) == first
    assert random.take(2) == first[:2]
    assert random.peek(1) == first[2:]
    ahead = random.peek(5)
    assert ahead[0] == first[2]
    assert random.take(5) == ahead


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=10),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_sequence_does_not_depend_on_how_it_is_asked_for(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    random, taken = Random(seed), []
    for peek, take in sizes:
        random.peek(peek)
        taken += random.take(take)
    assert taken == Random(seed).take(len(taken))
    assert all(0 <= u < 1 for u in taken)


def test_seeds_differ_and_are_told() -> None:
    assert Random(1).take(4) == Random(1).take(4)
    assert Random(1).take(4) != Random(2).take(4)
    assert Random().take(4) != Random().take(4)
    unseeded = Random()
    assert Random(unseeded.seed).take(4) == unseeded.take(4)


def test_random_numbers_are_the_requests_own() -> None:
    torch.manual_seed(0)
    one = Random(3).take(2)
    torch.rand(10)
    other = Random(4)
    other.take(3)
    assert Random(3).take(2) == one
