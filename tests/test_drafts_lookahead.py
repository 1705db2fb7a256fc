"""Lookahead: the mask against a literal matrix, the n-grams against slow Jacobi iteration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake import FakeTarget, Verifier, make_row
from speculant.drafts.base import Feedback
from speculant.drafts.lookahead import LookaheadDraft, Pool, merge, window_layout


def test_window_layout_is_the_drawn_one() -> None:
    offsets, mask = window_layout(columns=3, levels=3)
    assert offsets.tolist() == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


def slow_jacobi(target: FakeTarget, tokens: list[int], levels: list[list[int]]) -> list[list[int]]:
    """The n-gram of every column, one uncached forward each, its context written out."""
    ngrams = []
    for j in range(len(levels[0])):
        column = [level[j] for level in levels]
        context = tokens + levels[0][: j + 1] + column[1:]
        ngrams.append([*column, int(target.logits(context)[-1].argmax())])
    return ngrams


@pytest.mark.parametrize(("window", "ngram"), [(4, 3), (1, 2), (3, 2), (2, 5)])
def test_ngrams_are_those_of_jacobi_iteration(window: int, ngram: int) -> None:
    target = FakeTarget(seed=3)
    draft = LookaheadDraft(window, ngram, max_candidates=4)
    row = make_row([5, 9, 3, 5, 9], budget=8)
    loop = Verifier(target, draft, row)
    prompt, levels = list(row.tokens), draft._levels[0].tolist()
    for _ in range(12):
        before = list(row.tokens)
        feedback = loop.round()
        ngrams = slow_jacobi(target, before, levels)
        for gram in ngrams[-2:]:
            assert tuple(gram[1:]) in draft._pools[0]._tails[gram[0]]
        moved = len(feedback.paths[0])
        shifted = [ngrams[(j + moved) % window] for j in range(window)]
        levels = [[gram[level + 1] for gram in shifted] for level in range(ngram - 1)]
        assert draft._levels[0].tolist() == levels
    assert row.tokens == prompt + target.greedy(prompt, len(row.tokens) - len(prompt))


def test_greedy_output_is_plain_decoding_and_something_is_accepted() -> None:
    accepted = 0
    for seed in range(4):
        target = FakeTarget(seed=seed)
        row = make_row([1, 2, 3])
        loop = Verifier(target, LookaheadDraft(window=4, ngram=3), row)
        for _ in range(25):
            accepted += len(loop.round().paths[0])
        assert row.tokens[3:] == target.greedy([1, 2, 3], len(row.tokens) - 3)
    assert accepted > 20


chains = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@given(chains=chains, depth=st.integers(0, 4))
def test_merge_is_the_trie(chains: list[list[int]], depth: int) -> None:
    tokens, parents = merge(chains, depth)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    prefixes = {tuple(c[:i]) for c in chains for i in range(1, min(depth, len(c)) + 1)}
    assert set(paths) == prefixes
    assert len(paths) == len(prefixes)


def test_merge_example() -> None:
    assert merge([[1, 2, 3], [1, 2, 4], [5]], 3) == ([1, 2, 3, 4, 5], [-1, 0, 1, 1, -1])


def test_pool_has_no_duplicates_and_forgets_the_oldest() -> None:
    pool = Pool(per_key=2, max_keys=2)
    for tail in ([1, 1], [2, 2], [1, 1], [3, 3]):
        pool.add([7, *tail])
    assert pool.starting_with(7) == [(3, 3), (1, 1)]
    pool.add([8, 0, 0])
    pool.starting_with(7)  # a use: 8 is now the oldest
    pool.add([9, 0, 0])
    assert pool.starting_with(8) == []
    assert len(pool) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=60))
def test_pool_is_bounded(ngrams: list[list[int]]) -> None:
    pool = Pool(per_key=3, max_keys=2)
    for ngram in ngrams:
        pool.add(ngram)
        assert pool.starting_with(ngram[0])[0] == tuple(ngram[1:])
        assert len(pool) <= 6


def test_prompt_seeds_the_pool_and_budget_cuts_the_tree() -> None:
    draft = LookaheadDraft(window=2, ngram=4, max_candidates=3)
    draft.start(3, 64)
    prompt = [5, 1, 2, 3, 5, 1, 2, 4, 5]
    rows = [make_row(prompt, slot=s, budget=b) for s, b in ((0, 8), (1, 2), (2, 0))]
    for row in rows:
        draft.open(row)
    proposal = draft.propose(rows)
    assert proposal.num_nodes.tolist() == [4, 2, 0]
    assert proposal.tokens[0].tolist() == [1, 2, 4, 3]
    assert proposal.parents[0].tolist() == [-1, 0, 1, 1]
    assert proposal.draft_probs is None
    assert proposal.window is not None
    assert proposal.window.tokens.shape == (3, draft.info.max_window)
    assert proposal.width <= draft.info.max_nodes
    assert draft.propose(rows[2:]).window is None  # nothing may be drafted: no rows wasted


def test_committed_text_joins_the_pool() -> None:
    draft = LookaheadDraft(window=1, ngram=3)
    draft.start(1, 64)
    row = make_row([1, 2, 3])
    draft.open(row)
    proposal = draft.propose([row])
    row.tokens += [4, 5]
    draft.update([row], Feedback(proposal, [[4, 5]], [[]]))
    assert draft._pools[0].starting_with(2) == [(3, 4)]
    assert draft._pools[0].starting_with(3) == [(4, 5)]


def test_rows_of_a_batch_equal_their_single_runs() -> None:
    target = FakeTarget(seed=5)
    draft = LookaheadDraft(window=3, ngram=3)
    prompts = [[1, 2, 3, 1, 2], [9], [4, 4, 4, 4, 4, 4]]
    alone = []
    for prompt in prompts:
        draft.start(3, 64)
        row = make_row(prompt)
        draft.open(row)
        alone.append((row, draft.propose([row])))
    draft.start(3, 64)
    rows = [make_row(prompt, slot=2 - i) for i, prompt in enumerate(prompts)]
    for row in rows:
        draft.open(row)
    together = draft.propose(rows)
    assert together.window is not None
    for b, (_, single) in enumerate(alone):
        n = single.width
        assert int(together.num_nodes[b]) == n
        assert together.tokens[b, :n].tolist() == single.tokens[0].tolist()
        assert single.window is not None
        assert torch.equal(together.window.tokens[b], single.window.tokens[0])
    # One round with a ragged feedback: slot states move independently, a closed row is skipped.
    logits = torch.stack([target.logits([b + 1] * 6) for b in range(3)])
    paths, committed = [[], [0], [0, 1]], [[7], [7, 8], [7, 8, 9]]
    for row, tokens in zip(rows, committed, strict=True):
        row.tokens += tokens
    draft.close(rows[0].slot)
    draft.update(rows, Feedback(together, committed, paths, window_logits=logits))
    batched = [draft._levels[row.slot].clone() for row in rows]
    for b in (1, 2):
        draft.start(3, 64)
        row = make_row(prompts[b])
        draft.open(row)
        single = draft.propose([row])
        row.tokens += committed[b]
        feedback = Feedback(single, [committed[b]], [paths[b]], window_logits=logits[b : b + 1])
        draft.update([row], feedback)
        assert torch.equal(draft._levels[0], batched[b])


def test_window_stays_inside_the_context() -> None:
    target = FakeTarget(context_length=20)
    draft = LookaheadDraft(window=4, ngram=4, context_length=20)
    row = make_row([1, 2, 3] * 5)
    loop = Verifier(target, draft, row, room=64)
    while len(row.tokens) < 20:
        row.budget = min(8, 20 - len(row.tokens))
        loop.round()  # the fake target raises past its last position
    assert row.tokens[15:20] == target.greedy([1, 2, 3] * 5, 5)


@pytest.mark.parametrize("options", [(0, 3, 1), (1, 1, 1), (1, 2, 0)])
def test_wrong_options(options: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        LookaheadDraft(*options)
