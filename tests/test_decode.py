"""The loop against plain decoding.

Independent truths: `FakeTarget.greedy` (uncached forwards, one a token), the exact distribution of
short outputs by enumeration over uncached forwards, and a fresh cache for roll-back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from fake import Broken, FakeTarget, FakeTokenizer
from scripted import Guess, Sampled, Scripted
from speculant.drafts import load_draft
from speculant.drafts.base import Draft
from speculant.engine import Engine, generate, generate_many, stream
from speculant.proposal import Proposal
from speculant.request import Completion, RequestError
from speculant.sampling import SamplingParams, to_probs

PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 1, 2, 3], [31, 30, 29, 31, 30], [11, 4, 11, 4, 11]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def oracle(target: FakeTarget, wrong_at: int | None) -> Guess:
    """The target's greedy continuation, wrong at one depth (None: never)."""

    def guess(tokens: Sequence[int], budget: int) -> list[int]:
        chain = target.greedy(tokens, budget)
        if wrong_at is not None and wrong_at < len(chain):
            chain[wrong_at] = (chain[wrong_at] + 1) % target.info.vocab_size
        return chain

    return guess


def drafts(target: FakeTarget) -> dict[str, Draft]:
    """Every draft there is, and scripted ones that are wrong at each depth, chain and tree."""
    out: dict[str, Draft] = {
        "none": load_draft("none", target),
        "ngram": load_draft("ngram", target),
        "lookahead": load_draft("lookahead", target),
        "vanilla": load_draft("vanilla", target, model=FakeTarget(seed=3)),
        "vanilla itself": load_draft("vanilla", target, model=target),
    }
    for depth in (None, 0, 1, 2, 3):
        out[f"chain wrong at {depth}"] = Scripted(oracle(target, depth))
        out[f"tree wrong at {depth}"] = Scripted(oracle(target, depth), siblings=2)
    return out


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


@pytest.mark.parametrize("name", list(drafts(FakeTarget())))
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_equals_plain(target: FakeTarget, name: str, batch: int) -> None:
    draft = drafts(target)[name]
    done = generate_many(target, draft, PROMPTS[:batch], GREEDY, max_rows=batch)
    for prompt, out in zip(PROMPTS, done, strict=False):
        assert out.token_ids == target.greedy(prompt, 24)
        assert out.finish_reason == "length"
        assert out.metrics.num_emitted_tokens == 24
        histogram = out.metrics.accepted_length_histogram
        assert sum(histogram) == out.metrics.num_drafts
        assert sum(i * n for i, n in enumerate(histogram)) == out.metrics.num_accepted_tokens


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
def test_acceptance_is_counted(target: FakeTarget, wrong_at: int) -> None:
    out = generate(target, Scripted(oracle(target, wrong_at)), PROMPTS[0], GREEDY)
    per_position = out.metrics.num_accepted_tokens_per_pos
    assert all(per_position[i] > 0 for i in range(wrong_at))
    assert all(n == 0 for n in per_position[wrong_at:])
    assert "bonus" not in out.origins[: wrong_at + 1]


def test_a_perfect_draft_is_always_accepted(target: FakeTarget) -> None:
    """One short after full acceptance: the draft's cache must catch up, greedy and sampled."""
    draft = load_draft("vanilla", target, model=target, num_draft_tokens=3)
    for params in (GREEDY, SamplingParams(max_tokens=40, seed=4, ignore_eos=True)):
        out = generate(target, draft, PROMPTS[0], params)
        assert out.metrics.draft_acceptance_rate == 1.0
        assert set(out.origins) <= {"accepted", "bonus", "plain"}


