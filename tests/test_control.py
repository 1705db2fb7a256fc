"""How much to draft: against the best depth found by trying them all, and what trials cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake import FakeTarget
from scripted import Scripted
from speculant import pace
from speculant.adaptive import FIRST_WAIT, Adaptive, ByConfidence, ByLoad, Costs
from speculant.control import Fixed
from speculant.drafts import load_draft
from speculant.engine import generate, generate_many
from speculant.pace import measure_costs, rising
from speculant.sampling import SamplingParams
from speculant.track import Track


def costs(draft_ms: float, row_ms: float, most: int = 8, base: float = 10.0) -> Costs:
    """A chain: a forward of r rows takes base + row_ms (r - 1), each drafted token draft_ms."""
    return Costs(
        depths=tuple(range(most + 1)),
        rows=tuple(range(1, most + 2)),
        forward_ms=((1, base), (most + 1, base + row_ms * most)),
        draft_ms=tuple(draft_ms * d for d in range(most + 1)),
    )


def simulate(
    control: Adaptive | Fixed, alpha: float, rounds: int, seed: int = 0
) -> tuple[float, list[int]]:
    """Tokens a millisecond of a request whose drafts are accepted with probability alpha each."""
    rng, track = random.Random(seed), Track()
    table = costs_of(control)
    tokens, spent, depths = 0, 0.0, []
    for _ in range(rounds):
        depth = control.budget(10**6, track)
        accepted = 0
        while accepted < depth and rng.random() < alpha:
            accepted += 1
        track.observe(depth, accepted)
        tokens += accepted + 1
        spent += table[depth]
        depths.append(depth)
    return tokens / spent, depths


TABLE = costs(draft_ms=1.0, row_ms=0.5)


def costs_of(control: Adaptive | Fixed) -> dict[int, float]:
    mine = control.costs if isinstance(control, Adaptive) else TABLE
    return dict(zip(mine.depths, mine.round_ms(), strict=True))


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.6, 0.8, 0.95, 1.0])
def test_near_the_best_fixed_depth_and_never_far_below_plain(alpha: float) -> None:
    """Within 5 % of the best depth in hindsight, within 3 % of plain where nothing pays."""
    fixed = [simulate(Fixed(depth), alpha, 4000)[0] for depth in range(9)]
    mine, _ = simulate(Adaptive(TABLE), alpha, 4000)
    assert mine >= 0.95 * max(fixed)
    assert mine >= 0.97 * fixed[0]


def test_a_draft_that_does_not_pay_is_left_off_and_tried_ever_less() -> None:
    _, depths = simulate(Adaptive(TABLE), 0.02, 4000)
    tried = [i for i, depth in enumerate(depths) if depth]
    assert sum(i >= 200 for i in tried) < 0.03 * 3800
    assert any(i >= 1000 for i in tried)
    assert max(depths[i] for i in tried if i >= 200) <= 2


def test_nothing_is_tried_where_even_a_very_good_draft_would_not_pay() -> None:
    """As in a large batch, where every row more costs its full share."""
    assert not any(simulate(Adaptive(costs(draft_ms=1.0, row_ms=9.0)), 0.9, 500)[1])
    # one accepted in 1.9 tokens at 1.5 times the time is worth a look
    assert any(simulate(Adaptive(costs(draft_ms=1.0, row_ms=4.0)), 0.0, 500)[1])


def test_it_comes_back_when_the_text_turns_easy() -> None:
    rng, track, control = random.Random(1), Track(), Adaptive(TABLE)
    depths = []
    for round_ in range(3000):
        alpha = 0.02 if round_ < 1500 else 0.9
        depth = control.budget(10**6, track)
        accepted = 0
        while accepted < depth and rng.random() < alpha:
            accepted += 1
        track.observe(depth, accepted)
        depths.append(depth)
    assert sum(depths[1000:1500]) / 500 < 0.2
    assert sum(depths[-500:]) / 500 > 4


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    draft_ms=st.floats(0, 20),
    row_ms=st.floats(0, 20),
)
def test_the_choice_is_the_best_of_all_depths(
    rates: list[float], draft_ms: float, row_ms: float
) -> None:
    """With very much evidence, against the formula written out."""
    table = costs(draft_ms, row_ms)
    track = Track()
    reach = 1e9
    for rate in rates:
        track.reached.append(reach)
        track.accepted.append(reach * rate)
        reach = 1e9  # evidence of every position, whatever it took to get there
    speeds = []
    for depth, ms in enumerate(table.round_ms()):
        tokens, product = 1.0, 1.0
        for rate in rates[:depth]:
            product *= rate
            tokens += product
        speeds.append(tokens / ms)
    control = Adaptive(table)
    choice = control.budget(10**6, track)
    if not control.drafts or max(speeds) < 1.049 * speeds[0]:
        assert choice == 0
        return
    assert speeds[choice] >= max(speeds) / (1 if choice else 1.051) * (1 - 1e-6)


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    table = Costs((0, 6), (1, 33), ((1, 10.0), (33, 40.0)), (0.0, 5.0))
    assert {*simulate(Adaptive(table), 0.95, 300)[1]} <= {0, 6}
    assert simulate(Adaptive(table), 0.1, 2000)[1].count(6) < 100


def tree_costs(draft_ms: float, times: Sequence[tuple[int, float]], most: int = 4) -> Costs:
    return Costs(
        depths=tuple(range(most + 1)),
        rows=tuple(range(1, most + 2)),
        forward_ms=tuple(times),
        draft_ms=tuple(draft_ms * d for d in range(most + 1)),
    )


def grow(rng: random.Random, sure: float, most: int) -> list[float]:
    """Confidences of a round's candidates, best first: a chain and what stands beside it."""
    top = sure * rng.uniform(0.5, 1.0)
    chain = [top**d for d in range(1, 5)]
    beside = [(1 - top) * c * 0.4 for c in (1.0, *chain)]
    return sorted(chain + beside, reverse=True)[:most]


