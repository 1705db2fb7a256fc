"""EAGLE-2's dynamic tree against its definition, written out over an uncached head.

Independent truth: `PlainTree` runs the head over the whole list of pairs for every path, one path
at a time, attention written out and no cache, and takes products of probabilities literally.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fake import HIDDEN, FakeTarget, make_row
from speculant.adaptive import ByConfidence, Costs
from speculant.check import run_checks
from speculant.cli import app
from speculant.decode import Decoder, Row
from speculant.drafts import load_draft
from speculant.drafts.base import DraftRow
from speculant.drafts.eagle import EagleDraft
from speculant.drafts.eagle_fixed import FIXED
from speculant.drafts.eagle_tree import Trust, likeliest
from speculant.engine import Engine, generate, generate_many
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.weights import save_head
from speculant.history import History
from speculant.metrics import Counters
from speculant.prices import Prices
from speculant.proposal import Proposal
from speculant.sampling import Random, SamplingParams
from speculant.text import TextStream
from test_eagle import PROMPTS, VOCAB, causal, make_head, states

TARGET = FakeTarget(seed=1)
GREEDY = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)

Nodes = tuple[int, ...]


def make_eagle1(seed: int = 0) -> Eagle1Head:
    """A random EAGLE-1 head on the fake target."""
    torch.manual_seed(seed)
    head = Eagle1Head(Eagle1Config(HIDDEN, 24, 4, 2, 6, VOCAB)).eval()
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.5)
    head.bind(lambda states: 0.05 * TARGET.unembed(states))  # sharper ones tie in float32
    return head


class PlainTree:
    """Every path's confidence by the definition; paths are tuples of target ids."""

    def __init__(self, head: Any, tokens: Sequence[int], history: History | None = None) -> None:
        self.head, self.tokens, self.history = head, list(tokens), history
        self.hidden: dict[Nodes, Tensor] = {}

    @cached_property
    def features(self) -> Tensor:
        taps: Tensor = self.head.fuse(states(TARGET, self.tokens[:-1], self.head.config.taps))
        return taps

    @torch.no_grad()
    def output(self, path: Nodes) -> Tensor:
        """The head's output at the last pair of tokens + path, all pairs run anew."""
        if path not in self.hidden:
            own = [self.output(path[:i])[None] for i in range(len(path))]
            hidden = torch.cat([self.features, *own])
            embedded = TARGET.embed(torch.tensor([self.tokens[1:] + list(path)]))
            positions = torch.arange(embedded.shape[1])[None]
            self.hidden[path] = self.head(embedded, hidden[None], positions, causal)[0, -1]
        return self.hidden[path]

    @torch.no_grad()
    def logits(self, path: Nodes) -> Tensor:
        """Of every target token behind a path [V], -inf for those that cannot be drafted."""
        logits = torch.full((1, VOCAB), -math.inf, dtype=torch.float64)
        logits[0, self.head.target_ids] = self.head.logits(self.output(path)).double()
        if self.history is not None:
            logits = self.history.adjust(logits, [list(path)])
        return logits[0]

    def ranked(self, path: Nodes) -> list[int]:
        """Draft tokens behind a path, the likeliest first."""
        logits = self.logits(path)
        return [t for t in logits.argsort(descending=True).tolist() if logits[t] > -math.inf]

    def probs(self, path: Nodes) -> dict[int, float]:
        """Probability of every draft token behind a path."""
        out = self.logits(path).softmax(-1)
        return {t: float(out[t]) for t in self.head.target_ids.tolist() if out[t] > 0}

    def children(self, path: Nodes, confidence: float) -> list[tuple[float, Nodes]]:
        return [(confidence * p, (*path, t)) for t, p in self.probs(path).items()]

    def best(self, depth: int, branch: int, count: int) -> set[Nodes]:
        """EAGLE-2: expand the `branch` most confident of each depth, keep the `count` best of all."""
        frontier: list[tuple[float, Nodes]] = [(1.0, ())]
        offered: list[tuple[float, Nodes]] = []
        for _ in range(depth):
            level = [c for p, path in frontier for c in top(self.children(path, p), branch)]
            offered += level
            frontier = top(level, branch)
        return {path for _, path in top(offered, count)}

    def all_best(self, depth: int, count: int) -> set[Nodes]:
        """The `count` most confident of all paths there are, down to `depth`."""
        level: list[tuple[float, Nodes]] = [(1.0, ())]
        every: list[tuple[float, Nodes]] = []
        for _ in range(depth):
            level = [c for p, path in level for c in self.children(path, p)]
            every += level
        return {path for _, path in top(every, count)}