@pytest.mark.parametrize("name", ["none", "ngram", "lookahead", "vanilla", "tree wrong at 1"])
def test_row_equals_alone(target: FakeTarget, name: str) -> None:
    """Ragged rows, rows that leave and enter, mixed parameters: each as if it were alone."""
    params = [
        SamplingParams(max_tokens=5 + 7 * i, temperature=0.9 * (i % 3), seed=i, top_k=9 * (i % 2))
        for i in range(5)
    ]
    draft = drafts(target)[name]
    together = generate_many(target, draft, PROMPTS, params, max_rows=2)
    for prompt, mine, out in zip(PROMPTS, params, together, strict=True):
        alone = generate(target, draft, prompt, mine)
        assert out.token_ids == alone.token_ids
        assert out.text == alone.text
        assert out.metrics.num_accepted_tokens == alone.metrics.num_accepted_tokens


def test_no_forward_is_wasted() -> None:
    """Rows that are done leave: one long request among short ones costs its own forwards only."""
    target = FakeTarget(seed=1)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 2, 20)]
    engine = Engine(target, load_draft("none", target), max_rows=3, capacity=64)
    before = target.num_forwards
    done = engine.complete(PROMPTS[:3], params)
    prefills = 2  # the one-token prompt has nothing to prefill
    assert target.num_forwards - before == prefills + 20
    assert [o.metrics.target_forwards for o in done] == [2, 2, 20]


def exact(
    target: FakeTarget, prompt: list[int], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """Exact distribution of `length` tokens of plain decoding, from uncached forwards."""
    from speculant.history import History

    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for path, chance in out.items():
            history = History(params, target.info.vocab_size, prompt, (0,))
            history.commit(path)
            logits = target.logits([*prompt, *path])[-1:].float()
            probs = to_probs(history.adjust(logits, [[]]), params)[0]
            for token in probs.nonzero().flatten().tolist():
                grown[(*path, token)] = chance * float(probs[token])
        out = grown
    return out


def chi_square_p(counts: Counter[tuple[int, ...]], want: dict[tuple[int, ...], float]) -> float:
    """p-value of Pearson's test, cells under 5 pooled; 0 when something impossible came."""
    from scipy import stats

    total = sum(counts.values())
    if any(key not in want for key in counts):
        return 0.0
    seen, expected, rest = [], [], [0.0, 0.0]
    for key, p in want.items():
        if p * total < 5:
            rest[0] += counts[key]
            rest[1] += p * total
        else:
            seen.append(counts[key])
            expected.append(p * total)
    if rest[1] > 0:
        seen.append(rest[0])
        expected.append(rest[1])
    scale = sum(seen) / sum(expected)
    return float(stats.chisquare(seen, [e * scale for e in expected]).pvalue)


HARD = SamplingParams(
    max_tokens=3, temperature=0.8, top_k=4, repetition_penalty=1.4, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias={4: 2.0, 6: -1.0}, min_tokens=2, ignore_eos=False,
)  # fmt: skip
SHARP = {"plain": SamplingParams(max_tokens=3, temperature=0.7, top_k=4, ignore_eos=True)}
SHARP["nucleus"] = SamplingParams(max_tokens=3, top_p=0.6, min_p=0.05, ignore_eos=True)


@pytest.mark.parametrize("kind", ["ngram", "lookahead", "vanilla token", "vanilla block", "tree"])
@pytest.mark.parametrize("params", [SHARP["plain"], SHARP["nucleus"], HARD])
def test_sampled_distribution(kind: str, params: SamplingParams) -> None:
    """3,000 requests of three tokens through the engine against the exact joint distribution."""
    target = FakeTarget(seed=2, vocab_size=12, sharpness=2.0)
    prompt = [3, 5, 3, 5, 8, 3, 5]
    want = exact(target, prompt, params, 3)
    options: dict[str, Any] = {}
    if kind == "tree":
        draft: Draft = Scripted(oracle(target, None), n=2, siblings=2, vocab=12)
    elif kind.startswith("vanilla"):
        other = FakeTarget(seed=5, vocab_size=12, sharpness=2.0)
        draft = load_draft("vanilla", target, model=other, num_draft_tokens=2)
        options = {"rule": kind.split()[1]}
    else:
        draft = load_draft(kind, target)
    many = [_seeded(params, i) for i in range(3000)]
    done = generate_many(target, draft, [prompt] * len(many), many, max_rows=250, **options)
    assert sum(o.metrics.num_draft_tokens for o in done) > 1000
    if params is HARD:
        want = _cut_at_eos(want)
    counts = Counter(tuple(o.token_ids) for o in done)
    assert chi_square_p(counts, want) > 1e-4


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**(vars(params) | {"seed": seed}))