def tree_speed(
    control: ByConfidence, sure: float, rounds: int, fixed: int | None = None
) -> tuple[float, list[int]]:
    """Tokens a millisecond of a draft whose confidences are the truth; fixed: always so many nodes."""
    rng, track = random.Random(5), Track()
    table, tokens, spent, drafted = control.costs, 0, 0.0, []
    forward = dict(zip(range(1, 10), (0.0, *control._nodes_ms), strict=False))
    base = table.forward_ms[0][1]
    for _ in range(rounds):
        budget = control.budget(10**6, track)
        asked = bool(fixed) if fixed is not None else budget > 0
        nodes, accepted = 0, 0
        if asked:
            found, prices = grow(rng, sure, 8), control.prices(track)
            assert prices is not None
            sums = [0.0]
            for i, c in enumerate(found):
                sums.append(sums[-1] + c - prices.rate * (forward[i + 2] - forward[i + 1]))
            nodes = fixed if fixed is not None else sums.index(max(sums))
            dice, reach = rng.random(), sum(found[:nodes])
            accepted = int(reach) + (dice < reach % 1)
            accepted = min(accepted, nodes)
            if fixed is None:
                track.observe(min(nodes, 4), min(accepted, 4), nodes)
        tokens += 1 + accepted
        spent += base + forward[1 + nodes] + (table.draft_ms[2] if asked else table.draft_ms[0])
        drafted.append(nodes)
    return tokens / spent, drafted