def top(scored: list[tuple[float, Nodes]], count: int) -> list[tuple[float, Nodes]]:
    return sorted(scored, key=lambda item: -item[0])[:count]


def paths_of(proposal: Proposal, b: int) -> list[Nodes]:
    """The path of every real node, in order; asserts that no path comes twice."""
    paths: list[Nodes] = []
    count = int(proposal.num_nodes[b])
    parents, tokens = proposal.parents[b].tolist(), proposal.tokens[b].tolist()
    for parent, token in zip(parents[:count], tokens[:count], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


class Spy(EagleDraft):
    """Checks every proposal against the definition."""

    seen = 0

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.draft_probs is None
        for b, row in enumerate(rows):
            depth, paths = min(row.budget, self.info.depth), paths_of(proposal, b)
            if not depth or len(row.tokens) == 1:
                assert not paths
                continue
            history = row.history if row.history.active else None
            plain = PlainTree(self.passes.head, row.tokens, history)
            assert set(paths) == plain.best(depth, self.branch, self.tree)
            assert self.passes.cache.lengths[row.slot] == len(row.tokens) - 1
            type(self).seen += len(paths)
        return proposal


def fresh(
    head: Any,
    tokens: Sequence[int],
    budget: int,
    params: SamplingParams | None = None,
    **sizes: int,
) -> tuple[EagleDraft, Row]:
    """A new draft whose only row holds these tokens, prefilled by the target in one go."""
    draft = EagleDraft(head, TARGET.embed, VOCAB, **sizes)
    params = params or GREEDY
    draft.start(1, len(tokens) + 40)
    text = TextStream(TARGET.tokenizer.decode, params, (), 99)
    history = History(params, VOCAB, tokens)
    row = Row(0, list(tokens), params, Random(1), history, budget, text=text)
    draft.open(row)
    cache = TARGET.new_cache(1, len(tokens) + 40)
    Decoder(TARGET, draft, cache).prefill(row, 0, len(tokens) - 1)
    return draft, row


@pytest.mark.parametrize("make", [make_head, make_eagle1], ids=["eagle3", "eagle1"])
@pytest.mark.parametrize(("branch", "nodes", "depth"), [(3, 8, 4), (4, 30, 3), (2, 3, 5)])
def test_every_tree_is_the_definitions(make: Any, branch: int, nodes: int, depth: int) -> None:
    """Ragged batch, greedy and sampled rows, rounds after any history of acceptance."""
    Spy.seen = 0
    draft = Spy(make(), TARGET.embed, VOCAB, depth, nodes, branch)
    params = [GREEDY, SamplingParams(max_tokens=11, seed=3, ignore_eos=True), GREEDY, GREEDY]
    done = generate_many(TARGET, draft, PROMPTS, params, max_rows=3)
    plain = generate_many(TARGET, load_draft("none", TARGET), PROMPTS, params)
    assert [o.token_ids for o in done] == [o.token_ids for o in plain]
    assert done[0].token_ids == TARGET.greedy(PROMPTS[0], 18)
    assert Spy.seen > 100


class PricedSpy(EagleDraft):
    """Checks every proposal of a row with prices against the best of all its candidates."""

    seen: ClassVar[list[int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        trust = [self._slots[row.slot].trust.share for row in rows]
        proposal = super().propose(rows)
        for b, row in enumerate(rows):
            depth, paths = min(row.budget, self.info.depth), paths_of(proposal, b)
            if not depth or len(row.tokens) == 1:
                continue
            assert row.prices is not None
            plain = PlainTree(self.passes.head, row.tokens)
            best = plain.best(depth, self.branch, self.tree)
            sure = {
                path: math.prod(plain.probs(path[:i])[path[i]] for i in range(len(path)))
                for path in best
            }
            order = sorted(
                ((c, p) for p, c in sure.items()), key=lambda x: (-round(x[0], 5), len(x[1]))
            )
            gains, total = [0.0], 0.0
            for (c, _), ms in zip(order, row.prices.nodes_ms, strict=False):
                total += trust[b] * c
                gains.append(total - row.prices.rate * ms)
            count = gains.index(max(gains))
            assert set(paths) == {path for _, path in order[:count]}
            assert self._slots[row.slot].hoped == pytest.approx(
                sum(c for c, _ in order[:count]), rel=1e-4
            )
            type(self).seen.append(count)
        return proposal


@pytest.mark.parametrize("make", [make_head, make_eagle1], ids=["eagle3", "eagle1"])
def test_only_nodes_that_are_worth_it(make: Any) -> None:
    """Of every tree the nodes that gain most at the price; with no price a pass, none is left out.
    Greedy and sampled texts stay what they are without a draft."""
    PricedSpy.seen = []
    draft = PricedSpy(make(), TARGET.embed, VOCAB, 3, 8, 3)
    params = [GREEDY, SamplingParams(max_tokens=15, seed=3, ignore_eos=True), GREEDY, GREEDY]
    plain = generate_many(TARGET, load_draft("none", TARGET), PROMPTS, params)
    for times in (
        [(1, 10.0), (5, 11.0), (9, 19.0)],
        [(1, 10.0), (9, 10.0)],
        [(1, 10.0), (9, 26.0)],
    ):
        costs = Costs((0, 1, 2, 3), (1, 2, 3, 4), tuple(times), (0, 1, 1, 1))
        control = ByConfidence(costs)
        done = generate_many(TARGET, draft, PROMPTS, params, max_rows=3, control=control)
        assert [o.token_ids for o in done] == [o.token_ids for o in plain]
    assert len(set(PricedSpy.seen)) > 3
    assert 8 in PricedSpy.seen


def test_dear_nodes_and_dear_passes() -> None:
    """At a high price nothing is drafted; where a pass is dear, the first level alone."""
    sizes = {"num_draft_tokens": 4, "tree": 8, "branch": 3}
    free = (0.0,) * 8
    for prices, deepest_level, nodes in (
        (Prices(1.0, free, 0.0), 4, 8),
        (Prices(1.0, free, 5.0), 1, 3),
        (Prices(1.0, tuple(2.0 * i for i in range(1, 9)), 0.0), 0, 0),
        (Prices(1.0, free[:2], 0.0), 2, 2),
    ):
        draft, row = fresh(make_head(5), [4, 8, 2, 6], 4, **sizes)
        row.prices = prices
        proposal = draft.propose([row])
        paths = paths_of(proposal, 0)
        assert len(paths) == nodes
        assert max(map(len, paths), default=0) <= deepest_level
        assert draft.passes.cache.lengths[0] == 3


def test_trust_is_what_was_accepted_of_what_was_promised() -> None:
    trust = Trust()
    assert trust.share == 1
    trust.learn(0.0, 0)  # nothing was drafted
    assert trust.share == 1
    trust.learn(2.0, 0)
    assert trust.share == pytest.approx(4 / 6)
    for _ in range(2000):
        trust.learn(2.0, 3)
    fade = 1 / (1 - Trust.FADE)
    assert trust.share == pytest.approx((4 + 3 * fade) / (4 + 2 * fade))


def test_trust_is_learned_from_rounds() -> None:
    """Summed over a whole request, against what the engine counts; a new request begins anew."""
    draft = EagleDraft(make_head(4), TARGET.embed, VOCAB, 3, 8, 3)
    engine = Engine(TARGET, draft, max_rows=1, capacity=64)
    counters = Counters()
    number = engine.submit(PROMPTS[0], GREEDY, counters)
    while engine.busy:
        engine.step()
        if engine.slots():
            mine: Any = engine.draft
            trust = mine._slots[0].trust
    assert number == 0
    assert trust.promised > 0
    assert trust.accepted <= counters.num_accepted_tokens
    assert (trust.accepted > 0) == (counters.num_accepted_tokens > 0)
    engine.submit(PROMPTS[1], GREEDY)
    engine.admit()
    assert mine._slots[0].trust.share == 1


class FixedSpy(EagleDraft):
    """Checks every proposal against the fixed tree's ranks, path by path over the uncached head."""

    seen = 0

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        for b, row in enumerate(rows):
            depth, paths = min(row.budget, self.info.depth), paths_of(proposal, b)
            if not depth or len(row.tokens) == 1:
                assert not paths
                continue
            history = row.history if row.history.active else None
            plain = PlainTree(self.passes.head, row.tokens, history)
            want: dict[Nodes, Nodes] = {(): ()}  # a node's ranks -> its tokens
            for ranks in FIXED:
                if len(ranks) <= depth and ranks[:-1] in want:
                    above = want[ranks[:-1]]
                    if ranks[-1] < len(tokens := plain.ranked(above)):
                        want[ranks] = (*above, tokens[ranks[-1]])
            del want[()]
            assert paths == list(want.values())
            assert self.passes.cache.lengths[row.slot] == len(row.tokens) - 1
            type(self).seen += len(paths)
        return proposal


@pytest.mark.parametrize("make", [make_head, make_eagle1], ids=["eagle3", "eagle1"])
@pytest.mark.parametrize("depth", [5, 3, 1])
def test_the_fixed_tree_is_eagle1s(make: Any, depth: int) -> None:
    """25 nodes whatever their confidence; fewer levels where less is asked for or left; forbidden
    tokens take no place. Greedy, sampled and biased rows together."""
    FixedSpy.seen = 0
    draft = FixedSpy(make(), TARGET.embed, VOCAB, depth, fixed=True)
    assert (draft.info.max_nodes, draft.info.depth) == (25, depth)
    params = [
        GREEDY,
        SamplingParams(max_tokens=11, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True,
                       logit_bias=dict.fromkeys(range(2, VOCAB), -math.inf)),
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, repetition_penalty=1.5),
    ]  # fmt: skip
    done = generate_many(TARGET, draft, PROMPTS, params, max_rows=3)
    plain = generate_many(TARGET, load_draft("none", TARGET), PROMPTS, params)
    assert [o.token_ids for o in done] == [o.token_ids for o in plain]
    assert FixedSpy.seen > 60


def test_the_fixed_trees_shape() -> None:
    """As the paper draws it: 4, 8, 8, 3 and 2 nodes a level; every parent stands before its child."""
    assert [sum(len(path) == d for path in FIXED) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    assert all(len(p) == 1 or p[:-1] in FIXED[:i] for i, p in enumerate(FIXED))
    draft = load_draft("eagle1-tree", TARGET, head=make_eagle1())
    assert (draft.info.name, draft.info.max_nodes, draft.info.depth) == ("eagle1-tree", 25, 5)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_paths(seed: int) -> None:
    """With m <= k the tree is the m most confident of all paths there are."""
    head = make_head(seed)
    for count in (1, 3, 5):
        draft, row = fresh(head, [4, 8, 2, 6], 3, num_draft_tokens=3, tree=count, branch=5)
        paths = paths_of(draft.propose([row]), 0)
        assert set(paths) == PlainTree(head, row.tokens).all_best(3, count)
        assert len(paths) == count


def test_sampled_text_is_plain_decodings() -> None:
    """Chosen nodes use one number a committed token: the same seed, the same text."""
    draft = load_draft("eagle3", TARGET, head=make_head(4), tree=12, branch=4, num_draft_tokens=4)
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=i, top_k=k, ignore_eos=True)
        for i, (t, k) in enumerate([(0.5, 0), (1.0, 5), (0.0, 0), (1.3, 0)])
    ]
    ours = generate_many(TARGET, draft, PROMPTS, params, max_rows=3)
    plain = generate_many(TARGET, load_draft("none", TARGET), PROMPTS, params)
    assert [o.token_ids for o in ours] == [o.token_ids for o in plain]
    assert sum(o.metrics.num_accepted_tokens for o in ours) > 5


def test_the_check_passes_with_a_tree() -> None:
    """Real proposals and the real rule against the target's own distribution."""
    target = FakeTarget(seed=1, sharpness=2.0)
    draft = load_draft("eagle3", target, head=make_head(2), tree=10, branch=4)
    report = run_checks(target, draft, samples=4000)
    assert report.passed, report.render()
    assert not report.silent


def test_rounds_leave_nothing_behind() -> None:
    """After every round each row proposes what a fresh draft of the same tokens would."""
    sizes = {"num_draft_tokens": 4, "tree": 9, "branch": 3}
    head = make_head(5)
    engine = Engine(TARGET, EagleDraft(head, TARGET.embed, VOCAB, **sizes), max_rows=2, capacity=64)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(prompt, SamplingParams(max_tokens=14, temperature=0.7 * (i % 2), seed=i))
    compared = 0
    while engine.busy:
        engine.step()
        rows = [r.running for r in engine._running if not r.pending]
        for row in rows:
            row.budget = 4
        if not rows:
            continue
        proposal = engine.draft.propose(rows)
        again = engine.draft.propose(rows)
        assert torch.equal(proposal.tokens, again.tokens)
        for b, row in enumerate(rows):
            draft, mine = fresh(head, row.tokens, 4, **sizes)
            alone = draft.propose([mine])
            count = int(proposal.num_nodes[b])
            assert proposal.tokens[b, :count].tolist() == alone.tokens[0].tolist()
            assert proposal.parents[b, :count].tolist() == alone.parents[0].tolist()
            compared += count
    assert compared > 100


def test_uncommitted_entries_are_never_read_again() -> None:
    """Garbage behind the lengths, finite as a tree leaves it, changes no proposal."""
    sizes = {"num_draft_tokens": 4, "tree": 12, "branch": 3}
    draft, row = fresh(make_head(6), [3, 1, 4, 1, 5], 4, **sizes)
    before = draft.propose([row])
    draft.passes.cache.data[:, :, 0, :, draft.passes.cache.lengths[0] :] = 1e4
    after = draft.propose([row])
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.parents, after.parents)


