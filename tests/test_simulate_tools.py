"""Sweep and roll-back: published and recomputed numbers, and a replay with plain lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from speculant.simulate.rollback import RANDOM, Rollback, Slots, parse_plan, roll_back
from speculant.simulate.sweep import overlapping_world, sweep


def series(alpha: float, n: int) -> float:
    """1 + alpha + ... + alpha^n, added up."""
    return sum(alpha**i for i in range(n + 1))


@pytest.mark.parametrize(
    ("alpha", "cost", "best", "speed"), [(0.8, 0.05, 8, 3.09), (0.95, 0.02, 31, 9.95)]
)
def test_corrected_optima(alpha: float, cost: float, best: int, speed: float) -> None:
    found = sweep(alpha, cost, 64)
    assert found.best.num_draft_tokens == best
    assert round(found.best.speedup, 2) == speed
    for row in found.rows:
        tokens, time = series(alpha, row.num_draft_tokens), 1 + row.num_draft_tokens * cost
        assert row.expected_tokens == pytest.approx(tokens)
        assert row.time_per_token == pytest.approx(time / tokens)
        assert row.speedup == pytest.approx(tokens / time)


def test_other_corrected_numbers() -> None:
    assert round(sweep(0.6, 0.05, 5).rows[5].expected_tokens, 2) == 2.38
    assert round(sweep(0.9, 0.05, 5).rows[5].expected_tokens, 2) == 4.69
    rows = sweep(0.95, 0.02, 10).rows
    assert [round(rows[n].speedup, 1) for n in (8, 10)] == [6.4, 7.2]


@pytest.mark.parametrize(
    ("alpha", "cost", "longest", "best", "words"),
    [
        (1.0, 0.1, 10, 10, "longer is always better"),
        (0.9, 0.0, 10, 10, "longer is always better"),
        (0.0, 0.1, 10, 0, "does not pay"),
        (0.0, 0.0, 10, 0, "does not pay"),
        (0.9, 1.5, 10, 0, "does not pay"),
        (1.0, 1.0, 10, 0, "does not pay"),
        (0.5, 0.5, 10, 0, "does not pay"),
        (0.5, 0.4999, 10, 1, "Best: 1 drafted"),
        (0.9, 0.1, 0, 0, "Only plain decoding"),
        (0.9, 0.04, 10, 10, "best is 15, 5.09x"),
        (0.8, 0.05, 8, 8, "Best: 8 drafted tokens, 3.09x."),
        (0.9999, 1e-9, 5, 5, "best is 1000 or more"),
    ],
)
def test_edges(alpha: float, cost: float, longest: int, best: int, words: str) -> None:
    found = sweep(alpha, cost, longest)
    assert [row.num_draft_tokens for row in found.rows] == list(range(longest + 1))
    assert found.rows[0].speedup == 1.0
    assert found.best.num_draft_tokens == best
    assert words in found.advice
    assert found.best.speedup == max(row.speedup for row in found.rows)


@pytest.mark.parametrize(
    ("alpha", "cost", "longest"),
    [(1.1, 0.1, 3), (-0.1, 0.1, 3), (float("nan"), 0.1, 3), (0.5, -0.1, 3), (0.5, float("nan"), 3),
     (0.5, float("inf"), 3), (0.5, 0.1, -1), (0.5, 0.1, 1001)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(alpha: float, cost: float, longest: int) -> None:
    with pytest.raises(ValueError):
        sweep(alpha, cost, longest)


@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.9, 1.0])
def test_simulated_column(alpha: float) -> None:
    """The full loop, in a world of that alpha, gives the formula."""
    world = overlapping_world(alpha, np.random.default_rng(0))
    assert world.alpha == pytest.approx(alpha)
    for row in sweep(alpha, 0.05, 6, samples=20_000, seed=1).rows:
        assert row.simulated is not None
        mean, error = row.simulated
        assert abs(mean - row.expected_tokens) <= 4.5 * error + 1e-9


# ---------------------------------------------------------------- roll-back


def test_law_7_by_hand() -> None:
    """Prefix 8, four drafted: one row keeps all, of the other the second is rejected."""
    found = roll_back(4, parse_plan("none,2"), prefix=8)
    whole, cut = found.turns
    assert (whole.accepted, cut.accepted) == (4, 1)
    # before, prefix + root + 4, prefix + root + accepted, and the recovered or bonus token too
    assert whole.logical == (8, 13, 13, 14)
    assert cut.logical == (8, 13, 10, 11)
    # nothing is erased; the next forward writes its root and four drafted tokens
    assert whole.physical == (8, 13, 13, 18)
    assert cut.physical == (8, 13, 13, 15)
    # the draft has read the root and three of its own; its fourth and the bonus are still to come
    assert (whole.draft_now, whole.catch_up) == (12, 2)
    assert (cut.draft_now, cut.catch_up) == (10, 1)
    assert (whole.wasted, cut.wasted) == (0, 3)
    assert found.totals["rows_verified"] == 10
    assert found.totals["tokens_committed"] == 7
    assert found.totals["tokens_committed_if_batch_is_cut_to_its_shortest"] == 4
    assert found.verified


def replay(found: Rollback) -> None:
    """Lengths of caches kept as Python lists of positions."""
    for b in range(1, found.sequences + 1):
        target = ["prefix"] * found.prefix
        draft, written, pending = list(target), found.prefix, 0
        for turn in (t for t in found.turns if t.sequence == b):
            n, a = turn.drafted, turn.accepted
            assert a == (n if turn.rejected is None else turn.rejected - 1)
            lengths = [(len(target), written)]
            target += ["root"] + ["drafted"] * n
            written = max(written, len(target))
            lengths.append((len(target), written))
            if n:
                draft += ["caught up"] * pending + ["root"] + ["drafted"] * (n - 1)
            del target[len(target) - (n - a) :]
            lengths.append((len(target), written))
            del draft[len(target) :]
            pending = len(target) - len(draft)
            assert (turn.draft_now, turn.catch_up) == (len(draft), pending + 1)
            lengths.append((len(target) + 1, max(written, len(target) + 1 + n)))
            assert tuple(zip(*lengths, strict=True)) == (turn.logical, turn.physical)
    assert found.verified


@pytest.mark.parametrize("seed", range(6))
def test_many_rounds_against_a_replay(seed: int) -> None:
    chance = random.Random(seed)
    drafts = chance.randint(1, 6)
    moves = [None, *range(1, drafts + 1)]
    plan = [[chance.choice(moves) for _ in range(chance.randint(1, 4))] for _ in range(5)]
    replay(roll_back(drafts, plan, prefix=chance.randint(0, 9), rounds=12, seed=seed))


def test_no_drafts_is_plain_decoding() -> None:
    found = roll_back(0, parse_plan("none,none"), prefix=3, rounds=4)
    replay(found)
    assert [t.logical[2] for t in found.turns if t.sequence == 1] == [4, 5, 6, 7]
    assert found.totals["wasted_rows"] == 0


def test_random_rejections_follow_alpha() -> None:
    found = roll_back(3, [[RANDOM]] * 20, rounds=300, alpha=0.7, seed=2)
    expected = series(0.7, 3)
    assert found.totals["expected_tokens_per_forward"] == pytest.approx(expected)
    accepted = np.array([turn.accepted for turn in found.turns])
    error = accepted.std() / np.sqrt(len(accepted))
    assert abs(found.totals["tokens_per_forward"] - expected) < 4.5 * error


def test_a_wrong_length_would_be_seen() -> None:
    slots = Slots(1, 8)
    slots.append(np.array([[5, 6, 7]]), np.array([3]))
    slots.cut(np.array([2]))
    assert slots.holds([[5, 6]])
    assert not slots.holds([[5, 6, 7]])
    assert not slots.holds([[5, 7]])
    with pytest.raises(ValueError, match="roll back"):
        slots.cut(np.array([3]))


@pytest.mark.parametrize(
    ("text", "plan"),
    [("none,2", [[None], [2]]), ("1/none, random", [[1, None], ["random"]])],
)
def test_plans(text: str, plan: list[list[int | str | None]]) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize("text", ["", "none,", "x", "0", "5", "-1", "1.5", "none//1"])
def test_wrong_plans(text: str) -> None:
    with pytest.raises(ValueError, match="rejected at"):
        roll_back(4, parse_plan(text))