@pytest.mark.parametrize("sure", [0.05, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("slope", [0.2, 1.0, 3.0])
def test_trees_are_as_large_as_pays(sure: float, slope: float) -> None:
    """Near the best fixed number of nodes in hindsight or above it, and never far below plain."""
    times = [(1, 10.0), (2, 10.0), (4, 10 + slope), (9, 10 + 6 * slope)]
    control = ByConfidence(tree_costs(0.8, times))
    fixed = [tree_speed(control, sure, 3000, n)[0] for n in range(9)]
    mine, _ = tree_speed(control, sure, 3000)
    assert mine >= 0.95 * max(fixed)
    assert mine >= 0.97 * fixed[0]


def test_a_tree_that_does_not_pay_is_left_off() -> None:
    control = ByConfidence(tree_costs(2.0, [(1, 10.0), (9, 26.0)]))
    _, drafted = tree_speed(control, 0.05, 3000)
    assert sum(map(bool, drafted[200:])) < 0.03 * 2800
    hopeless = ByConfidence(tree_costs(90.0, [(1, 10.0), (9, 260.0)]))
    assert not any(tree_speed(hopeless, 1.0, 500)[1])


def test_prices_follow_what_is_measured() -> None:
    """The next node never costs less; the rate is plain decoding's or the draft's, which is better."""
    control = ByConfidence(tree_costs(1.0, [(1, 10.0), (2, 12.0), (4, 11.0), (8, 15.0)], most=3))
    prices = control.prices(Track())
    assert prices is not None
    assert prices.nodes_ms == pytest.approx((1 / 3, 2 / 3, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert prices.step_ms == pytest.approx(1.0)
    assert [prices.node(n) for n in (1, 3, 4, 7, 8)] == pytest.approx(
        [prices.rate / 3, prices.rate / 3, prices.rate, prices.rate, math.inf]
    )
    track = Track()
    for _ in range(200):
        track.observe(3, 0, 7)
    poor = control.prices(track)
    assert poor is not None
    assert poor.rate == pytest.approx(0.1)
    assert control.budget(100, track) == 0
    for _ in range(400):
        track.observe(3, 3, 3)
    rich = control.prices(track)
    assert rich is not None
    assert rich.rate == pytest.approx(4 / (11.5 + 3), rel=0.02)
    assert control.budget(100, track) == 3
    assert control.budget(3, track) == 2
    assert Adaptive(TABLE).prices(track) is None


def asked(*temperatures: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=t) for t in temperatures]


@pytest.mark.parametrize("kind", [Adaptive, ByConfidence])
def test_a_request_starts_from_what_others_have_shown(kind: type[Adaptive]) -> None:
    """But not one whose text depends on it: a sampled row of a draft that samples."""
    table = costs(draft_ms=1.0, row_ms=1.0)
    for accepted, deep in ((6, True), (0, False)):
        for samples in (True, False):
            control = ByLoad({1: table, 2: table}, samples, kind)
            control.enter(asked(0.0))
            for _ in range(30):
                track = Track()
                for _ in range(10):
                    control.learn(track, 6, accepted, 6)
                assert track.rounds > 9
            for temperatures in ((0.0,), (0.0, 0.9), (0.9,)):
                control.enter(asked(*temperatures))
                own = samples and temperatures != (0.0,)
                alone = kind(table).budget(100, Track())
                assert control.budget(100, Track()) == alone if own else True
                assert own or (control.budget(100, Track()) > 1) == deep


def test_what_others_show_fades_slowly_and_counts_little() -> None:
    control = ByLoad({1: TABLE}, samples=False)
    control.enter(asked(0.0))
    for _ in range(3000):
        control.learn(Track(), 3, 0, 3)
    mine = Track()
    assert control.budget(100, mine) == 0
    for _ in range(12):  # four rounds' worth of others against twelve of its own
        control.learn(mine, 3, 3, 3)
    assert control.budget(100, mine) > 1


def test_tracks_count_what_was_reached() -> None:
    track = Track()
    track.observe(3, 1)
    assert track.reached == [1, 1, 0]
    assert track.accepted == [1, 0, 0]
    track.observe(0, 0)
    assert track.reached == [1, 1, 0]
    assert track.rates(4, 0.5)[0] == pytest.approx((4 * 0.5 + 1) / 5)
    assert track.rates(0, 0.5) == []
    with pytest.raises(ValueError, match="2 accepted of 1"):
        track.observe(1, 2)


def test_the_end_of_a_request_limits_the_depth() -> None:
    control, track = Adaptive(TABLE, prior=1.0), Track()
    assert control.budget(4, track) == 3
    assert control.budget(1, track) == 0
    assert Fixed(5).budget(3) == 2
    assert Fixed(5).budget(0) == 0


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((1, 2), (2, 3), ((1, 1.0),), (0.0, 1.0)), "ascend from 0"),
        (((0, 1), (1,), ((1, 1.0),), (0.0, 1.0)), "go together"),
        (((0,), (1,), (), (0.0,)), "go together"),
    ],
)
def test_costs_are_checked(parts: tuple, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=said):
        Costs(*parts)
    with pytest.raises(ValueError, match="share"):
        Adaptive(TABLE, prior=1.5)
    assert FIRST_WAIT > 0


class Half(Scripted):
    """Drafts what the target would say, wrong at every other position of the text."""

    def __init__(self, target: FakeTarget, depth: int) -> None:
        def guess(tokens: Sequence[int], budget: int) -> list[int]:
            truth = target.greedy(tokens, budget)
            return [t if (len(tokens) + i) % 2 else t ^ 1 for i, t in enumerate(truth)]

        super().__init__(guess, depth)