def batch(
    head: Any,
    rows: Sequence[tuple[list[int], int]],
    params: SamplingParams | None = None,
    **sizes: Any,
) -> tuple[EagleDraft, list[DraftRow]]:
    """A draft with prefilled rows of (tokens, budget)."""
    draft = EagleDraft(head, sizes.pop("embed", TARGET.embed), VOCAB, **sizes)
    draft.start(len(rows), 64)
    out = []
    for slot, (tokens, budget) in enumerate(rows):
        row = make_row(tokens, slot, params, budget)
        draft.open(row)
        if len(tokens) > 1:
            draft.prefill(row, 0, states(TARGET, tokens[:-1], head.config.taps))
        out.append(row)
    return draft, out


def test_budgets_bound_the_depth_row_by_row() -> None:
    rows = [([5, 9, 3], 0), ([5, 9, 3], 1), ([7], 3), ([1, 2, 3, 4, 5, 6], 4), ([5, 9, 3], 2)]
    sizes = {"num_draft_tokens": 4, "tree": 10, "branch": 4}
    head = make_head(1)
    draft, made = batch(head, rows, **sizes)
    calls = counted(draft)
    proposal = draft.propose(made)
    assert calls == [[3, 4], [3], [3]]  # depths 2 to 4, one pass each for all rows together
    assert proposal.num_nodes.tolist() == [0, 4, 0, 10, 10]
    for b, (tokens, budget) in enumerate(rows):
        paths = paths_of(proposal, b)
        assert max((len(path) for path in paths), default=0) <= budget
        if paths:
            assert set(paths) == PlainTree(head, tokens).best(budget, 4, 10)


