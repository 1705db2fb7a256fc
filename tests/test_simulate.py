"""The simulator against independent truths: enumeration, plain Python, torch's rules, scipy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

import plain_loop
from speculant.proposal import Proposal
from speculant.simulate import exact
from speculant.simulate.broken import BREAKS
from speculant.simulate.chains import Chain, block_rule, draft_chain, token_rule
from speculant.simulate.chisquare import critical_value, goodness_of_fit, homogeneity, survival
from speculant.simulate.compare import compare, dynamic_size
from speculant.simulate.draws import Residuals, Sampler, residual
from speculant.simulate.dynamic import dynamic_tree
from speculant.simulate.loop import Direct, Strategy, counters_of, measure, transitions, write
from speculant.simulate.quality import degrade
from speculant.simulate.theorem import prove
from speculant.simulate.trees import SampledTree, chosen_tree, fixed_tree, try_siblings
from speculant.simulate.world import KINDS, World, make_world, stationary
from speculant.tree import best_nodes
from speculant.verify import verify_block, verify_chain

Walk = list[tuple[float, list[int]]]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def small_world(kind: str = "markov", vocab: int = 3, depths: int = 2, seed: int = 1) -> World:
    return make_world(kind, vocab, 1.2, rng(seed), 0.5, depths)


def world_with_zeros(seed: int = 3) -> World:
    """Five tokens, some of them impossible for the target, some for the draft."""
    target, draft = rng(seed).dirichlet(np.ones(5), 5), rng(seed + 1).dirichlet(np.ones(5), (2, 5))
    target[:, 0] = draft[:, :, 4] = 0.0
    target[2, 3] = draft[0, 1, 1] = 0.0
    return World(
        target / target.sum(axis=1, keepdims=True), draft / draft.sum(axis=2, keepdims=True)
    )


# ---------------------------------------------------------------- chi-square


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 31, 250, 1300, 40_000])
def test_chi_square_tail_is_scipys(freedom: int) -> None:
    for q in (1e-12, 1e-6, 1e-3, 0.05, 0.4, 0.9, 0.9999):
        at = float(stats.chi2.isf(q, freedom))
        assert survival(at, freedom) == pytest.approx(q, rel=1e-8)
    for significance in (0.05, 1e-3, 8.3e-5):
        expected = stats.chi2.isf(significance, freedom)
        assert critical_value(freedom, significance) == pytest.approx(expected, rel=1e-9)
    assert survival(0.0, freedom) == 1.0


def test_goodness_of_fit_is_pearsons() -> None:
    counts, probs = np.array([[30, 50, 20]]), np.array([[0.25, 0.5, 0.25]])
    theirs = stats.chisquare(counts[0], probs[0] * 100)
    ours = goodness_of_fit(counts, probs)
    assert ours.chi_square == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert (ours.degrees_of_freedom, ours.samples, ours.passed) == (2, 100, True)


def test_homogeneity_is_a_contingency_table() -> None:
    a, b = np.array([[30, 50, 25], [40, 10, 60]]), np.array([[10, 90, 31], [33, 22, 41]])
    parts = [stats.chi2_contingency(np.stack(pair)) for pair in zip(a, b, strict=True)]
    ours = homogeneity(a, b)
    assert ours.chi_square == pytest.approx(sum(part.statistic for part in parts))
    assert ours.degrees_of_freedom == sum(part.dof for part in parts) == 4


def test_small_cells_are_pooled() -> None:
    """Of 100: 60, 36, 2 and 2 are expected; the last two are one cell of 4, which joins the 36."""
    counts, probs = np.array([[55, 38, 4, 3]]), np.array([[0.6, 0.36, 0.02, 0.02]])
    found = goodness_of_fit(counts, probs)
    assert found.degrees_of_freedom == 1
    assert found.chi_square == pytest.approx(25 / 60 + 25 / 40)
    pooled = goodness_of_fit(10 * counts[:, :2], np.array([[0.6, 0.4]]))
    assert pooled.degrees_of_freedom == 1
    three = goodness_of_fit(2 * counts, probs)  # the pool expects 8: a cell of its own
    assert three.degrees_of_freedom == 2
    assert three.chi_square == pytest.approx(100 / 120 + 16 / 72 + 36 / 8)


def test_an_impossible_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="probability 0"):
        goodness_of_fit(np.array([[50, 1]]), np.array([[1.0, 0.0]]))


# ---------------------------------------------------------------- draws


def test_sampler_keeps_probabilities_exactly() -> None:
    """The cells' shares add up to the probabilities: no sampling needed to see it."""
    probs = np.concatenate([world_with_zeros().target, rng().dirichlet(np.full(5, 0.1), 20)])
    sampler = Sampler(probs)
    share, alias = (table.reshape(probs.shape) for table in sampler.cells)
    mass = share.copy()
    for row, cell in np.ndindex(probs.shape):
        mass[row, alias[row, cell]] += 1 - share[row, cell]
    assert mass / 5 == pytest.approx(probs, abs=1e-14)
    assert (share[probs == 0] == 0).all()


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.2, 0.6, 1 - 2**-53])
def test_no_draw_is_impossible(uniform: float) -> None:
    world = world_with_zeros()
    rows, many = np.arange(5), np.full(5, uniform)
    assert (world.target[rows, world.from_target.draw(rows, many)] > 0).all()
    for tokens in (
        world.residuals.draw(rows, np.ones(5), many),
        world.from_residual.invert(rows, many),
    ):
        assert (residual(world.target, world.draft[0])[rows, tokens] > 0).all()
    without = world.draft[0].argmax(axis=1)[:, None]
    others = world.from_draft.draw_others(rows, without, many)
    assert (world.draft[0][rows, others] > 0).all()
    assert (others != without[:, 0]).all()


