"""Copying first, another draft elsewhere: exactness, who drafts when, and what either learns.

Independent truth: plain greedy decoding, the plain draft alone, each request alone against the same in
a batch, and the target's own distribution by `run_checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest

from fake import FakeTarget
from scripted import Scripted
from speculant import pace
from speculant.adaptive import Costs
from speculant.check import run_checks
from speculant.control import ByPart
from speculant.drafts import draft_options, find_draft, load_draft
from speculant.drafts.base import DraftRow, InParts
from speculant.drafts.hybrid import COPY, OTHER, HybridDraft
from speculant.drafts.ngram import NgramDraft
from speculant.engine import Engine, generate, generate_many
from speculant.proposal import Proposal
from speculant.sampling import SamplingParams
from speculant.track import Track
from test_eagle import VOCAB, make_head
from test_eagle_tree import make_eagle1

TARGET = FakeTarget(seed=1)
REPEATS = [5, 9, 3, 8, 5, 9, 3, 8, 5, 9, 3]
PROMPTS = [REPEATS, [1, 2, 3, 4, 5, 6, 7], [7, 7, 7, 7, 7], [31, 30, 29]]


def hybrid(other: Any, **options: int) -> HybridDraft:
    return HybridDraft(NgramDraft(4, 4, 3, **options), other, VOCAB)


def others() -> dict[str, Any]:
    return {
        "chain": load_draft("eagle3", TARGET, head=make_head(3), num_draft_tokens=3),
        "tree": load_draft(
            "eagle3", TARGET, head=make_head(3), num_draft_tokens=3, tree=6, branch=3
        ),
        "eagle1": load_draft("eagle1", TARGET, head=make_eagle1(), num_draft_tokens=2),
        "vanilla": load_draft("vanilla", TARGET, model=FakeTarget(seed=4), num_draft_tokens=3),
    }


def mixed(count: int = 30) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=count + 3 * i, temperature=t, seed=i, top_k=k, ignore_eos=True)
        for i, (t, k) in enumerate([(0.0, 0), (0.9, 0), (1.0, 3), (0.0, 0)])
    ]


@pytest.mark.parametrize("name", ["chain", "tree", "eagle1", "vanilla"])
def test_greedy_text_is_plain_text(name: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    done = generate_many(TARGET, hybrid(others()[name]), PROMPTS, params, max_rows=3)
    assert [out.token_ids for out in done] == [TARGET.greedy(p, 40) for p in PROMPTS]
    assert sum(out.metrics.num_accepted_tokens for out in done) > 10


@pytest.mark.parametrize("name", ["chain", "tree", "eagle1", "vanilla"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_row_says_alone_what_it_says_in_a_batch(name: str, rule: str) -> None:
    """Greedy and sampled rows, copying and drafting, at the same time."""
    draft = hybrid(others()[name])
    together = generate_many(TARGET, draft, PROMPTS, mixed(), max_rows=3, rule=rule)
    for prompt, mine, out in zip(PROMPTS, mixed(), together, strict=True):
        alone = generate(TARGET, draft, prompt, mine, rule=rule)
        assert out.token_ids == alone.token_ids
        assert out.metrics.num_draft_tokens == alone.metrics.num_draft_tokens


@pytest.mark.parametrize("name", ["chain", "tree", "vanilla"])
def test_the_check_passes(name: str) -> None:
    """Against the target's own distribution, with prompts that repeat themselves."""
    target = FakeTarget(seed=1, sharpness=2.0)
    other = {
        "chain": lambda: load_draft("eagle3", target, head=make_head(2), num_draft_tokens=3),
        "tree": lambda: load_draft("eagle3", target, head=make_head(2), tree=8, branch=3),
        "vanilla": lambda: load_draft("vanilla", target, model=FakeTarget(4), num_draft_tokens=2),
    }[name]()
    draft = HybridDraft(NgramDraft(4, 3, 1), other, VOCAB)  # copies often, and badly
    report = run_checks(target, draft, samples=4000)
    assert report.passed, report.render()
    assert not report.silent


class Watched(Scripted):
    """Notes what budgets it is given."""

    def __init__(self, depth: int) -> None:
        super().__init__(lambda tokens, budget: [11] * budget, depth, vocab=VOCAB)
        self.asked: list[list[int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        self.asked.append([row.budget for row in rows])
        return super().propose(rows)


def rows_of(draft: HybridDraft, prompts: Sequence[list[int]], budget: int) -> list[DraftRow]:
    engine = Engine(TARGET, draft, max_rows=len(prompts), capacity=64)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=9, temperature=0.0))
    engine.admit()
    engine.prefill()
    rows: list[DraftRow] = [request.running for request in engine._running]
    for row in rows:
        row.budget = budget
    draft._records, draft.parts = engine.draft._records, engine.draft.parts  # type: ignore[attr-defined]
    return rows


def test_who_drafts_and_how_deep() -> None:
    """The other part is asked for nothing where there is something to copy; budgets hold."""
    other = Watched(2)
    draft = hybrid(other)
    rows = rows_of(draft, [REPEATS, [1, 2, 3]], 3)
    proposal = draft.propose(rows)
    watched: Any = draft.parts[OTHER]
    assert watched.asked[-1] == [0, 2]
    assert proposal.tokens[0, :3].tolist() == [8, 5, 9]
    assert proposal.tokens[1, :2].tolist() == [11, 11]
    assert proposal.num_nodes.tolist() == [3, 2]
    assert [row.budget for row in rows] == [3, 2]
    for row in rows:
        row.budget = 0
    assert draft.propose(rows).num_nodes.tolist() == [0, 0]


