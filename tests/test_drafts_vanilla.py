"""Vanilla drafting: what it reports against an uncached forward, roll-back against replay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fake import Broken, FakeTarget, commit, make_row
from speculant.drafts.base import DraftRow, Feedback
from speculant.drafts.vanilla import VanillaDraft
from speculant.proposal import Proposal
from speculant.sampling import SamplingParams, draw, to_probs

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=20)
PENALISED = SamplingParams(
    temperature=0.7,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias={3: 2.0, 5: -torch.inf},
    min_tokens=40,
)


def started(model: FakeTarget, rows: Sequence[DraftRow], n: int = 4, **sizes: int) -> VanillaDraft:
    draft = VanillaDraft(model, sizes.get("vocab", 32), n)
    draft.start(sizes.get("slots", 4), sizes.get("capacity", 128))
    for row in rows:
        draft.open(row)
        draft.prefill(row, 0, None)
    return draft


def chain(proposal: Proposal, b: int = 0) -> list[int]:
    return proposal.tokens[b, : int(proposal.num_nodes[b])].tolist()


def assert_same(one: Proposal, a: int, other: Proposal, b: int) -> None:
    """Row a of one proposal is row b of another."""
    assert chain(one, a) == chain(other, b)
    n = len(chain(one, a))
    assert one.parents[a, :n].tolist() == list(range(-1, n - 1))
    if one.draft_probs is not None and other.draft_probs is not None:
        torch.testing.assert_close(one.draft_probs[a, :n], other.draft_probs[b, :n])


@pytest.mark.parametrize("params", [SAMPLED, PENALISED, SamplingParams(temperature=1.0)])
def test_draft_probs_are_what_an_uncached_forward_gives(params: SamplingParams) -> None:
    model = FakeTarget(dtype=torch.float64)
    row, twin = (make_row([4, 8, 15, 16, 23, 4], params=params) for _ in range(2))
    draft = started(model, [row], n=5)
    for _ in range(6):
        proposal = draft.propose([row])
        assert proposal.draft_probs is not None
        assert proposal.draft_probs.shape == (1, 5, 32)
        tokens = chain(proposal)
        for i, token in enumerate(tokens):
            logits = model.logits(row.tokens + tokens[:i])[-1:]
            probs = to_probs(row.history.adjust(logits, [tokens[:i]]), params)[0]
            torch.testing.assert_close(proposal.draft_probs[0, i], probs)
            assert token == int(draw(probs, torch.tensor(twin.random.take(1)[0])))
            assert probs[token] > 0
        commit(draft, row, proposal, [*tokens[:2], 9])


def test_greedy_drafts_are_chosen_and_equal_plain_decoding() -> None:
    model = FakeTarget()
    row = make_row([1, 2, 3])
    draft = started(model, [row], n=6)
    proposal = draft.propose([row])
    assert proposal.draft_probs is None
    assert chain(proposal) == model.greedy([1, 2, 3], 6)


def test_penalties_hold_for_greedy_rows_too() -> None:
    model = FakeTarget()
    params = SamplingParams(temperature=0, repetition_penalty=5.0)
    row = make_row([1, 2, 3], params=params)
    tokens = chain(started(model, [row], n=6).propose([row]))
    for i, token in enumerate(tokens):
        logits = row.history.adjust(model.logits([1, 2, 3, *tokens[:i]])[-1:], [tokens[:i]])
        assert token == int(logits[0].argmax())


def test_greedy_row_among_sampled_ones_has_point_masses() -> None:
    model = FakeTarget()
    rows = [make_row([1, 2, 3], 0, GREEDY), make_row([7, 5], 1, SAMPLED)]
    proposal = started(model, rows).propose(rows)
    assert proposal.draft_probs is not None
    assert chain(proposal, 0) == model.greedy([1, 2, 3], 4)
    ones = torch.nn.functional.one_hot(proposal.tokens[0], 32).to(torch.float32)
    assert torch.equal(proposal.draft_probs[0], ones)
    assert rows[0].random.take(1) == make_row([1]).random.take(1)  # its randomness is untouched


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_draft_equal_to_target_is_always_accepted(params: SamplingParams) -> None:
    """The acceptance probability min(1, p / q) is 1 at every depth, round after round."""
    model = FakeTarget()
    row = make_row([3, 1, 4, 1, 5], params=params)
    draft = started(model, [row], n=3)
    for _ in range(15):
        proposal = draft.propose([row])
        tokens = chain(proposal)
        assert len(tokens) == 3
        logits = model.logits(row.tokens + tokens)[-4:]
        paths = [tokens[:i] for i in range(4)]
        target_probs = to_probs(row.history.adjust(logits, paths), params)
        for i, token in enumerate(tokens):
            q = 1.0 if proposal.draft_probs is None else float(proposal.draft_probs[0, i, token])
            assert float(target_probs[i, token]) == pytest.approx(q, rel=1e-4)
        bonus = int(target_probs[3].argmax())
        commit(draft, row, proposal, [*tokens, bonus])
        assert draft.cache.lengths[0] == len(row.tokens) - 2  # one short: two tokens are pending


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_roll_back_by_replay_and_batch_equals_alone(params: SamplingParams) -> None:
    """After many ragged rounds every row proposes what a fresh draft would, on its own."""
    model, dice = FakeTarget(), random.Random(0)
    rows = [make_row([5, 6, 7, 8][: s + 1], s, params, seed=s) for s in (2, 0, 3, 1)]
    draft = started(model, rows)
    for step in range(30):
        some = dice.sample(rows, dice.randint(1, 4))
        for row in some:
            row.budget = dice.randint(0, 5)
        proposal = draft.propose(some)
        committed, paths = [], []
        for b, row in enumerate(some):
            kept = dice.randint(0, int(proposal.num_nodes[b]))
            committed.append([*chain(proposal, b)[:kept], dice.randrange(32)])
            paths.append(list(range(kept)))
            row.tokens += committed[b]
            row.history.commit(committed[b])
        draft.update(some, Feedback(proposal, committed, paths))
        if step % 5:
            continue
        states = [row.random.generator.get_state() for row in rows]
        replays = []
        for row, state in zip(rows, states, strict=True):
            row.budget = 4
            replays.append(started(model, [row]).propose([row]))
            row.random.generator.set_state(state)
        together = draft.propose(rows)
        for b, replay in enumerate(replays):
            assert len(chain(replay)) == 4
            assert_same(together, b, replay, 0)
        draft.update(rows, Feedback(together, [[]] * 4, [[]] * 4))


def test_finished_rows_in_update_and_slot_reuse() -> None:
    model = FakeTarget()
    row = make_row([1, 2, 3])
    draft = started(model, [row])
    proposal = draft.propose([row])
    row.tokens += chain(proposal)[:1]  # cut by a stop: nothing beyond the first accepted token
    draft.update([row], Feedback(proposal, [row.tokens[3:]], [[0]]))
    draft.close(0)
    assert draft.cache.lengths[0] == 0
    new = make_row([9, 9, 4])
    draft.open(new)
    assert chain(draft.propose([new])) == model.greedy([9, 9, 4], 4)


def test_long_prompts_in_chunks_with_and_without_prefill() -> None:
    model = FakeTarget(context_length=1024)
    prompt = [(7 * i * i + i) % 32 for i in range(700)]
    lazy, eager, short = make_row(prompt, 0), make_row(prompt, 1), make_row([2, 3], 2)
    draft = started(model, [], capacity=1024)
    for row in (lazy, eager, short):
        draft.open(row)
    for start in (0, 256, 512):
        draft.prefill(eager, start, None)
        assert draft.cache.lengths[1] == min(start + 256, 699)
    before = model.num_forwards
    proposal = draft.propose([lazy, eager, short])
    assert model.num_forwards - before == 3 + 4  # lazy catches up in 3 chunks, then 4 depths
    expected = model.greedy(prompt, 4)
    assert chain(proposal, 0) == chain(proposal, 1) == expected
    assert chain(proposal, 2) == model.greedy([2, 3], 4)


def test_one_forward_a_depth_and_none_for_rows_out_of_budget() -> None:
    model = FakeTarget()
    rows = [make_row([1, 2], s, budget=b) for s, b in enumerate((0, 1, 3))]
    draft = started(model, rows)
    before = model.num_forwards
    proposal = draft.propose(rows)
    assert proposal.num_nodes.tolist() == [0, 1, 3]
    assert model.num_forwards - before == 3
    assert draft.propose(rows[:1]).width == 0
    assert model.num_forwards - before == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_broken_logits_stop_a_row_and_keep_its_tokens(
    params: SamplingParams, depth: int, value: float
) -> None:
    prompts = [1, 2, 3, 4], [7] * 20
    sound, model = FakeTarget(), Broken()
    alone = [make_row(prompt, s, params) for s, prompt in enumerate(prompts)]
    expected = started(sound, alone).propose(alone)
    rows = [make_row(prompt, s, params) for s, prompt in enumerate(prompts)]
    draft = started(model, rows)
    model.position, model.value = 3 + depth, value
    proposal = draft.propose(rows)
    assert chain(proposal, 0) == chain(expected, 0)[:depth]
    assert chain(proposal, 1) == chain(expected, 1)
    if params.greedy:
        assert proposal.draft_probs is None
    else:
        assert proposal.draft_probs is not None
        assert bool(proposal.draft_probs.isfinite().all())
    # The trouble passes and the drafts are rejected: no NaN lies where a longer neighbour's
    # forward makes this row read.
    model.position = 10**9
    for row in rows:
        row.tokens += [9]
        row.params = GREEDY
    draft.update(rows, Feedback(proposal, [[9], [9]], [[], []]))
    assert chain(draft.propose(rows), 0) == sound.greedy([1, 2, 3, 4, 9], 4)


def test_logits_that_overflow_under_the_temperature_are_broken() -> None:
    model = Broken()
    row = make_row([1, 2, 3], params=SamplingParams(temperature=0.5))
    draft = started(model, [row])
    model.position, model.value = 3, 3e38
    assert len(chain(draft.propose([row]))) == 1


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_context_shorter_than_the_targets(params: SamplingParams) -> None:
    model = FakeTarget(context_length=12)
    rows = [make_row([1] * 9, 0, params), make_row([2, 3], 1, params)]
    draft = started(model, rows, capacity=12)
    widths = []
    for _ in range(6):
        proposal = draft.propose(rows)  # the fake model raises past its context
        widths.append(int(proposal.num_nodes[0]))
        assert int(proposal.num_nodes[1]) == 4
        rows[0].tokens.append(5)
        draft.update(rows, Feedback(proposal, [[5], []], [[], []]))
    assert widths == [4, 3, 2, 1, 0, 0]
    full, late = make_row([1] * 12, 2, params), make_row([2, 3, 4], 3, params)
    draft.open(full)
    draft.prefill(full, 0, None)
    draft.open(late)  # three tokens to feed: its neighbour is padded past the context
    assert draft.propose([full, late]).num_nodes.tolist() == [1, 4]
    draft.close(2)
    long = make_row([1] * 30, 2, params)
    draft.open(long)
    draft.prefill(long, 0, None)
    assert draft.propose([long, rows[1]]).num_nodes.tolist() == [0, 4]


@pytest.mark.parametrize("vocab", [28, 40])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(temperature=3.0)])
def test_padded_vocabularies(vocab: int, params: SamplingParams) -> None:
    model = FakeTarget(vocab_size=32)
    rows = [make_row([1, 2], s, params, vocab_size=vocab, seed=s) for s in range(4)]
    draft = started(model, rows, n=8, vocab=vocab)
    proposal = draft.propose(rows)
    assert int(proposal.tokens.max()) < min(vocab, 32)
    if proposal.draft_probs is None:
        logits = model.logits([1, 2])[-1, :vocab]
        assert chain(proposal)[0] == int(logits.argmax())
        return
    assert proposal.draft_probs.shape == (4, 8, vocab)
    assert bool((proposal.draft_probs[..., 32:] == 0).all())
    torch.testing.assert_close(proposal.draft_probs.sum(-1), torch.ones(4, 8))
    taken = proposal.draft_probs.gather(2, proposal.tokens[..., None])
    assert bool((taken > 0).all())


def test_mixed_parameters_are_transformed_row_by_row() -> None:
    model = FakeTarget()
    params = [SAMPLED, PENALISED, GREEDY, SAMPLED]
    rows = [make_row([s, 2], s, p, seed=s) for s, p in enumerate(params)]
    together = started(model, rows).propose(rows)
    for s, p in enumerate(params):
        row = make_row([s, 2], s, p, seed=s)
        assert_same(together, s, started(model, [row]).propose([row]), 0)