def counted(draft: EagleDraft) -> list[list[int]]:
    """The slots of every pass of the head from here on."""
    calls: list[list[int]] = []
    run = draft.passes.run

    def spy(slots: Sequence[int], *parts: Any, **options: Any) -> Tensor:
        calls.append(list(slots))
        return run(slots, *parts, **options)

    draft.passes.run = spy  # type: ignore[method-assign]
    return calls


def test_a_full_cache_holds_the_last_tree() -> None:
    """Capacity is exactly prompt and output; more nodes than that, k times depth behind it."""
    draft = load_draft("eagle3", TARGET, head=make_head(), tree=40, branch=8, num_draft_tokens=6)
    for tokens in (1, 2, 3, 9):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        done = generate_many(TARGET, draft, PROMPTS, params, max_rows=4)
        assert [o.token_ids for o in done] == [TARGET.greedy(p, tokens) for p in PROMPTS]


class Bounded(EagleDraft):
    """Checks that no proposal leaves the head's context."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        for b, row in enumerate(rows):
            deepest = max((len(path) for path in paths_of(proposal, b)), default=0)
            assert deepest == 0 or len(row.tokens) + deepest <= self.limit
        return proposal


@pytest.mark.parametrize("nodes", [0, 12])
def test_a_context_shorter_than_the_targets(nodes: int) -> None:
    head = make_head(context_length=12)
    draft = Bounded(head, TARGET.embed, VOCAB, 4, tree=nodes, branch=4)
    prompts = [PROMPTS[0], list(range(1, 20)), list(range(1, 11))]
    done = generate_many(TARGET, draft, prompts, GREEDY)
    assert [o.token_ids for o in done] == [TARGET.greedy(p, 18) for p in prompts]
    assert done[0].metrics.num_draft_tokens > 0
    assert done[1].metrics.num_draft_tokens == 0


def test_a_row_that_paused_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a budget leave features behind; the next tree is the definition's."""
    monkeypatch.setattr("speculant.drafts.eagle.MOST_PENDING", 64)
    head = make_head(3)
    draft = Spy(head, TARGET.embed, VOCAB, 3, tree=6, branch=3)
    engine = Engine(TARGET, draft, max_rows=2, capacity=256)
    control = engine.lanes[0].control
    for prompt in (PROMPTS[0], PROMPTS[2]):
        engine.submit(prompt, SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True))
    off = type(control)(0)
    engine.lanes[0].control = off
    for _ in range(90):
        engine.step()
    assert max(len(slot.tokens) for slot in engine.draft._slots.values()) <= 64
    Spy.seen = 0
    engine.lanes[0].control = control
    engine.step()
    assert Spy.seen == 12