def _cut_at_eos(want: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    out: dict[tuple[int, ...], float] = {}
    for path, chance in want.items():
        end = path.index(0) + 1 if 0 in path else len(path)
        out[path[:end]] = out.get(path[:end], 0.0) + chance
    return out


def test_the_distribution_test_can_fail(target: FakeTarget) -> None:
    """A draft that says it drew from another distribution than it did is caught."""
    target = FakeTarget(seed=2, vocab_size=12, sharpness=2.0)

    class Liar(Sampled):
        def propose(self, rows: Sequence[Any]) -> Proposal:
            honest = super().propose(rows)
            assert honest.draft_probs is not None
            flat = torch.full_like(honest.draft_probs, 1 / 12)
            return Proposal(honest.tokens, honest.parents, flat, honest.lengths)

    def peaked(tokens: Sequence[int]) -> torch.Tensor:
        return torch.softmax(torch.arange(12) * 0.5, dim=0)

    params = SHARP["plain"]
    want = exact(target, [3, 5, 3], params, 3)
    for draft, passes in ((Sampled(peaked, 2), True), (Liar(peaked, 2), False)):
        many = [_seeded(params, i) for i in range(2000)]
        done = generate_many(target, draft, [[3, 5, 3]] * 2000, many, max_rows=250)
        p = chi_square_p(Counter(tuple(o.token_ids) for o in done), want)
        assert (p > 1e-4) == passes


@pytest.mark.parametrize("name", ["ngram", "lookahead", "chain wrong at 2", "tree wrong at 1"])
def test_chosen_drafts_give_plain_decodings_text_for_the_same_seed(
    target: FakeTarget, name: str
) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=12, repetition_penalty=1.2)
    plain = generate(target, load_draft("none", target), PROMPTS[2], params)
    ours = generate(target, drafts(target)[name], PROMPTS[2], params)
    assert ours.token_ids == plain.token_ids


def test_penalties_hold_greedily_as_in_plain_decoding(target: FakeTarget) -> None:
    for extra in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"logit_bias": {3: 5.0, 9: -math.inf}},
        {"min_tokens": 10, "ignore_eos": False, "logit_bias": {0: 3.0}},
    ):
        params = SamplingParams(
            **({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | extra)
        )
        plain = generate(target, load_draft("none", target), PROMPTS[2], params)
        for name, draft in drafts(target).items():
            ours = generate(target, draft, PROMPTS[2], params)
            assert ours.token_ids == plain.token_ids, (name, extra)
        assert len(plain.token_ids) >= params.min_tokens


def test_seeds_repeat_and_differ(target: FakeTarget) -> None:
    draft = drafts(target)["vanilla"]

    def run(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=20, seed=seed, ignore_eos=True)
        return generate(target, draft, PROMPTS[0], params).token_ids

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 0.0])
def test_tiny_temperatures_are_greedy(target: FakeTarget, temperature: float) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
    for name in ("none", "vanilla", "ngram"):
        out = generate(target, drafts(target)[name], PROMPTS[0], params)
        assert out.token_ids == target.greedy(PROMPTS[0], 12)


def test_eos_inside_an_accepted_block_ends_there(target: FakeTarget) -> None:
    """The draft is right about everything; the token at depth 2 is made the EOS."""
    chain = target.greedy(PROMPTS[0], 12)
    eos = chain[6]
    first = chain.index(eos)
    enders = FakeTarget(seed=1, tokenizer=FakeTokenizer(eos_ids=frozenset({eos, 99})))
    params = SamplingParams(max_tokens=24, temperature=0)
    out = generate(enders, Scripted(oracle(enders, None), n=5), PROMPTS[0], params)
    assert out.token_ids == chain[: first + 1]
    assert out.finish_reason == "stop"
    assert out.metrics.num_emitted_tokens == first + 1
    assert out.metrics.num_accepted_tokens <= first + 1
    assert out.text == enders.tokenizer.decode(chain[:first])