def test_inversion_keeps_probabilities() -> None:
    probs = world_with_zeros().target
    grid = (np.arange(20_000) + 0.5) / 20_000
    for row in range(5):
        tokens = Sampler(probs).invert(np.full(20_000, row), grid)
        assert np.bincount(tokens, minlength=5) / 20_000 == pytest.approx(probs[row], abs=1e-4)


def test_draws_without_some_tokens() -> None:
    probs = np.array([[0.1, 0.2, 0.3, 0.4]])
    grid = (np.arange(1000) + 0.5) / 1000
    tokens = Sampler(probs).draw_others(np.zeros(1000, np.int64), np.array([[3, 1]] * 1000), grid)
    assert np.bincount(tokens, minlength=4).tolist() == [250, 0, 750, 0]


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_residuals_of_any_multiple(a: float) -> None:
    """Against (p - a q)+ written out, mass and distribution."""
    world = world_with_zeros()
    table = Residuals(world.target, world.draft[1])
    spare = np.maximum(world.target - a * world.draft[1], 0)
    rows = np.arange(5)
    assert table.mass(rows, np.full(5, a))[0] == pytest.approx(spare.sum(axis=1), abs=1e-14)
    grid = (np.arange(20_000) + 0.5) / 20_000
    for row in rows:
        mass = spare[row].sum()
        wanted = spare[row] / mass if mass > 0 else world.target[row]
        tokens = table.draw(np.full(20_000, row), np.full(20_000, a), grid)
        got = np.bincount(tokens, minlength=5) / 20_000
        assert got == pytest.approx(wanted, abs=1e-4)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"), [(token_rule, verify_chain), (block_rule, verify_block)]
)
def test_chain_rules_accept_what_the_packages_rules_accept(
    ours: Callable[..., tuple[np.ndarray, np.ndarray]], theirs: Callable[..., object], seed: int
) -> None:
    """Same chains, same uniforms: row by row the same number stands."""
    world, n, rows = world_with_zeros(seed), 4, 4000
    random_ = rng(seed)
    roots = random_.integers(0, 5, rows)
    states, tokens = draft_chain(world, roots, random_.random((n, rows)))
    uniforms = random_.random((rows, n + 1))
    accepted, last = ours(world, states, tokens, uniforms)
    levels = np.minimum(np.arange(n), 1)
    drawn_from = torch.from_numpy(world.draft[levels, states[:, :n]])
    proposal = Proposal(torch.from_numpy(tokens), torch.arange(-1, n - 1), drawn_from)
    verdict = theirs(proposal, torch.from_numpy(world.target[states]), torch.from_numpy(uniforms))
    assert accepted.tolist() == verdict.num_accepted.tolist()  # type: ignore[attr-defined]
    assert len(set(accepted.tolist())) == n + 1
    assert (world.target[states[np.arange(rows), accepted], last] > 0).all()


