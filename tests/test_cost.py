"""Latency model: closed forms, trees, roofline, profile; against enumeration and published sums."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speculant.cost import (
    Engine,
    Machine,
    Measured,
    ModelShape,
    Roofline,
    alpha_of,
    best_chain,
    best_num_draft_tokens,
    best_of,
    best_tree,
    break_even,
    break_even_alpha,
    dense_shape,
    draft_shape,
    estimate,
    expected_tokens,
    forward_ms,
    plan,
    position_rates,
    read_profile,
    speedup,
    stops_paying,
    time_per_token,
    write_profile,
)
from speculant.cost.latency import interpolate
from speculant.cost.profile import (
    Accepted,
    DraftProfile,
    ForwardTime,
    Profile,
    ProfiledMachine,
    ProfiledTarget,
    ProposeTime,
    from_dict,
)
from speculant.cost.trees import alpha_of_tree, rank_rates

H100 = Machine("H100", 3350, 989, 80)
ENGINE = Engine("test", 0.8, 0.5, layer_ms=0.05, step_ms=0.1, round_ms=0.5, tree_ms=0.2)
LLAMA = ModelShape("8B", 32, 4096, 128256, 1024, 8e9)


def enumerated(rates: list[float]) -> float:
    """Expected tokens by walking every outcome of a chain with conditional rates."""
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=len(rates)):
        chance, run = 1.0, True
        accepted = 0
        for hit, rate in zip(outcome, rates, strict=True):
            chance *= rate if hit else 1 - rate
            run = run and bool(hit)
            accepted += run
        total += chance * (accepted + 1)
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_expected_tokens_of_a_constant_alpha(alpha: float, n: int) -> None:
    assert expected_tokens(alpha, n) == pytest.approx(enumerated([alpha] * n))


def test_expected_tokens_of_rates_that_fall_with_depth() -> None:
    conditional = [0.9, 0.7, 0.4]
    unconditional = np.cumprod(conditional).tolist()
    assert expected_tokens(unconditional, 3) == pytest.approx(enumerated(conditional))
    assert expected_tokens(unconditional, 2) == pytest.approx(enumerated(conditional[:2]))
    # past the measured end the last conditional rate goes on
    assert expected_tokens(unconditional, 5) == pytest.approx(enumerated([*conditional, 0.4, 0.4]))


@pytest.mark.parametrize(
    ("alpha", "n", "published"),
    [
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ],
)
def test_leviathan_table_1(alpha: float, n: int, published: float) -> None:
    """arXiv:2211.17192, table 1: speed-ups with free drafts."""
    assert speedup(alpha, n, 0.0) == pytest.approx(published, abs=0.005)


def test_numbers_that_people_quote_wrongly() -> None:
    assert best_num_draft_tokens(0.8, 0.05) == 8
    assert speedup(0.8, 8, 0.05) == pytest.approx(3.09, abs=0.005)
    assert best_num_draft_tokens(0.95, 0.02) == 31
    assert speedup(0.95, 31, 0.02) == pytest.approx(9.95, abs=0.005)
    assert [speedup(0.95, n, 0.02) for n in (8, 10)] == pytest.approx([6.4, 7.2], abs=0.06)
    assert expected_tokens(0.6, 5) == pytest.approx(2.38, abs=0.005)
    assert expected_tokens(0.9, 5) == pytest.approx(4.69, abs=0.005)


def test_the_best_length_is_the_one_of_a_search() -> None:
    def verify(n: int) -> float:
        return 1 + 0.02 * n

    for alpha, cost, overhead in itertools.product(
        (0.2, 0.5, 0.85, 1.0), (0.0, 0.1, 0.6), (0, 0.3)
    ):
        times = [time_per_token(alpha, n, cost, overhead, verify) for n in range(21)]
        found = best_num_draft_tokens(alpha, cost, 20, overhead, verify)
        assert times[found] == min(times)
        assert all(t > times[found] for t in times[:found])  # the shortest of equal ones
    assert best_num_draft_tokens(0.5, 2.0) == 0  # off


def test_break_even_is_where_speed_up_is_one() -> None:
    for n, cost in itertools.product((1, 4, 9), (0.05, 0.3)):
        alpha = break_even_alpha(n, cost)
        assert alpha is not None
        assert speedup(alpha, n, cost) == pytest.approx(1.0)
    assert break_even_alpha(5, 0.0) == 0.0
    assert break_even_alpha(3, 1.5) is None
    assert alpha_of(expected_tokens(0.37, 6), 6) == pytest.approx(0.37)


@pytest.mark.parametrize(
    ("rates", "word"),
    [(1.2, "alpha"), (float("nan"), "alpha"), ([0.5, 0.6], "unconditional"), ([], "empty"),
     ([0.5, -0.1], "position 2")],
)  # fmt: skip
def test_wrong_rates_are_refused(rates: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        position_rates(rates, 3)  # type: ignore[arg-type]


def subtrees(depth: int, branch: int, size: int) -> list[set[tuple[int, ...]]]:
    """Every set of `size` nodes (paths of ranks) that holds its nodes' parents."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(branch), repeat=d)]
    return [
        set(c)
        for c in itertools.combinations(paths, size)
        if all(len(p) == 1 or p[:-1] in c for p in c)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_best_tree_is_the_best_of_all_trees(size: int) -> None:
    conditional, decay = [0.7, 0.6, 0.5], 0.5
    rates = np.cumprod(conditional).tolist()
    ranks = [rank_rates(alpha, 2, decay) for alpha in conditional]

    def value(tree: set[tuple[int, ...]]) -> float:
        return 1 + sum(np.prod([ranks[d][r] for d, r in enumerate(path)]) for path in tree)

    best = max(value(tree) for tree in subtrees(3, 2, size))
    made = best_tree(rates, size, 3, 2, decay)
    assert made.expected_tokens == pytest.approx(best)
    assert made.nodes == size


def test_a_tree_of_one_branch_is_a_chain() -> None:
    made = best_tree(0.6, 5, 5, 1, 0.5)
    assert made.expected_tokens == pytest.approx(expected_tokens(0.6, 5))
    assert made.nodes_per_depth == (1, 1, 1, 1, 1)
    assert sum(rank_rates(0.9, 10, 1.0)) <= 1.0
    alpha = alpha_of_tree(best_tree(0.55, 20, 5, 4, 0.4).expected_tokens, 20, 5, 4, 0.4)
    assert alpha == pytest.approx(0.55, abs=1e-6)


def test_a_plain_step_is_bytes_over_bandwidth() -> None:
    bare = Engine("bare", 1.0, 1.0)
    spent = forward_ms(LLAMA, H100, bare, 1, 1, 0)
    # 16 GB over 3350 GB/s, and 16 GFLOP over 989 TFLOP/s
    assert spent == pytest.approx(16 / 3350 * 1e3 + 16e9 / 989e12 * 1e3)
    cached = forward_ms(LLAMA, H100, bare, 4, 1, 1000)
    kv = 4 * 1000 * 2 * 32 * 1024 * 2 / 3350e9 * 1e3
    attention = 2 * 4 * 2 * 32 * 1000 * 4096 / 989e12 * 1e3
    assert cached - 16 / 3350 * 1e3 - 4 * 16e9 / 989e12 * 1e3 == pytest.approx(kv + attention)


def test_devices_share_a_layer_only_where_the_engine_splits_it() -> None:
    two = Machine("H100", 3350, 989, 80, count=2)
    whole, bare = Engine("one", 1.0, 1.0, splits=False), Engine("bare", 1.0, 1.0)
    assert forward_ms(LLAMA, two, bare, 1, 1, 0) == forward_ms(LLAMA, H100, bare, 1, 1, 0) / 2
    assert forward_ms(LLAMA, two, whole, 1, 1, 0) == forward_ms(LLAMA, H100, bare, 1, 1, 0)
    shared = Engine("shared", 1.0, 1.0, share_ms=0.1)
    more = forward_ms(LLAMA, two, shared, 1, 1, 0) - forward_ms(LLAMA, two, bare, 1, 1, 0)
    assert more == pytest.approx(3.2)


@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_experts_touched_are_those_of_a_simulation(tokens: int) -> None:
    moe = ModelShape("moe", 4, 64, 100, 32, 1e6, 64e6, experts=64, experts_per_token=8)
    rng = np.random.default_rng(0)
    seen = [
        len({e for _ in range(tokens) for e in rng.choice(64, 8, replace=False)})
        for _ in range(400)
    ]
    assert moe.touched_params(tokens) == pytest.approx(1e6 + np.mean(seen) * 1e6, rel=0.02)
    assert moe.touched_params(1) == pytest.approx(moe.active_params)


def test_a_round_adds_up() -> None:
    draft = draft_shape("eagle3", LLAMA)
    assert draft is not None
    assert draft.params == 12 * 4096**2 + 3 * 4096**2 + 4096 * 32000
    times = Roofline(LLAMA, H100, ENGINE, draft, 500)
    work = plan("eagle3", 5)
    parts = forward_ms(LLAMA, H100, ENGINE, 2, 6, 500) + 0.5
    parts += 5 * (forward_ms(draft, H100, ENGINE, 2, 1, 500) + 0.1)
    assert times.round_ms(2, work) == pytest.approx(parts)
    tree = plan("eagle3", 5, 20)
    assert tree.tree
    assert tree.rows == 21
    wide = forward_ms(LLAMA, H100, ENGINE, 2, 21, 500) + 0.5 + 0.2
    wide += 5 * (forward_ms(draft, H100, ENGINE, 2, 10, 500) + 0.1)
    assert times.round_ms(2, tree) == pytest.approx(wide)
    made = estimate(times, work, 3.0, 2)
    assert made.speedup == pytest.approx(times.plain_ms(2) * 3.0 / parts)


def test_families_draft_as_their_papers_say() -> None:
    assert plan("medusa").passes == 1
    assert plan("eagle3").passes == 8
    assert plan("ngram", 7).passes == 0
    assert plan("lookahead").rows == 1 + 60 + 15 * 4
    assert plan("dflash", 15).pass_rows == 16
    assert plan("off").rows == 1
    with pytest.raises(ValueError, match="unknown draft family"):
        plan("eagle9")
    with pytest.raises(ValueError, match="size of the draft"):
        draft_shape("vanilla", LLAMA)


@pytest.mark.parametrize(("billions", "layers"), [(6.74, 32), (13.0, 40), (1.1, 22), (70.6, 80)])
def test_the_usual_shape_of_a_size_is_near_known_models(billions: float, layers: int) -> None:
    assert dense_shape("x", billions * 1e9).layers == pytest.approx(layers, rel=0.4)


def test_the_batch_where_it_stops_paying_is_the_first_of_a_search() -> None:
    draft = draft_shape("eagle3", LLAMA)
    times = Roofline(LLAMA, Machine("L4", 300, 121, 24), ENGINE, draft, 500)
    stop = stops_paying(times, "eagle3", 0.4, 4)
    assert stop is not None

    def pays(batch: int) -> bool:
        return best_of(best_chain(times, "eagle3", 0.4, batch, 4)).work.nodes > 0

    assert [pays(b) for b in range(1, stop + 1)] == [True] * (stop - 1) + [False]
    alpha = break_even(times, plan("eagle3", 3), 4)
    assert alpha is not None
    even = estimate(times, plan("eagle3", 3), expected_tokens(alpha, 3), 4)
    assert even.speedup == pytest.approx(1.0)


def profile() -> Profile:
    forwards = tuple(
        ForwardTime(b, r, 10.0 + 2 * (b - 1) + r, 0.1) for b in (1, 4) for r in (1, 2, 8)
    )
    propose = (
        ProposeTime(1, 2, 2, 2.0), ProposeTime(1, 4, 4, 4.0), ProposeTime(1, 4, 16, 6.0),
        ProposeTime(1, 4, 32, 9.0),
    )  # fmt: skip
    accepted = (Accepted("all", 0.0, 4, 4, (0.8, 0.6, 0.4, 0.3), 3.1, rounds=100),)
    draft = DraftProfile("eagle3", "eagle3", propose, accepted, overhead_ms=0.5)
    target = ProfiledTarget("tiny", "float32", 1000, 4000)
    return Profile(target, ProfiledMachine("here"), 256, forwards, (draft,), plain_overhead_ms=0.25)


def test_measured_times_are_looked_up_and_interpolated() -> None:
    made = profile()
    times = Measured(made, made.drafts[0])
    assert times.plain_ms(1) == pytest.approx(11.25)
    assert times.forward_ms(1, 5) == pytest.approx(15.0)
    assert times.forward_ms(2, 8) == pytest.approx(20.0)
    assert times.round_ms(1, plan("eagle3", 3)) == pytest.approx(14.0 + 3.0 + 0.5)
    assert times.propose_ms(1, plan("eagle3", 4, 20)) == 6.0  # the tree nearer in size
    assert times.round_ms(1, plan("off")) == times.plain_ms(1)
    assert interpolate([(1, 3.0), (2, 5.0)], 4) == 9.0
    assert interpolate([(1, 5.0), (2, 1.0)], 9) == 0.0  # a time is never negative
    half = estimate(times, plan("eagle3", 2), 2.4, 1, drafted_share=0.5)
    assert half.expected_tokens == pytest.approx(1.7)
    # the profile's drafting cost is a mean over all rounds: those without a draft pay it as well
    assert half.round_ms == pytest.approx((13.0 + 11.0) / 2 + 2.0 + 0.5)


def test_a_window_rides_in_every_round() -> None:
    made = profile()
    wide = replace(made.drafts[0], family="lookahead", window_rows=6)
    work, times = plan("lookahead", 4, 4), Measured(made, wide)
    assert times.round_ms(1, work) == pytest.approx(10.0 + (1 + 4 + 6) + 4.0 + 0.5)
    assert times.idle_ms(1, work) == pytest.approx(10.0 + (1 + 6) + 4.0 + 0.5)
    rare = estimate(times, work, 3.0, 1, drafted_share=0.25)
    assert rare.round_ms == pytest.approx(10.0 + 7.0 + 0.25 * 4 + 4.5)
    roof = Roofline(LLAMA, H100, ENGINE, None, 100)
    assert roof.idle_ms(1, work) == pytest.approx(forward_ms(LLAMA, H100, ENGINE, 1, 61, 100))


def test_a_profile_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    assert read_profile(path) == profile()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 2}, "version is 2"),
        ({"extra": 1}, "unknown keys: extra"),
        ({"forward_ms": []}, "batch 1, rows 1"),
        ({"forward_ms": None}, "not a list"),
        ({"target": None}, "target is missing"),
        ({"context_length": -1}, "context_length is -1"),
        ({"forward_ms": [{"batch": 1, "rows": 1, "median_ms": float("nan")}]}, "median_ms is nan"),
        ({"forward_ms": [{"batch": 1, "rows": True, "median_ms": 1}]}, "rows is True"),
        ({"drafts": [{"name": "a", "family": "ngram", "propose_ms": [], "acceptance": []}]},
         "no propose_ms"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused(change: dict[str, object], word: str) -> None:
    data = json.loads(json.dumps(profile().as_dict())) | change
    with pytest.raises(ValueError, match=word):
        from_dict(data)


def test_a_rate_outside_its_range_is_refused_in_a_profile() -> None:
    with pytest.raises(ValueError, match="mean_acceptance_length is 9"):
        Accepted("all", 0.0, 4, 4, (0.5,), 9.0)
    with pytest.raises(ValueError, match="drafted_share"):
        Accepted("all", 0.0, 4, 4, (0.5,), 2.0, drafted_share=1.5)


def test_cost_and_tuner_load_without_torch() -> None:
    code = (
        "import sys, speculant.cost, speculant.tune.recommend, speculant.tune.predict\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