def test_a_rejected_eos_does_not_end(target: FakeTarget) -> None:
    def always_eos(tokens: Sequence[int], budget: int) -> list[int]:
        return [0] * min(budget, 2)

    params = SamplingParams(max_tokens=10, temperature=0, logit_bias={0: -math.inf})
    out = generate(target, Scripted(always_eos), PROMPTS[0], params)
    assert len(out.token_ids) == 10
    assert 0 not in out.token_ids
    assert out.metrics.num_accepted_tokens == 0


def test_stop_string_across_and_inside_blocks(target: FakeTarget) -> None:
    chain = target.greedy(PROMPTS[0], 16)
    text = target.tokenizer.decode(chain)
    for start, n in product(range(6), (1, 3, 6)):
        stop = text[start : start + 3]
        want = text[: text.index(stop)]
        params = SamplingParams(max_tokens=16, temperature=0, stop=(stop,), ignore_eos=True)
        draft = Scripted(oracle(target, None), n=n)
        out = generate(target, draft, PROMPTS[0], params)
        assert (out.text, out.finish_reason) == (want, "stop")
        assert len(out.token_ids) == text.index(stop) + 3
        shown = "".join(p.text for p in stream(target, draft, PROMPTS[0], params))
        assert shown == want


def test_stop_and_max_tokens_in_one_block(target: FakeTarget) -> None:
    text = target.tokenizer.decode(target.greedy(PROMPTS[0], 8))
    draft = Scripted(oracle(target, None), n=8)
    for limit, reason in ((4, "length"), (5, "stop"), (6, "stop")):
        params = SamplingParams(max_tokens=limit, temperature=0, stop=(text[3:5],), ignore_eos=True)
        out = generate(target, draft, PROMPTS[0], params)
        if text.index(text[3:5]) == 3:
            assert (out.finish_reason, len(out.token_ids)) == (reason, min(limit, 5))


def test_context_fills_up_in_the_middle_of_a_draft() -> None:
    target = FakeTarget(seed=1, context_length=20)
    for name, draft in drafts(target).items():
        out = generate(target, draft, [1, 2, 3], SamplingParams(max_tokens=99, temperature=0))
        if out.finish_reason == "length":
            assert len(out.token_ids) == 17, name
    wide = FakeTarget(seed=1, context_length=40)
    plain = generate(wide, load_draft("none", wide), [1, 2, 3], GREEDY)
    small = FakeTarget(seed=3, context_length=9)  # the draft's context ends long before
    out = generate(wide, load_draft("vanilla", wide, model=small), [1, 2, 3], GREEDY)
    assert out.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        (list(range(20)), "context"),
        ([99], "outside"),
        ([-1], "outside"),
    ],
)
def test_bad_prompts(prompt: list[int] | str, words: str) -> None:
    target = FakeTarget(context_length=20)
    with pytest.raises(RequestError, match=words):
        generate(target, load_draft("none", target), prompt)


def test_nan_in_the_target_names_the_position() -> None:
    target = Broken(seed=1)
    target.position = 6
    with pytest.raises(FloatingPointError, match="position 6"):
        generate(target, load_draft("none", target), [1, 2, 3], GREEDY)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_the_draft_costs_speed_only(target: FakeTarget, value: float) -> None:
    broken = Broken(seed=1)
    broken.position, broken.value = 8, value
    draft = load_draft("vanilla", target, model=broken)
    out = generate(target, draft, PROMPTS[0], GREEDY)
    assert out.token_ids == target.greedy(PROMPTS[0], 24)

    def nan(tokens: Sequence[int]) -> torch.Tensor:
        return torch.full((32,), value)

    class Nan(Sampled):
        def propose(self, rows: Sequence[Any]) -> Proposal:
            probs = torch.full((len(rows), 2, 32), value)
            return Proposal(torch.ones(len(rows), 2, dtype=torch.int64), torch.arange(-1, 1), probs)

    out = generate(target, Nan(nan), PROMPTS[0], GREEDY)
    assert out.token_ids == target.greedy(PROMPTS[0], 24)
    assert out.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("token", [-1, 32])