def test_nan_in_the_head_costs_speed_only() -> None:
    for name in ("midlayer.mlp.down_proj.weight", "lm_head.weight"):
        head = make_head()
        with torch.no_grad():
            head.get_parameter(name)[0, 0] = math.nan
        draft = EagleDraft(head, TARGET.embed, VOCAB, 3, tree=8, branch=3)
        out = generate(TARGET, draft, PROMPTS[0], GREEDY)
        assert out.token_ids == TARGET.greedy(PROMPTS[0], 18)
        assert out.metrics.num_draft_tokens == 0


def test_nan_behind_one_token_stays_with_its_row() -> None:
    """A row that expands the token keeps what was found before; the others lose nothing."""
    head, sizes = make_head(1), {"num_draft_tokens": 4, "tree": 10, "branch": 3}
    rows = [([5, 9, 3], 4), ([1, 2, 3, 4, 5, 6], 4), ([7, 7, 7, 7], 4)]
    clean, made = batch(head, rows, **sizes)
    trees = [paths_of(clean.propose(made), b) for b in range(3)]
    used = [{token for path in paths for token in path[:-1]} for paths in trees]
    bad = next(iter(used[0] - used[1] - used[2]))

    def embed(tokens: Tensor) -> Tensor:
        return TARGET.embed(tokens).masked_fill((tokens == bad)[..., None], math.nan)

    draft, made = batch(head, rows, embed=embed, **sizes)
    proposal = draft.propose(made)
    assert [paths_of(proposal, b) for b in (1, 2)] == trees[1:]
    kept = paths_of(proposal, 0)
    assert kept
    assert all(bad not in path[:-1] for path in kept)
    assert bool(draft.passes.cache.data.isfinite().all())
    assert paths_of(draft.propose(made), 0) == kept