def siblings_by_enumeration(
    p: Sequence[float], q: Sequence[float], width: int
) -> dict[tuple[int, int], float]:
    """P(rank, token): every order in which siblings may be drawn, rank -1 for recovered."""
    found: Counter[tuple[int, int]] = Counter()

    def go(chance: float, r: list[float], q: list[float], rank: int) -> None:
        if chance < 1e-15:
            return
        if rank == width or sum(q) < 1e-12:
            for y, share in enumerate(r):
                found[-1, y] += chance * share
            return
        q = [b / sum(q) for b in q]
        for x, drawn in enumerate(q):
            if drawn == 0:
                continue
            stands = min(1.0, r[x] / drawn)
            found[rank, x] += chance * drawn * stands
            left = [max(a - b, 0.0) for a, b in zip(r, q, strict=True)]
            if sum(left) > 0:
                rest = [0.0 if y == x else b for y, b in enumerate(q)]
                go(chance * drawn * (1 - stands), [a / sum(left) for a in left], rest, rank + 1)

    go(1.0, list(p), list(q), 0)
    return dict(found)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_siblings_against_every_order_they_come_in(width: int) -> None:
    world, rows = world_with_zeros(), 40_000
    ranks = exact.accept_ranks(world, 0, width)
    for state in range(5):
        truth = siblings_by_enumeration(world.target[state], world.draft[0, state], width)
        emitted = [sum(truth.get((r, y), 0.0) for r in range(-1, width)) for y in range(5)]
        assert emitted == pytest.approx(world.target[state])  # lossless, by enumeration
        for rank, y in product(range(width), range(5)):
            assert ranks[rank, state, y] == pytest.approx(truth.get((rank, y), 0.0), abs=1e-12)
        tokens, taken = try_siblings(world, np.full(rows, state), width, rng(state))
        seen = Counter(zip(taken.tolist(), tokens.tolist(), strict=True))
        keys = sorted(key for key in truth if truth[key] > 1e-12)
        assert set(seen) <= set(keys)
        counts = np.array([[seen[key] for key in keys]])
        found = goodness_of_fit(counts, np.array([[truth[key] for key in keys]]), 1e-4)
        assert found.passed, (state, found)


# ---------------------------------------------------------------- the loop against plain Python


