"""Medusa: the blocks written out, the sparse tree against all trees, drafting against plain logits.

Independent truth: the target's uncached states, products written out head by head, every subtree of
a small candidate tree enumerated, and the target's own greedy text.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fake import HIDDEN, FakeTarget, make_row
from speculant.drafts import load_draft
from speculant.drafts.base import Feedback
from speculant.drafts.medusa import MedusaDraft, sparse_tree, usual_accuracies
from speculant.engine import generate, generate_many
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.proposal import Proposal
from speculant.sampling import SamplingParams
from speculant.target.base import LAST
from test_eagle import GREEDY, PROMPTS, VOCAB, states

RANKS = ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1), (0.4, 0.1, 0.1))


def make_head(seed: int = 0, scale: float = 0.4, **change: Any) -> MedusaHead:
    """Random heads."""
    sizes: dict[str, Any] = {"num_heads": 3, "accuracies": RANKS}
    torch.manual_seed(seed)
    head = MedusaHead(MedusaConfig(HIDDEN, VOCAB, **sizes | change)).eval()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn_like(p) * scale)
    return head


def head_logits(target: FakeTarget, head: MedusaHead, state: Tensor) -> list[Tensor]:
    """Logits [V] of every head from one state [H], written out."""
    w, out = head.state_dict(), []
    for h in range(head.config.num_heads):
        x = state
        for i in range(head.config.num_hidden_layers):
            y = w[f"blocks.{h}.layers.{i}.weight"] @ x
            x = x + y * torch.sigmoid(y)
        out.append(x @ target.head)
    return out


def tree_of(proposal: Proposal, b: int) -> list[list[int]]:
    """Tokens from the root down to every node of a row, in node order."""
    paths: list[list[int]] = []
    for i in range(int(proposal.num_nodes[b])):
        above = int(proposal.parents[b, i])
        paths.append([*(paths[above] if above >= 0 else []), int(proposal.tokens[b, i])])
    return paths


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def test_zero_weights_say_what_the_target_says(target: FakeTarget) -> None:
    head = MedusaHead(MedusaConfig(HIDDEN, VOCAB, num_heads=2))
    assert head.config.taps == (LAST,)
    head.bind(target.unembed)
    state = torch.randn(5, HIDDEN)
    logits = head.logits(state)
    assert logits.shape == (5, 2, VOCAB)
    for h in range(2):
        torch.testing.assert_close(logits[:, h], target.unembed(state))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_blocks_are_vllms(target: FakeTarget, layers: int) -> None:
    head = make_head(1, num_hidden_layers=layers)
    head.bind(target.unembed)
    state = torch.randn(HIDDEN)
    for h, want in enumerate(head_logits(target, head, state)):
        torch.testing.assert_close(head.logits(state)[h], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(state, 2), head.logits(state)[:2])  # the first two alone


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_tree_is_the_best_of_all(seed: int, count: int) -> None:
    """Expected accepted tokens = sum of the nodes' chances; every subtree of that size is tried."""
    g = torch.Generator().manual_seed(seed)
    ranks = [(torch.rand(2, generator=g) / 2).tolist() for _ in range(3)]
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(2), repeat=d)]  # 14 candidates

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(ranks[h][r] for h, r in enumerate(path))

    best = max(
        sum(map(chance, some))
        for some in itertools.combinations(paths, count)
        if all(len(p) == 1 or p[:-1] in some for p in some)
    )
    tree = sparse_tree(ranks, count)
    mine: list[tuple[int, ...]] = []
    for i, node in enumerate(tree):
        assert node.parent < i
        mine.append((*(mine[node.parent] if node.parent >= 0 else ()), node.rank))
        assert node.head == len(mine[-1]) - 1
    assert len(set(mine)) == count
    assert sum(map(chance, mine)) == pytest.approx(best)