@pytest.mark.parametrize("nodes", [0, 9])
def test_penalties_and_bias_shape_the_draft(nodes: int) -> None:
    """Every node's token comes from logits adjusted with its own drafted path."""
    head = make_head(2)
    tokens = [int(t) for t in head.target_ids[:6]]
    plain = paths_of(_one(head, tokens, SamplingParams(temperature=0), nodes), 0)
    banned = plain[0][0]
    params = SamplingParams(
        temperature=0, logit_bias={banned: -math.inf}, repetition_penalty=1.7, presence_penalty=0.9
    )
    paths = paths_of(_one(head, tokens, params, nodes), 0)
    assert all(banned not in path for path in paths)
    assert paths != plain
    history = History(params, VOCAB, tokens)
    truth = PlainTree(head, tokens, history)
    if nodes:
        assert set(paths) == truth.best(3, 3, nodes)
    else:
        assert [path[-1] for path in paths] == [
            max(truth.probs(path[:-1]).items(), key=lambda item: item[1])[0] for path in paths
        ]


def _one(head: Any, tokens: list[int], params: SamplingParams, nodes: int) -> Proposal:
    rows = [(tokens, 3)]
    draft, made = batch(head, rows, params, num_draft_tokens=3, tree=nodes, branch=3)
    return draft.propose(made)