def plays(n: int, shape: Sequence[int]) -> dict[str, tuple[Strategy, plain_loop.Play]]:
    return {
        "token": (Chain(n, token_rule), lambda w, s, r: plain_loop.token_round(w, s, r, n)),
        "block": (Chain(n, block_rule), lambda w, s, r: plain_loop.block_round(w, s, r, n)),
        "tree": (SampledTree(tuple(shape)), lambda w, s, r: plain_loop.tree_round(w, s, r, shape)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_vectorised_loop_writes_what_the_plain_loop_writes(kind: str, rule: str) -> None:
    """Texts of both against the target, one against the other, and as many forwards."""
    world = make_world(kind, 6, 1.0, rng(2), 0.3, 3)
    strategy, play = plays(3, (2, 2))[rule]
    plain = plain_loop.PlainWorld(world.target.tolist(), world.draft.tolist())
    starts = rng(3).integers(0, world.states, 700)
    texts, rounds = plain_loop.write(plain, play, starts.tolist(), 12, random.Random(4))
    theirs = np.array(plain_loop.count_transitions(plain, starts.tolist(), texts))
    ours, forwards = write(world, strategy, starts, 12, rng(5))
    counts = transitions(world, starts, ours)
    assert counts.sum() == theirs.sum() == 700 * 12
    assert goodness_of_fit(theirs, world.target).passed
    assert goodness_of_fit(counts, world.target).passed
    assert homogeneity(counts, theirs).passed
    assert forwards == pytest.approx(rounds, rel=0.05)


def test_texts_are_cut_at_their_length_and_begin_behind_their_start() -> None:
    """A target that counts upwards leaves nothing to chance."""
    up = np.roll(np.eye(7), 1, axis=1)
    world = World(up, up[None])
    texts, forwards = write(world, Chain(4, token_rule), np.arange(7), 12, rng())
    assert texts.tolist() == [[(s + i) % 7 for i in range(1, 13)] for s in range(7)]
    assert forwards == 7 * 3  # five tokens a round: draft and target agree
    assert write(world, Direct(), np.arange(7), 12, rng())[1] == 7 * 12


# ---------------------------------------------------------------- theory


def rounds_by_enumeration(world: World, root: int, n: int, rule: str) -> Walk:
    """Every chain the draft may draw: its probability, and P(the first i stand) for i = 0 .. n."""
    out = []
    for tokens in product(range(world.vocab), repeat=n):
        state, chance, stands = root, 1.0, [1.0]
        for depth, x in enumerate(tokens):
            p, q = world.target[state, x], world.draft[world.level(depth), state, x]
            ratio = p / q if q > 0 else 0.0
            chance *= q
            step = stands[-1] * ratio if rule == "block" else stands[-1] * min(1.0, ratio)
            stands.append(min(1.0, step))
            state = x if world.states > 1 else 0
        out.append((chance, stands))
    return out


def expected_by_enumeration(world: World, root: int, n: int, rule: str) -> float:
    return sum(
        chance * sum(stands) for chance, stands in rounds_by_enumeration(world, root, n, rule)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 3, 5])
def test_expected_tokens_of_a_chain(kind: str, n: int) -> None:
    world = small_world(kind)
    found = exact.sampled(world, [1] * n)
    assert found is not None
    by_root = [expected_by_enumeration(world, s, n, "token") for s in range(world.states)]
    assert found.tokens_per_forward == pytest.approx(float(found.starts @ by_root))
    assert found.starts.sum() == pytest.approx(1.0)
    # where rounds start in the long run: from a long simulation that began elsewhere
    states = np.zeros(20_000, np.int64)
    for i in range(15):
        states = world.after(Chain(n, token_rule).play(world, states, rng(i)).last)
    counts = np.bincount(states, minlength=world.states)[None]
    if world.states > 1:
        assert goodness_of_fit(counts, found.starts[None], 1e-4).passed


def test_context_free_theory_is_the_textbooks() -> None:
    world = make_world("context-free", 12, 1.0, rng(5))
    found = exact.sampled(world, [1] * 6)
    assert found is not None
    alpha = float(np.minimum(world.target[0], world.draft[0, 0]).sum())
    assert world.alpha == pytest.approx(alpha)
    assert found.acceptance == pytest.approx([alpha**i for i in range(1, 7)])
    assert found.tokens_per_forward == pytest.approx((1 - alpha**7) / (1 - alpha))


@pytest.mark.parametrize("kind", KINDS)
def test_simulation_agrees_with_theory(kind: str) -> None:
    """Every strategy, from a start that is not the long run's: within 4.5 standard errors."""
    world = make_world(kind, 10, 1.0, rng(7), 0.25, 6)
    fixed, grown = fixed_tree(world, (3, 2)), dynamic_tree(world, 8, 4, 3)
    cases: list[tuple[Strategy, exact.Expected | None]] = [
        (Chain(5, token_rule), exact.sampled(world, [1] * 5)),
        (SampledTree((3, 1, 2)), exact.sampled(world, (3, 1, 2))),
        (fixed, exact.chosen(world, fixed)),
        (grown, exact.chosen(world, grown)),
    ]
    for strategy, theory in cases:
        assert theory is not None
        found = measure(world, strategy, 30_000, rng(8))
        gap = found.tokens_per_forward - theory.tokens_per_forward
        assert abs(gap) < 4.5 * found.standard_error, strategy
        assert found.standard_error < 0.02
        rates = found.counters.acceptance_per_position
        assert rates == pytest.approx(theory.acceptance, abs=0.02)


def test_block_rule_accepts_what_its_weights_say() -> None:
    world, n = small_world(vocab=4), 4
    starts = np.array([0.4, 0.1, 0.3, 0.2])
    by_root = [expected_by_enumeration(world, s, n, "block") for s in range(4)]
    token = [expected_by_enumeration(world, s, n, "token") for s in range(4)]
    roots = rng(1).choice(4, size=60_000, p=starts)
    tokens = Chain(n, block_rule).play(world, roots, rng(2)).accepted + 1.0
    error = tokens.std() / np.sqrt(len(tokens))
    assert abs(tokens.mean() - starts @ by_root) < 4.5 * error
    assert starts @ by_root > starts @ token + 10 * error


def test_leaves_of_theory_and_simulation() -> None:
    found = compare("markov", (2, 3), rounds=40_000, seed=1, vocab=8)
    for name in ("sampled tree", "chosen tree"):
        contender = next(c for c in found.contenders if c.name == name)
        assert [leaf.path for leaf in contender.leaves] == list(product((1, 2), (1, 2, 3)))
        total = 0.0
        for leaf in contender.leaves:
            assert leaf.exact is not None
            error = np.sqrt(leaf.exact * (1 - leaf.exact) / 40_000)
            assert abs(leaf.probability - leaf.exact) < 4.5 * error + 1e-6
            assert leaf.alpha == pytest.approx(np.sqrt(leaf.probability))
            total += leaf.exact
        assert contender.expected is not None
        assert total == pytest.approx(contender.expected.acceptance[-1])


def test_chosen_tree_by_following_every_text() -> None:
    """Expected tokens from the target's texts alone: how far each is found in the tree."""
    world = small_world(vocab=4)
    tree = fixed_tree(world, (2, 2, 1))
    theory = exact.chosen(world, tree)
    by_root = []
    for root in range(4):
        mean = 0.0
        for text in product(range(4), repeat=3):
            chance, state = 1.0, root
            for token in text:
                chance, state = chance * world.target[state, token], token
            row, depth = 0, 0
            while depth < 3 and tree.child[root, row, text[depth]] >= 0:
                row, depth = int(tree.child[root, row, text[depth]]), depth + 1
            mean += chance * (1 + depth)
        by_root.append(mean)
    assert theory.tokens_per_forward == pytest.approx(float(theory.starts @ by_root))


def test_a_sampled_tree_is_enumerated_only_while_that_is_small() -> None:
    world = make_world("markov", 64, 1.0, rng())
    assert exact.sampled(world, (2, 2)) is not None
    assert exact.sampled(world, (4, 2)) is None


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize(
    ("nodes", "depth", "branch"), [(1, 1, 1), (9, 4, 3), (20, 5, 4), (7, 7, 1)]
)
def test_dynamic_tree_is_eagle_2s(nodes: int, depth: int, branch: int) -> None:
    """The same candidates through the package's own reranking: the same paths."""
    world = make_world("markov", 6, 1.0, rng(2), 0.3, 4)
    tree = dynamic_tree(world, nodes, depth, branch)
    for root in range(6):
        scores, parents, tokens, states = [], [], [], []
        frontier = [(-1, 1.0, root)]
        for level in range(depth):
            start = len(scores)
            for row, confidence, state in frontier:
                q = world.draft[world.level(level), state]
                for token in sorted(range(6), key=lambda t: (-q[t], t))[:branch]:
                    scores.append(confidence * q[token])
                    parents.append(row)
                    tokens.append(token)
                    states.append(token)
            new = sorted(range(start, len(scores)), key=lambda i: (-scores[i], i))[:branch]
            frontier = [(i, scores[i], states[i]) for i in new]
        kept, above, count = best_nodes(
            torch.tensor([scores], dtype=torch.float64), torch.tensor([parents]), nodes
        )
        assert int(count[0]) == nodes
        assert (tree.parents[root] - 1).tolist() == above[0].tolist()
        assert tree.tokens[root].tolist() == [tokens[i] for i in kept[0].tolist()]


def test_an_unlimited_dynamic_tree_holds_the_likeliest_paths() -> None:
    world = make_world("markov", 4, 0.0, rng(3))  # the draft is the target
    tree = dynamic_tree(world, 10, 4, 4)
    for root in range(4):
        chances = []
        for depth in range(1, 5):
            for path in product(range(4), repeat=depth):
                steps = zip((root, *path), path, strict=False)
                chances.append(float(np.prod([world.target[s, t] for s, t in steps])))
        best = sorted(chances, reverse=True)[:10]
        reach = [1.0]
        for above, token in zip(tree.parents[root], tree.tokens[root], strict=True):
            reach.append(reach[above] * world.target[tree.states[root, above], token])
        assert sorted(reach[1:], reverse=True) == pytest.approx(best)


def test_twin_children_are_refused() -> None:
    world = small_world("context-free")
    with pytest.raises(ValueError, match="same token"):
        chosen_tree(world, np.array([[0, 0]]), np.array([[1, 1]]))


@pytest.mark.parametrize("nodes", [1, 3, 14, 200])
@pytest.mark.parametrize("shape", [(1,), (2, 2, 2), (3,)])
@pytest.mark.parametrize("vocab", [3, 32])
def test_a_dynamic_tree_of_that_size_can_be_grown(
    nodes: int, shape: tuple[int, ...], vocab: int
) -> None:
    depth, branch = dynamic_size(nodes, shape, vocab)
    assert branch <= vocab
    assert branch + (depth - 1) * branch**2 >= nodes


# ---------------------------------------------------------------- subcommands


@pytest.mark.parametrize("seed", range(4))
def test_the_theorem_holds(seed: int) -> None:
    found = prove(20_000, seed, vocab=16)
    assert found.passed
    out = found.as_dict()
    assert out["samples"] == out["block"]["samples"] == out["markov"]["tree"]["samples"] == 20_000
    limit = stats.chi2.isf(out["significance"], out["degrees_of_freedom"])
    assert out["critical_value"] == pytest.approx(limit)
    tail = stats.chi2.sf(out["chi_square"], out["degrees_of_freedom"])
    assert out["p_value"] == pytest.approx(tail)
    assert (
        out["markov"]["block"]["tokens_per_forward"] > out["markov"]["token"]["tokens_per_forward"]
    )


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("seed", range(3))
def test_every_broken_rule_is_found(name: str, seed: int) -> None:
    found = prove(20_000, seed, vocab=16, broken=name)
    failed = {row.rule for row in found.tested if not row.passed}
    assert failed == {"tree" if name == "best-path" else "token"}
    both = [row for row in found.tested if row.rule in failed]
    assert not any(row.fit.passed or row.direct.passed for row in both)


@pytest.mark.parametrize("samples", [1000, 1001, 4999, 33_333])
def test_exactly_as_many_tokens_as_asked_for(samples: int) -> None:
    found = prove(samples, vocab=4)
    assert {row.fit.samples for row in found.tested} == {samples}


@pytest.mark.parametrize("kind", KINDS)
def test_quality_falls_as_noise_grows(kind: str) -> None:
    found = degrade(kind, (0, 0.5, 1, 3), (1, 4), rounds=10_000, vocab=16)
    assert found.largest_deviation < 4.5
    alphas = [step.alpha for step in found.steps]
    assert alphas[0] == pytest.approx(1.0)
    assert alphas == sorted(alphas, reverse=True)
    for step in found.steps:
        if step.alpha_error > 0:
            assert abs(step.alpha_measured - step.alpha) < 4.5 * step.alpha_error
        one, four = step.cells
        assert one.exact <= four.exact
        # acceptance falls with depth, so a constant alpha promises too much
        assert four.constant_alpha >= four.exact - 1e-9
        spread = np.hypot(four.block_error, four.standard_error)
        assert four.block >= four.simulated - 4.5 * spread
    last = [step.cells[-1].exact for step in found.steps]
    assert last[0] == pytest.approx(5.0)
    assert last == sorted(last, reverse=True)


def test_without_drift_and_context_alpha_is_constant() -> None:
    found = degrade("context-free", (1,), (8,), rounds=200, drift=0.0)
    cell = found.steps[0].cells[0]
    assert cell.exact == pytest.approx(cell.constant_alpha)


def test_contenders_have_equal_compute() -> None:
    found = compare("markov", (2, 2, 2), rounds=500, vocab=8)
    assert [c.nodes for c in found.contenders] == [14] * 5
    chain = found.contenders[0].measured.counters
    assert sum(chain.accepted_length_histogram) == chain.num_drafts == 500
    assert sum(i * n for i, n in enumerate(chain.accepted_length_histogram)) == (
        chain.num_accepted_tokens
    )


def test_counters_of_a_histogram() -> None:
    counters = counters_of(np.array([5, 3, 2]), 2)
    assert counters.num_accepted_tokens_per_pos == [5, 2]
    assert counters.acceptance_per_position == [0.5, 0.2]
    assert counters.mean_acceptance_length == counters.tokens_per_forward == 1.7


def test_stationary_distribution() -> None:
    moves = np.array([[0.9, 0.1], [0.5, 0.5]])
    assert stationary(moves) == pytest.approx([5 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("kind", "vocab", "noise"), [("other", 8, 1.0), ("markov", 1, 1.0), ("markov", 8, float("nan"))]
)
def test_worlds_that_make_no_sense(kind: str, vocab: int, noise: float) -> None:
    with pytest.raises(ValueError):
        make_world(kind, vocab, noise, rng())


def test_a_world_is_checked() -> None:
    even = np.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="distribution"):
        World(even, np.array([[[0.5, 0.6], [0.5, 0.5]]]))
    with pytest.raises(ValueError, match="does not fit"):
        World(even, even)