def test_the_engine_drafts_as_deep_as_the_control_says() -> None:
    """Greedy text is plain text; the depths are those that the same track gives by hand."""
    target = FakeTarget(seed=3)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    plain = generate(target, load_draft("none", target), [3, 1, 4], params)
    control = Adaptive(costs(draft_ms=0.1, row_ms=0.1, most=4))
    out = generate(target, Half(target, 4), [3, 1, 4], params, control=control)
    assert out.token_ids == plain.token_ids
    expensive = Adaptive(costs(draft_ms=50.0, row_ms=50.0, most=4))
    off = generate(target, Half(target, 4), [3, 1, 4], params, control=expensive)
    assert off.token_ids == plain.token_ids
    assert off.metrics.num_drafts <= 60 / FIRST_WAIT * 3 < out.metrics.num_drafts * 2


def test_a_request_drafts_alone_what_it_drafts_in_a_batch() -> None:
    """Sampled from the draft's probabilities: the text and the counters of each row."""
    target = FakeTarget(seed=3)
    control = Adaptive(costs(draft_ms=0.5, row_ms=0.5, most=3))
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(3)
    ]
    draft = load_draft("vanilla", target, model=FakeTarget(seed=4), num_draft_tokens=3)
    together = generate_many(target, draft, prompts, params, control=control)
    for prompt, mine, out in zip(prompts, params, together, strict=True):
        alone = generate(target, draft, prompt, mine, control=control)
        assert alone.token_ids == out.token_ids
        assert alone.metrics.num_draft_tokens == out.metrics.num_draft_tokens


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1, 99), min_size=1, max_size=7))
def test_times_rise(times: list[float]) -> None:
    """The least-squares answer among all that never fall: means of runs, found by trying all cuts."""
    found = [ms for _, ms in rising(list(enumerate(times, 1)))]

    def best(start: int, least: float) -> tuple[float, list[float]]:
        if start == len(times):
            return 0.0, []
        options = []
        for end in range(start + 1, len(times) + 1):
            mean = sum(times[start:end]) / (end - start)
            if mean >= least - 1e-9:
                rest, tail = best(end, mean)
                error = sum((t - mean) ** 2 for t in times[start:end])
                options.append((error + rest, [mean] * (end - start) + tail))
        return min(options, default=(math.inf, []))

    assert found == pytest.approx(best(0, 0.0)[1])
    assert found == sorted(found)


def test_costs_are_measured_for_chains_and_trees() -> None:
    target = FakeTarget(seed=3)
    chain = measure_costs(target, Half(target, 3))
    assert (chain.depths, chain.rows) == ((0, 1, 2, 3), (1, 2, 3, 4))
    assert all(ms > 0 for _, ms in chain.forward_ms)
    assert measure_costs(target, Half(target, 3), 1).depths == (0, 1)
    tree = Scripted(target.greedy, 2, siblings=2)  # six nodes, two deep
    tree.info = replace(tree.info, max_depth=2)
    found = measure_costs(target, tree)
    assert (found.depths, found.rows) == ((0, 2), (1, 7))
    tree.info = replace(tree.info, priced=True)
    found = measure_costs(target, tree)
    assert (found.depths, found.rows) == ((0, 1, 2), (1, 2, 3))
    assert [rows for rows, _ in found.forward_ms] == [1, 2, 4, 7]
    assert [rows for rows, _ in measure_costs(target, tree, batch=2).forward_ms] == [1, 4, 7]
    with pytest.raises(ValueError, match="nothing to adapt"):
        measure_costs(target, load_draft("none", target))


@pytest.mark.parametrize(
    ("load", "threads", "ms", "wanted"),
    [
        (0.1, 4, {}, None),  # an idle machine: nothing is timed
        (3.0, 1, {}, None),
        (3.0, 4, {4: 50.0, 3: 9.0, 2: 8.5, 1: 16.0}, 3),  # three are as fast as two
        (3.0, 4, {4: 5.0, 3: 7.0, 2: 9.0, 1: 16.0}, 4),
        (3.0, 2, {2: 60.0, 1: 16.0}, 1),
    ],
)
def test_threads_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, load: float, threads: int, ms: dict[int, float],
    wanted: int | None,
) -> None:  # fmt: skip
    """Forwards take what the table says; torch's own number is put back."""
    now = [threads]
    monkeypatch.setattr(pace.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))

    def run(timer: pace.ForwardTimer, passes: int = 1) -> None:
        timer.times[1, 1].append(ms[now[0]])

    monkeypatch.setattr(pace.ForwardTimer, "run", run)
    found = pace.pick_threads(FakeTarget(seed=3))
    assert (found and found[0]) == wanted
    assert now == [threads]
    if found:
        assert found[1] == ms


def test_threads_are_timed_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = pace.pick_threads(FakeTarget(seed=3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert set(found[1]) == {1, 2}
    assert all(ms > 0 for ms in found[1].values())