def test_tokens_outside_the_vocabulary_are_refused(target: FakeTarget, token: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        generate(target, Scripted(lambda tokens, budget: [token]), PROMPTS[0], GREEDY)


def test_padded_vocabularies(target: FakeTarget) -> None:
    for vocab in (28, 40):
        other = FakeTarget(seed=1, vocab_size=vocab)
        draft = load_draft("vanilla", target, model=other)
        for params in (GREEDY, SamplingParams(max_tokens=24, seed=3, top_k=50, ignore_eos=True)):
            out = generate(target, draft, PROMPTS[0], params)
            assert all(0 <= t < 32 for t in out.token_ids)
            if params.greedy:
                assert out.token_ids == target.greedy(PROMPTS[0], 24)


@pytest.mark.parametrize("name", ["ngram", "lookahead", "vanilla", "tree wrong at 1"])
def test_rollback_by_replay(target: FakeTarget, name: str) -> None:
    """After every round each row's cache equals a fresh prefill of what it committed."""
    engine = Engine(target, drafts(target)[name], max_rows=3, capacity=60)
    tokens = {engine.submit(p, SamplingParams(max_tokens=20, seed=i)): list(p)
              for i, p in enumerate(PROMPTS[:4])}  # fmt: skip
    replays = 0
    while engine.busy:
        for piece in engine.step():
            tokens[piece.request] += piece.token_ids
        for number, slot in engine.slots():
            prefix = tokens[number][:-1]
            assert engine.cache.lengths[slot] == len(prefix)
            if prefix:
                fresh = target.new_cache(1, len(prefix))
                where = torch.arange(len(prefix))[None]
                target.forward(torch.tensor([prefix]), where, None, fresh.rows([0], len(prefix)))
                ours = engine.cache.data[:, :, slot, :, : len(prefix)]
                torch.testing.assert_close(ours, fresh.data[:, :, 0], atol=1e-5, rtol=1e-4)
                replays += 1
    assert replays > 20


def test_logprobs_are_the_targets_own(target: FakeTarget) -> None:
    params = SamplingParams(max_tokens=12, seed=5, temperature=0.7, logprobs=3, ignore_eos=True)
    for name in ("none", "vanilla", "tree wrong at 1"):
        out = generate(target, drafts(target)[name], PROMPTS[0], params)
        assert out.logprobs is not None
        assert len(out.logprobs) == 12
        for i, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
            table = target.logits([*PROMPTS[0], *out.token_ids[:i]])[-1].log_softmax(-1)
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(table[token]), abs=1e-4)
            assert [t for t, _ in entry.top] == table.topk(3).indices.tolist()


def test_stream_equals_generate_and_can_be_left(target: FakeTarget) -> None:
    draft = drafts(target)["vanilla"]
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    whole: Completion = generate(target, draft, PROMPTS[0], params)
    pieces = list(stream(target, draft, PROMPTS[0], params))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces][-1] == "length"
    left = stream(target, draft, PROMPTS[0], params)
    next(left)
    left.close()
    assert generate(target, draft, PROMPTS[0], params).token_ids == whole.token_ids