def test_likeliest_breaks_ties_by_id() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 3, 9), generator=generator).float()
    logits[torch.rand(200, 3, 9, generator=generator) < 0.2] = -math.inf
    for count in (1, 2, 5, 9):
        scores, ids = likeliest(logits, count)
        assert scores.shape == ids.shape == (200, 3, count)
        for row, mine, value in zip(
            logits.flatten(0, 1).tolist(), ids.flatten(0, 1).tolist(),
            scores.flatten(0, 1).tolist(), strict=True,
        ):  # fmt: skip
            want = sorted((i for i in range(9) if row[i] > -math.inf), key=lambda i: (-row[i], i))
            real = min(count, len(want))
            assert mine[:real] == want[:real]
            assert all(v == -math.inf for v in value[real:])
            total = sum(math.exp(x) for x in row)
            for i, v in zip(want[:real], value, strict=False):
                assert math.exp(v) == pytest.approx(math.exp(row[i]) / total, rel=1e-5)


def test_likeliest_of_broken_logits_is_nothing() -> None:
    logits = torch.zeros(3, 6)
    logits[0, 2], logits[1, 3] = math.nan, math.inf
    scores, _ = likeliest(logits, 2)
    assert scores[:2].tolist() == [[-math.inf] * 2] * 2
    assert bool(scores[2].isfinite().all())