def test_tree_edges() -> None:
    assert len(sparse_tree(RANKS, 1000)) == 3 + 9 + 27
    assert len(sparse_tree([[1.0], [1.0], [0.0]], 9)) == 2  # nothing that was never right
    assert len(sparse_tree([[0.0, 0.0]], 9)) == 1
    with pytest.raises(ValueError, match="no measured accuracies"):
        sparse_tree((), 4)
    with pytest.raises(ValueError, match="num_nodes is 0"):
        sparse_tree(RANKS, 0)


class Spy(MedusaDraft):
    """Checks every proposal: depth d holds the best choices of head d - 1 at the newest state."""

    seen, target = 0, FakeTarget(seed=1)

    def propose(self, rows: Any) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.draft_probs is None
        for b, row in enumerate(rows):
            paths = tree_of(proposal, b)
            if len(row.tokens) < 2:
                assert not paths
                continue
            state = states(self.target, row.tokens[:-1], (LAST,))[-1]
            logits = head_logits(self.target, self.head, state)
            want = []
            for node in self.tree:
                token = int(logits[node.head].sort(descending=True).indices[node.rank])
                want.append([*(want[node.parent] if node.parent >= 0 else []), token])
            assert paths == [path for path in want if len(path) <= row.budget]
            assert len({tuple(p) for p in paths}) == len(paths)
            type(self).seen += len(paths)
        return proposal


def test_drafting_equals_the_heads_on_uncached_states(target: FakeTarget) -> None:
    """After any ragged history of acceptance: the state is the one that predicted the root."""
    head = make_head(scale=0.05)
    draft = Spy(head, target.unembed, 12)
    assert (draft.info.max_nodes, draft.info.depth) == (12, 3)
    done = generate_many(target, draft, PROMPTS, GREEDY, max_rows=3)
    assert [o.token_ids for o in done] == [target.greedy(p, 24) for p in PROMPTS]
    assert Spy.seen > 300


def test_drafts_are_accepted_in_the_tree(target: FakeTarget) -> None:
    """Zero heads repeat the target's word for the root: accepted where the text repeats a token."""
    loop = FakeTarget(seed=5)
    accepted = 0
    for seed in range(8):
        draft = MedusaDraft(make_head(seed), loop.unembed, 20)
        for prompt in PROMPTS:
            out = generate(loop, draft, prompt, GREEDY)
            assert out.token_ids == loop.greedy(prompt, 24)
            accepted += out.metrics.num_accepted_tokens
    assert accepted > 20


def test_training_and_drafting_agree(target: FakeTarget) -> None:
    """The proposal's first branch is the argmax of the training logits at that position."""
    tokens = [5, 9, 3, 17, 2, 8, 30, 11, 4, 6]
    head = make_head(3)
    head.bind(target.unembed)
    last = states(target, tokens, (LAST,))
    trained = head.logits(last[None]).argmax(-1)[0]  # shape: [T, heads]
    draft = MedusaDraft(head, target.unembed, 3 + 9 + 27)
    draft.start(1, 64)
    for base in range(len(tokens) - 1):
        row = make_row(tokens[: base + 2])
        draft.open(row)
        draft.prefill(row, 0, last[: base + 1])
        paths = tree_of(draft.propose([row]), 0)
        for h in range(3):
            chain = trained[base, : h + 1].tolist()  # predicts tokens base + 2 .. base + 2 + h
            assert chain in paths


def test_sampled_rows_equal_alone(target: FakeTarget) -> None:
    draft = MedusaDraft(make_head(3), target.unembed, 10)
    params = [
        SamplingParams(max_tokens=6 + 5 * i, temperature=0.8 * (i % 3), seed=i, ignore_eos=True)
        for i in range(4)
    ]
    together = generate_many(target, draft, PROMPTS, params, max_rows=2)
    for prompt, mine, out in zip(PROMPTS, params, together, strict=True):
        assert out.token_ids == generate(target, draft, prompt, mine).token_ids


def test_penalties_stay_exact(target: FakeTarget) -> None:
    """The heads ignore them; verification does not."""
    params = SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.8, ignore_eos=True)
    plain = generate(target, load_draft("none", target), PROMPTS[2], params)
    draft = MedusaDraft(make_head(1), target.unembed, 10)
    assert generate(target, draft, PROMPTS[2], params).token_ids == plain.token_ids