def test_cancel_frees_the_slot(target: FakeTarget) -> None:
    engine = Engine(target, load_draft("ngram", target), max_rows=1, capacity=64)
    first = engine.submit(PROMPTS[0], GREEDY)
    second = engine.submit(PROMPTS[1], GREEDY)
    engine.step()
    engine.cancel(first)
    tokens: list[int] = []
    while engine.busy:
        for piece in engine.step():
            assert piece.request == second
            tokens += piece.token_ids
    assert tokens == target.greedy(PROMPTS[1], 24)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_is_refused(target: FakeTarget, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(32), -math.inf))
    with pytest.raises(RequestError, match="forbid every token"):
        generate(target, load_draft("ngram", target), PROMPTS[0], params)
    most = dict.fromkeys(range(1, 32), -math.inf)  # only EOS is left, and min_tokens forbids it
    params = SamplingParams(temperature=temperature, logit_bias=most, min_tokens=2)
    with pytest.raises(RequestError, match="forbid every token"):
        generate(target, load_draft("ngram", target), PROMPTS[0], params)


def test_nan_in_one_row_leaves_the_others_alone() -> None:
    """The broken request ends with an error; its neighbour, and who takes its slot, do not notice."""
    target = Broken(seed=1)
    target.position = 30
    engine = Engine(target, load_draft("ngram", target), max_rows=2, capacity=64)
    long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    bad, good = engine.submit(list(range(1, 28)), long), engine.submit(PROMPTS[0], GREEDY)
    later = -1
    tokens: dict[int, list[int]] = {}
    errors = {}
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.request, []).extend(piece.token_ids)
            if piece.error:
                errors[piece.request] = piece.error
                later = engine.submit(PROMPTS[3], GREEDY)
    assert list(errors) == [bad]
    assert "position 30" in errors[bad]
    assert tokens[good] == target.greedy(PROMPTS[0], 24)
    assert tokens[later] == target.greedy(PROMPTS[3], 24)


def test_two_streams_share_a_draft_object(target: FakeTarget) -> None:
    for name in ("ngram", "lookahead", "vanilla"):
        draft = drafts(target)[name]
        mine = stream(target, draft, PROMPTS[0], GREEDY)
        other = stream(target, draft, PROMPTS[3], GREEDY)
        got: tuple[list[int], list[int]] = ([], [])
        while True:
            pieces = next(mine, None), next(other, None)
            for tokens, piece in zip(got, pieces, strict=True):
                tokens += piece.token_ids if piece else []
            if pieces == (None, None):
                break
        assert got == (target.greedy(PROMPTS[0], 24), target.greedy(PROMPTS[3], 24))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_nan_behind_a_sampled_token_does_not_bias(rule: str) -> None:
    """Draft probabilities break exactly behind token 3: dropping that token would starve it."""
    target = FakeTarget(seed=2, vocab_size=12, sharpness=1.0)
    flat = torch.full((12,), 1 / 12)

    class Fragile(Sampled):
        def propose(self, rows: Sequence[Any]) -> Proposal:
            honest = super().propose(rows)
            assert honest.draft_probs is not None
            if honest.width > 1:
                honest.draft_probs[honest.tokens[:, 0] == 3, 1] = math.nan
            return honest

    params = SamplingParams(max_tokens=2, ignore_eos=True)
    many = [_seeded(params, i) for i in range(4000)]
    draft = Fragile(lambda tokens: flat, 2)
    done = generate_many(target, draft, [[3, 5, 3]] * 4000, many, max_rows=250, rule=rule)
    want = exact(target, [3, 5, 3], params, 2)
    assert chi_square_p(Counter(tuple(o.token_ids) for o in done), want) > 1e-4


def test_top_k_50_with_tails_of_probability_zero() -> None:
    """Vocabulary 128, top-k 50: what is emitted has probability above 0, in distribution."""
    target = FakeTarget(seed=6, vocab_size=128, sharpness=1.0)
    other = FakeTarget(seed=7, vocab_size=128, sharpness=1.0)
    draft = load_draft("vanilla", target, model=other, num_draft_tokens=3)
    params = SamplingParams(max_tokens=2, top_k=50, ignore_eos=True)
    many = [_seeded(params, i) for i in range(3000)]
    done = generate_many(target, draft, [[3, 5, 90]] * 3000, many, max_rows=250)
    want = exact(target, [3, 5, 90], params, 2)
    first: dict[tuple[int, ...], float] = {}
    for path, chance in want.items():
        first[path[:1]] = first.get(path[:1], 0.0) + chance
    assert len(first) == 50
    assert all(tuple(o.token_ids) in want for o in done)
    assert chi_square_p(Counter(tuple(o.token_ids[:1]) for o in done), first) > 1e-4