class Says:
    """Depths as the test wants them; notes what it is told."""

    def __init__(self, depths: tuple[int, int]) -> None:
        self.depths = depths
        self.told: list[tuple[int, int, int]] = []

    def begin(self) -> str:
        return "record"

    def ask(self, record: Any, part: int, most: int) -> int:
        assert record == "record"
        return min(most, self.depths[part])

    def worth(self, record: Any, part: int) -> None:
        assert (record, part) == ("record", OTHER)

    def tell(self, record: Any, part: int, depth: int, accepted: int, nodes: int) -> None:
        assert nodes == depth  # chains
        self.told.append((part, depth, accepted))


@pytest.mark.parametrize(
    ("depths", "wanted"),
    [((2, 1), [2, 1]), ((0, 2), [2, 2]), ((1, 0), [1, 0]), ((0, 0), [0, 0])],
)
def test_depths_are_asked_of_the_part_that_drafts(
    depths: tuple[int, int], wanted: list[int]
) -> None:
    """Where a copy does not pay, the other part may."""
    draft = hybrid(Watched(2))
    draft.depths.append(Says(depths))
    proposal = draft.propose(rows_of(draft, [REPEATS, [1, 2, 3]], 3))
    assert proposal.num_nodes.tolist() == wanted
    if depths[COPY] == 0 and wanted[0]:
        assert proposal.tokens[0, 0] == 11


def test_each_part_learns_how_it_fared() -> None:
    """Copies of a text that goes on, guesses that are wrong: sums of what a run counts."""
    says = Says((4, 2))
    draft = hybrid(Watched(2))
    draft.depths.append(says)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    out = generate(TARGET, draft, PROMPTS[2], params)
    assert out.token_ids == TARGET.greedy(PROMPTS[2], 40)
    assert {part for part, _, _ in says.told} == {COPY, OTHER}
    assert sum(depth for _, depth, _ in says.told) == out.metrics.num_draft_tokens
    accepted = sum(n for _, _, n in says.told)
    assert 0 <= accepted - out.metrics.num_accepted_tokens <= 4  # the end may cut the last round
    assert all(0 <= n <= depth for _, depth, n in says.told)


def costs(draft_ms: float, most: int) -> Costs:
    depths = tuple(range(most + 1))
    rows = tuple(d + 1 for d in depths)
    return Costs(depths, rows, ((1, 10.0),), tuple(draft_ms * d for d in depths))


def test_adapting_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dear part is left off where it fails, the cheap one goes on; the text stays."""
    monkeypatch.setattr(
        pace, "measure_costs",
        lambda target, draft, n, size: costs(0.01 if draft.info.name == "ngram" else 30.0, n),
    )  # fmt: skip
    draft = hybrid(load_draft("eagle3", TARGET, head=make_head(3), num_draft_tokens=3))
    control = pace.adapt(TARGET, draft, None, 2)
    assert isinstance(control, ByPart)
    assert isinstance(draft, InParts)
    assert (draft.depths, copy(draft).depths) == ([control], [control])
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    done = generate_many(TARGET, draft, PROMPTS[:2], params, control=control)
    assert [out.token_ids for out in done] == [TARGET.greedy(p, 60) for p in PROMPTS[:2]]
    only = generate_many(TARGET, draft.parts[OTHER], PROMPTS[:2], params)
    assert sum(o.metrics.num_draft_tokens for o in done) > 0
    assert sum(o.metrics.num_drafts for o in done) < sum(o.metrics.num_drafts for o in only)
    assert control.budget(3, Track()) == 2
    # a sampled text depends on the depth of copies too, so that neither part's may follow the load
    assert [part.samples for part in control.parts] == [True, True]  # type: ignore[attr-defined]
    tree = hybrid(others()["tree"])
    calm = pace.adapt(TARGET, tree, None, 2)
    assert isinstance(calm, ByPart)
    assert [part.samples for part in calm.parts] == [False, False]  # type: ignore[attr-defined]


def test_a_tree_behind_copies_has_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dear nodes: copies go on and the tree is left off; cheap ones: it drafts. The text stays."""
    drafted = {}
    for row_ms in (0.01, 40.0):
        table = Costs((0, 1, 2, 3), (1, 2, 3, 4), ((1, 10.0), (7, 10 + 6 * row_ms)), (0, 1, 2, 3))
        copies = Costs((0, 1, 2), (1, 2, 3), ((1, 10.0),), (0.0, 0.0, 0.0))
        monkeypatch.setattr(
            pace, "measure_costs",
            lambda target, draft, n, size, table=table, copies=copies: (
                copies if draft.info.name == "ngram" else table
            ),
        )  # fmt: skip
        draft = hybrid(others()["tree"])
        control = pace.adapt(TARGET, draft, None, 2)
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        done = generate_many(TARGET, draft, PROMPTS, params, control=control)
        assert [out.token_ids for out in done] == [TARGET.greedy(p, 60) for p in PROMPTS]
        drafted[row_ms] = sum(o.metrics.num_draft_tokens for o in done)
    assert 0 < drafted[40.0] < drafted[0.01]


def test_names() -> None:
    assert find_draft("ngram+eagle2=heads/x")[0] == "ngram+eagle2"
    assert draft_options("ngram+eagle3") == draft_options("eagle3")
    draft = load_draft("ngram+eagle3", TARGET, head=make_head(3), num_draft_tokens=2)
    assert isinstance(draft, HybridDraft)
    assert draft.info.name == "ngram+eagle3"
    assert (draft.info.max_nodes, draft.info.depth) == (8, 8)
    for name in ("ngram+ngram", "ngram+none", "ngram+lookahead", "ngram+nope", "ngram+"):
        with pytest.raises(ValueError, match="draft"):
            find_draft(name)
    with pytest.raises(ValueError, match="window"):
        HybridDraft(NgramDraft(), load_draft("lookahead", TARGET), VOCAB)
