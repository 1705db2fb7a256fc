"""Counters against the rounds they were fed, counted again from scratch."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculant.metrics import Counters


@dataclass(frozen=True)
class Round:
    """What one round of one row did."""

    drafted: int
    depth: int
    accepted: int
    emitted: int


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    depth = draw(st.integers(0, 5))
    drafted = depth + draw(st.integers(0, 3)) if depth else 0
    accepted = draw(st.integers(0, depth))
    return Round(drafted, depth, accepted, accepted + draw(st.integers(0 if accepted else 1, 1)))


def counted(log: list[Round]) -> Counters:
    counters = Counters()
    for r in log:
        counters.add_round(r.drafted, r.depth, r.accepted, r.emitted)
    return counters


LOG = [Round(3, 3, 2, 3), Round(0, 0, 0, 1), Round(5, 2, 0, 1), Round(1, 1, 1, 2)]


def test_by_hand() -> None:
    c = counted(LOG)
    assert (c.num_drafts, c.num_draft_tokens, c.num_accepted_tokens) == (3, 9, 3)
    assert (c.num_emitted_tokens, c.target_forwards) == (7, 4)
    assert c.num_accepted_tokens_per_pos == [2, 1, 0]
    assert c.num_drafted_per_pos == [3, 2, 1]
    assert c.accepted_length_histogram == [1, 1, 1]
    assert c.mean_acceptance_length == 2.0
    assert c.draft_acceptance_rate == 3 / 9
    assert c.tokens_per_forward == 7 / 4
    assert c.acceptance_per_position == [2 / 3, 1 / 3, 0.0]
    assert c.conditional_acceptance_per_position == [2 / 3, 1 / 2, 0.0]


@given(log=st.lists(rounds(), max_size=30))
def test_identities(log: list[Round]) -> None:
    c = counted(log)
    drafting = [r for r in log if r.drafted]
    assert sum(c.accepted_length_histogram) == c.num_drafts == len(drafting)
    by_length = sum(i * n for i, n in enumerate(c.accepted_length_histogram))
    assert by_length == sum(c.num_accepted_tokens_per_pos) == c.num_accepted_tokens
    assert c.num_emitted_tokens == sum(r.emitted for r in log)
    assert c.target_forwards == len(log)
    depth = max((r.depth for r in drafting), default=0)
    assert len(c.num_accepted_tokens_per_pos) == len(c.num_drafted_per_pos) == depth
    for i in range(depth):
        accepted = sum(r.accepted > i for r in drafting)
        reached = sum(r.accepted >= i for r in drafting)
        assert c.num_accepted_tokens_per_pos[i] == accepted
        assert c.num_drafted_per_pos[i] == sum(r.depth > i for r in drafting)
        assert c.acceptance_per_position[i] == accepted / len(drafting)
        conditional = accepted / reached if reached else 0.0
        assert c.conditional_acceptance_per_position[i] == conditional
    if drafting:
        assert c.mean_acceptance_length == pytest.approx(1 + sum(c.acceptance_per_position))
    assert c.acceptance_per_position == sorted(c.acceptance_per_position, reverse=True)
    json.dumps(c.as_dict())


@given(first=st.lists(rounds(), max_size=10), second=st.lists(rounds(), max_size=10))
def test_merging_is_counting_together(first: list[Round], second: list[Round]) -> None:
    one, other = counted(first), counted(second)
    one.decode_ms, other.decode_ms = 1.5, 2.0
    untouched = counted(second)
    one.merge(other)
    both = counted(first + second)
    both.decode_ms = 3.5
    assert one == both
    one.add_round(1, 1, 1, 2)
    untouched.decode_ms = 2.0
    assert other == untouched  # no list is shared


def test_nothing_counted() -> None:
    c = Counters()
    assert c.mean_acceptance_length == 1.0
    assert c.draft_acceptance_rate == c.tokens_per_forward == c.tokens_per_s == 0.0
    assert c.acceptance_per_position == c.conditional_acceptance_per_position == []
    c.merge(Counters())
    assert c == Counters()
    json.dumps(c.as_dict())


def test_plain_decoding_has_no_drafts() -> None:
    c = counted([Round(0, 0, 0, 1)] * 5)
    assert (c.num_drafts, c.target_forwards, c.num_emitted_tokens) == (0, 5, 5)
    assert c.accepted_length_histogram == []
    assert c.tokens_per_forward == 1.0


def test_speed_is_emitted_tokens_over_decoding() -> None:
    c = counted(LOG)
    c.decode_ms, c.prefill_ms = 14.0, 1e6
    assert c.tokens_per_s == 500.0


@pytest.mark.parametrize(
    "wrong", [Round(3, 3, 4, 5), Round(3, 3, 2, 1), Round(3, 3, -1, 1), Round(3, 2, 3, 4)]
)
def test_impossible_rounds_are_refused(wrong: Round) -> None:
    c = Counters()
    with pytest.raises(ValueError, match="accepted"):
        c.add_round(wrong.drafted, wrong.depth, wrong.accepted, wrong.emitted)
    assert c == Counters()


def test_a_dict_is_a_snapshot() -> None:
    c = counted(LOG)
    before = c.as_dict()
    copy = json.loads(json.dumps(before))
    c.add_round(2, 2, 2, 3)
    assert before == copy