def test_seeded_rows_beside_unseeded_ones(target: FakeTarget) -> None:
    draft = drafts(target)["vanilla"]
    seeded = SamplingParams(max_tokens=15, seed=3, ignore_eos=True)
    free = SamplingParams(max_tokens=15, ignore_eos=True)
    alone = generate(target, draft, PROMPTS[0], seeded).token_ids
    runs = [generate_many(target, draft, PROMPTS[:3], [seeded, free, free]) for _ in range(2)]
    assert [r[0].token_ids for r in runs] == [alone, alone]
    assert runs[0][1].token_ids != runs[1][1].token_ids


def test_rows_accept_none_some_and_all_in_one_round(target: FakeTarget) -> None:
    truth = {p[0]: target.greedy(p, 40) for p in PROMPTS[:3]}
    right = {PROMPTS[0][0]: 0, PROMPTS[1][0]: 2, PROMPTS[2][0]: 4}

    def guess(tokens: Sequence[int], budget: int) -> list[int]:
        prompt = next(p for p in PROMPTS if p[0] == tokens[0])
        chain = truth[tokens[0]][len(tokens) - len(prompt) :][: min(budget, 4)]
        good = right[tokens[0]]
        return chain[:good] + [(t + 1) % 32 for t in chain[good:]]

    done = generate_many(target, Scripted(guess), PROMPTS[:3], GREEDY, max_rows=3)
    for prompt, out, good in zip(PROMPTS, done, (0, 2, 4), strict=False):
        assert out.token_ids == target.greedy(prompt, 24)
        assert out.metrics.accepted_length_histogram[good] == max(
            out.metrics.accepted_length_histogram
        )


def test_a_sampled_chain_beside_a_sampled_tree_keeps_its_rule(target: FakeTarget) -> None:
    """Which rule judges a row is decided by its own proposal, not by its neighbours'."""
    from speculant.decode import Decoder

    decoder = Decoder(target, load_draft("none", target), target.new_cache(1, 8), "block")
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        probs = torch.rand(2, 4, 6, dtype=torch.float64, generator=generator).softmax(-1)
        draft = torch.rand(2, 3, 6, dtype=torch.float64, generator=generator).mul(3).softmax(-1)
        draft[1, 1] = draft[1, 0]  # siblings come from one distribution
        tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
        parents = torch.tensor([[-1, 0, 1], [-1, -1, 0]])
        uniforms = torch.rand(2, 4, dtype=torch.float64, generator=generator)
        both = decoder._judge(Proposal(tokens, parents, draft), probs, uniforms)
        for b in range(2):
            one = Proposal(tokens[b : b + 1], parents[b : b + 1], draft[b : b + 1])
            alone = decoder._judge(one, probs[b : b + 1], uniforms[b : b + 1])
            assert int(both.num_accepted[b]) == int(alone.num_accepted[0])
            assert int(both.next_token[b]) == int(alone.next_token[0])


def test_block_rule_holds_in_a_ragged_batch(target: FakeTarget) -> None:
    """Companions of other lengths change neither a sampled row's text nor its rule."""
    draft = load_draft("vanilla", target, model=FakeTarget(seed=3), num_draft_tokens=3)
    short = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    for seed in range(40):
        mine = SamplingParams(max_tokens=10, seed=seed, ignore_eos=True)
        alone = generate(target, draft, PROMPTS[0], mine).token_ids
        beside = generate_many(target, draft, [PROMPTS[0], PROMPTS[1]], [mine, short])
        assert beside[0].token_ids == alone