def test_builders() -> None:
    eagle2 = load_draft("eagle2", TARGET, head=make_eagle1())
    assert (eagle2.info.name, eagle2.info.taps) == ("eagle2", (-1,))
    assert (eagle2.info.max_nodes, eagle2.info.depth) == (32, 6)
    chain = load_draft("eagle1", TARGET, head=make_eagle1())
    assert (chain.info.name, chain.info.max_nodes, chain.info.depth) == ("eagle1", 5, 5)
    assert load_draft("eagle1", TARGET, head=make_eagle1(), tree=3).info.name == "eagle2"
    tree = load_draft("eagle3", TARGET, head=make_head(), tree=4)
    assert (tree.info.name, tree.info.max_nodes, tree.info.depth) == ("eagle3", 4, 4)
    for draft in (eagle2, chain, tree):
        assert generate(TARGET, draft, PROMPTS[0], GREEDY).token_ids == TARGET.greedy(
            PROMPTS[0], 18
        )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("eagle3", {"tree": -1}, "tree is -1: must be from 0"),
        ("eagle3", {"tree": 9999}, "tree is 9999"),
        ("eagle3", {"tree": 8, "branch": 0}, "branch is 0"),
        ("eagle2", {"tree": 0}, "the chain is eagle1"),
    ],
)
def test_senseless_sizes_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_draft(name, TARGET, head=make_head(), **options)


def test_the_engines_depth_is_the_trees() -> None:
    draft = load_draft("eagle3", TARGET, head=make_head(), tree=20, num_draft_tokens=4)
    assert Engine(TARGET, draft, capacity=40).lanes[0].control.num_draft_tokens == 4
    assert (
        Engine(TARGET, draft, capacity=40, num_draft_tokens=2).lanes[0].control.num_draft_tokens
        == 2
    )
    with pytest.raises(ValueError, match="at most 4"):
        Engine(TARGET, draft, capacity=40, num_draft_tokens=5)
    out = generate(TARGET, draft, PROMPTS[0], GREEDY, num_draft_tokens=2)
    assert out.token_ids == TARGET.greedy(PROMPTS[0], 18)
    assert len(out.metrics.num_drafted_per_pos) == 2


def test_a_folder_drafts_as_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(make_head(), tmp_path / "three")
    save_head(make_eagle1(), tmp_path / "one")
    assert load_draft(str(tmp_path / "three"), TARGET, tree=7).info.max_nodes == 7
    assert load_draft(str(tmp_path / "one"), TARGET).info.name == "eagle1"
    with pytest.raises(
        ValueError, match="holds a head of kind eagle1: draft 'eagle3' needs eagle3"
    ):
        load_draft("eagle3", TARGET, head=tmp_path / "one")
    monkeypatch.setattr("speculant.drafts.bundled_head", lambda kind, name: tmp_path / "three")
    assert load_draft("eagle3", TARGET).info.name == "eagle3"
    other = FakeTarget(seed=1, vocab_size=40, name="wide")
    with pytest.raises(
        ValueError, match=r"bundled eagle3 head is not for wide: .* train one: spec"
    ):
        load_draft("eagle3", other)


def test_tree_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--tree` with and without its number, anywhere among the options."""
    monkeypatch.setattr("speculant.target.load.load_target", lambda *a, **k: TARGET)
    save_head(make_head(), tmp_path / "head", torch.float32)
    head = str(tmp_path / "head")

    def run(*words: str) -> Any:
        common = ("generate", "--draft", head, "--raw", "--json", "--max-tokens", "12")
        return CliRunner().invoke(app, [*common, *words], prog_name="speculant")

    want = TARGET.greedy(TARGET.tokenizer.encode("abc"), 12)
    for words, nodes in (
        (("abc", "--tree"), 32),
        (("--tree", "abc"), 32),
        (("--tree", "-n", "4", "abc"), 32),
        (("abc", "--tree", "7"), 7),
        (("abc", "--tree", "0"), 5),
        (("abc",), 5),
    ):
        out = run(*words)
        assert out.exit_code == 0, out.output
        seen = json.loads(out.stdout)
        assert seen["token_ids"] == want[: len(seen["token_ids"])]
        m = seen["metrics"]
        largest = m["num_draft_tokens"] / m["num_drafts"]
        assert nodes / 2 < largest <= nodes
    for words, what in (
        (("--tree", "-1"), "tree is -1"),
        (("--draft", "ngram", "--tree"), "--tree"),
    ):
        out = run("abc", *words)
        assert out.exit_code == 2
        assert what in out.stderr
