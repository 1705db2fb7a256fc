"""N-gram drafting against a rescan of the whole history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake import commit, make_row
from speculant.drafts.ngram import NgramDraft


def rescan(tokens: list[int], budget: int, longest: int, shortest: int) -> list[int]:
    """The definition, by brute force: longest suffix, most recent earlier occurrence, copy."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copy = list(tokens)
                for i in range(budget):
                    copy.append(copy[end + i])
                return copy[len(tokens) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    rounds=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8),
    longest=st.integers(1, 5),
    shortest=st.integers(1, 3),
    budget=st.integers(0, 6),
)
def test_equals_a_rescan(
    prompt: list[int], rounds: list[list[int]], longest: int, shortest: int, budget: int
) -> None:
    longest = max(longest, shortest)
    draft = NgramDraft(4, longest, shortest)
    draft.start(1, 256)
    row = make_row(prompt, budget=budget)
    draft.open(row)
    for committed in [*rounds, [0]]:
        proposal = draft.propose([row])
        expected = rescan(row.tokens, min(budget, 4), longest, shortest)
        assert proposal.tokens[0].tolist() == expected
        assert proposal.parents[0].tolist() == list(range(-1, len(expected) - 1))
        assert proposal.draft_probs is None
        commit(draft, row, proposal, committed)


def test_the_end_does_not_match_itself() -> None:
    draft = NgramDraft()
    draft.start(1, 64)
    row = make_row([1, 2, 3, 4, 5])
    draft.open(row)
    assert draft.propose([row]).width == 0


def test_longest_then_most_recent() -> None:
    draft = NgramDraft(num_draft_tokens=2, max_ngram=3, min_ngram=1)
    draft.start(1, 64)
    #      3-gram 1 2 3 -> 7 8, older than 2 3 -> 9 and 3 -> 5
    row = make_row([1, 2, 3, 7, 8, 2, 3, 9, 9, 3, 5, 1, 2, 3])
    draft.open(row)
    assert draft.propose([row]).tokens[0].tolist() == [7, 8]
    row = make_row([2, 3, 7, 2, 3, 9, 8, 2, 3])
    draft.open(row)
    assert draft.propose([row]).tokens[0].tolist() == [9, 8]


def test_repetition_is_copied_on() -> None:
    draft = NgramDraft(num_draft_tokens=5)
    draft.start(1, 64)
    row = make_row([9, 1, 2, 1, 2])
    draft.open(row)
    assert draft.propose([row]).tokens[0].tolist() == [1, 2, 1, 2, 1]


def test_rows_are_apart_and_slots_are_reused_clean() -> None:
    draft = NgramDraft(num_draft_tokens=2)
    draft.start(2, 64)
    first, second = make_row([1, 2, 3, 1, 2], slot=0), make_row([1, 2], slot=1)
    draft.open(first)
    draft.open(second)
    proposal = draft.propose([second, first])
    assert proposal.num_nodes.tolist() == [0, 2]
    assert proposal.tokens[1].tolist() == [3, 1]
    draft.close(0)
    reused = make_row([1, 2], slot=0)
    draft.open(reused)
    assert draft.propose([reused]).width == 0


def test_a_closed_row_may_still_be_updated() -> None:
    draft = NgramDraft()
    draft.start(1, 64)
    row = make_row([1, 2])
    draft.open(row)
    proposal = draft.propose([row])
    draft.close(0)
    commit(draft, row, proposal, [3])
    assert row.tokens == [1, 2, 3]  # the update went through, and left nothing for the next request
    draft.open(make_row([1, 2, 4]))
    assert draft.propose([make_row([1, 2, 4])]).width == 0


def test_each_token_is_indexed_once() -> None:
    class Counting(list[int]):
        touched = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counting.touched += 1
            return super().__getitem__(key)

    draft = NgramDraft(num_draft_tokens=1)
    draft.start(1, 10_000)
    row = make_row(list(range(3000)))
    draft.open(row)
    row.tokens = Counting(row.tokens)
    for i in range(100):
        row.tokens.append(5000 + i)
        draft.propose([row])
        draft.update([row], None)  # type: ignore[arg-type]
    assert Counting.touched < 400


@pytest.mark.parametrize("options", [(0, 4, 2), (4, 1, 2), (4, 4, 0)])
def test_wrong_options(options: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NgramDraft(*options)