def test_a_broken_head_ends_the_tree_above_it(target: FakeTarget) -> None:
    head = make_head()
    with torch.no_grad():
        head.blocks[1].layers[0].weight[0, 0] = math.nan
    draft = MedusaDraft(head, target.unembed, 12)
    row = make_row([5, 9, 3])
    draft.start(1, 64)
    draft.open(row)
    draft.prefill(row, 0, states(target, [5, 9], (LAST,)))
    paths = tree_of(draft.propose([row]), 0)
    assert {len(path) for path in paths} == {1}
    with torch.no_grad():
        head.blocks[0].layers[0].weight[0, 0] = math.nan
    assert draft.propose([row]).width == 0
    out = generate(target, draft, PROMPTS[0], GREEDY)
    assert out.token_ids == target.greedy(PROMPTS[0], 24)
    assert out.metrics.num_draft_tokens == 0


def test_budgets_cut_the_depth_and_slots_are_forgotten(target: FakeTarget) -> None:
    draft = MedusaDraft(make_head(), target.unembed, 39)
    draft.start(3, 64)
    rows = [make_row([5, 9, 3], slot, budget=slot) for slot in range(3)]
    for row in rows:
        draft.open(row)
        draft.prefill(row, 0, states(target, [5, 9], (LAST,)))
    proposal = draft.propose(rows)
    assert proposal.num_nodes.tolist() == [0, 3, 12]
    draft.close(2)
    again = make_row([7], 2)
    draft.open(again)
    assert draft.propose([again]).width == 0
    hidden = torch.randn(1, 1, HIDDEN)
    again.tokens.append(4)
    draft.update([again], Feedback(Proposal.chains([[]]), [[4]], [[]], hidden))
    before = draft.propose([again])
    assert before.width == 39
    draft.update([again], Feedback(Proposal.chains([[]]), [[]], [[]], -hidden))  # a broken row
    assert torch.equal(before.tokens, draft.propose([again]).tokens)


def test_commit_cut_inside_the_path(target: FakeTarget) -> None:
    """A stop inside an accepted path: the state is that of the last committed token's predecessor."""
    draft = MedusaDraft(make_head(), target.unembed, 12)
    draft.start(1, 64)
    row = make_row([5, 9, 3])
    draft.open(row)
    draft.prefill(row, 0, states(target, [5, 9], (LAST,)))
    proposal = draft.propose([row])
    hidden = torch.randn(1, 1 + proposal.width, HIDDEN)
    row.tokens += [7, 8]
    draft.update([row], Feedback(proposal, [[7, 8]], [[0, 2, 5]], hidden))
    assert torch.equal(draft._states[0], hidden[0, 1])  # node 0, which 8 followed


def test_heads_that_were_never_measured_draft_a_usual_tree(target: FakeTarget) -> None:
    """With a warning that says how to measure them; the text stays the target's."""
    head = make_head(accuracies=())
    with pytest.warns(UserWarning, match=r"never measured.*speculant import"):
        draft = load_draft("medusa", target, head=head, tree=16)
    out = generate(target, draft, PROMPTS[2], GREEDY)
    assert out.token_ids == target.greedy(PROMPTS[2], len(out.token_ids))
    assert out.metrics.num_draft_tokens > 0


def test_the_usual_tree_is_near_the_published_one() -> None:
    """`mc_sim_7b_63` of Medusa's repository: 63 nodes, by depth 10, 28, 23 and 2; its first 24."""
    usual = usual_accuracies(4)
    assert all(sum(ranks) < 1 for ranks in usual)
    paths: list[tuple[int, ...]] = []
    for node in sparse_tree(usual, 63):
        paths.append(((*paths[node.parent],) if node.parent >= 0 else ()) + (node.rank,))
    by_depth = [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)]
    assert all(abs(a - b) <= 3 for a, b in zip(by_depth, (10, 28, 23, 2), strict=True))
    first = "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002"
    published = first.split()
    assert {tuple(map(int, path)) for path in published} <= set(paths)
