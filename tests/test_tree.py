"""Trees against literal matrices and against walking the parents by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant.proposal import Proposal, Window
from speculant.tree import (
    ancestor_mask,
    best_nodes,
    depths,
    forward_layout,
    is_chain,
    leaf_paths,
    node_paths,
    shape_parents,
)


@st.composite
def parents_arrays(draw: st.DrawFn, most: int = 9) -> list[int]:
    """Any parents array: every parent comes before its children."""
    n = draw(st.integers(0, most))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node, its parent, ..., down to -1, the root."""
    line = [node]
    while line[-1] != -1:
        line.append(parents[line[-1]])
    return line


def matrix(*rows: str) -> list[list[bool]]:
    return [[cell == "1" for cell in row.split()] for row in rows]


def test_literal_mask_and_depths() -> None:
    parents = torch.tensor([[-1, -1, 0, 0, 2], [-1, 0, 1, 2, 3]])
    mask = ancestor_mask(parents)
    assert mask.dtype == torch.bool
    assert mask[0].tolist() == matrix(
        "1 0 0 0 0 0",
        "1 1 0 0 0 0",
        "1 0 1 0 0 0",
        "1 1 0 1 0 0",
        "1 1 0 0 1 0",
        "1 1 0 1 0 1",
    )
    assert mask[1].tolist() == torch.ones(6, 6).tril().bool().tolist()
    assert depths(parents).tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5]]


@settings(max_examples=150, deadline=None)
@given(first=parents_arrays(), second=parents_arrays())
def test_mask_depths_and_paths_by_brute_force(first: list[int], second: list[int]) -> None:
    n = min(len(first), len(second))
    batch = [first[:n], second[:n]]
    parents = torch.tensor(batch, dtype=torch.int64).reshape(2, n)
    mask, levels = ancestor_mask(parents), depths(parents)
    for b, above in enumerate(batch):
        lines = [ancestors(above, i) for i in range(-1, n)]
        assert levels[b].tolist() == [len(line) - 1 for line in lines]
        for row, line in enumerate(lines):
            seen = [column - 1 for column in range(n + 1) if mask[b, row, column]]
            assert seen == sorted(line)
        tokens = list(range(100, 100 + n))
        assert node_paths(above, tokens) == [[100 + i for i in line[-2::-1]] for line in lines]
        leaves = [i for i in range(n) if i not in above]
        assert leaf_paths(above) == [ancestors(above, leaf)[-2::-1] for leaf in leaves]
    assert is_chain(parents) == all(line == list(range(-1, n - 1)) for line in batch)


def test_shape_parents() -> None:
    assert shape_parents([]) == []
    assert shape_parents([3]) == [-1, -1, -1]
    assert shape_parents([1, 1, 1]) == [-1, 0, 1]
    assert shape_parents([3, 1]) == [-1, -1, -1, 0, 1, 2]
    assert shape_parents([2, 2, 2]) == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len(shape_parents([2, 2, 2])) == 14
    with pytest.raises(ValueError, match=r"\[2, 0\]"):
        shape_parents([2, 0])


def test_leaf_paths() -> None:
    assert leaf_paths([]) == []
    assert leaf_paths([-1, 0, 1]) == [[0, 1, 2]]
    assert leaf_paths([-1, -1, 0, 0, 2]) == [[1], [0, 3], [0, 2, 4]]


WINDOW = Window(
    tokens=torch.tensor([[7, 8]]),
    offsets=torch.tensor([[1, 2]]),
    mask=torch.tensor([[[True, False], [True, True]]]),
)


def test_layout_of_a_chain_is_causal() -> None:
    tokens, offsets, mask = forward_layout(Proposal.chains([[4, 5], [6, 7]]))
    assert (tokens.tolist(), offsets.tolist(), mask) == ([[4, 5], [6, 7]], [[0, 1, 2]] * 2, None)
    tokens, offsets, mask = forward_layout(Proposal.chains([[], []]))
    assert (tokens.shape, offsets.tolist(), mask) == ((2, 0), [[0], [0]], None)


def test_layout_of_ragged_chains() -> None:
    """Real rows are causal and see no padding; what the padding itself sees does not matter."""
    proposal = Proposal.chains([[4, 5, 6], [4], []])
    tokens, offsets, mask = forward_layout(proposal)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    mask = causal.expand(3, 4, 4) if mask is None else mask
    for b, length in enumerate([3, 1, 0]):
        assert tokens[b, :length].tolist() == [4, 5, 6][:length]
        assert offsets[b, : length + 1].tolist() == list(range(length + 1))
        assert mask[b, : length + 1].tolist() == causal[: length + 1].tolist()
    # else the batch, and not the row, would choose between the rules for chains and for trees
    assert is_chain(proposal.parents)


def test_layout_of_a_tree() -> None:
    tokens, offsets, mask = forward_layout(Proposal.trees([([4, 5, 6], [-1, -1, 1])]))
    assert tokens.tolist() == [[4, 5, 6]]
    assert offsets.tolist() == [[0, 1, 1, 2]]
    assert mask is not None
    assert mask[0].tolist() == matrix("1 0 0 0", "1 1 0 0", "1 0 1 0", "1 0 1 1")


def test_layout_with_a_window() -> None:
    tokens, offsets, mask = forward_layout(Proposal.chains([[4, 5]], WINDOW))
    assert tokens.tolist() == [[4, 5, 7, 8]]
    assert offsets.tolist() == [[0, 1, 2, 1, 2]]
    assert mask is not None
    assert mask[0].tolist() == matrix(
        "1 0 0 0 0",
        "1 1 0 0 0",
        "1 1 1 0 0",
        "1 0 0 1 0",  # the window sees the root and itself, never a proposed node
        "1 0 0 1 1",
    )


def test_layout_of_a_window_alone() -> None:
    tokens, offsets, mask = forward_layout(Proposal.chains([[]], WINDOW))
    assert tokens.tolist() == [[7, 8]]
    assert offsets.tolist() == [[0, 1, 2]]
    assert mask is not None
    assert mask[0].tolist() == matrix("1 0 0", "1 1 0", "1 1 1")


def test_broken_proposals_are_refused() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    for parents in ([0, -1], [-1, 1], [-2, 0], [-1, 2]):
        with pytest.raises(ValueError, match="before its children"):
            Proposal(tokens, torch.tensor(parents))
    with pytest.raises(ValueError, match=r"\[B, n\]"):
        Proposal(tokens[0], torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="parents"):
        Proposal(tokens, torch.full((2, 2), -1))
    with pytest.raises(ValueError, match="draft_probs"):
        Proposal(tokens, torch.tensor([-1, 0]), torch.full((1, 1, 4), 0.25))
    with pytest.raises(ValueError, match="Window"):
        Window(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, 2, dtype=torch.bool))


@st.composite
def scored_trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Candidates, parents first, none better than its parent; few values, so that many tie."""
    parents = draw(parents_arrays(most=12).filter(len))
    scores: list[float] = []
    for parent in parents:
        above = scores[parent] if parent >= 0 else 0.0
        scores.append(above - draw(st.sampled_from([0.0, 0.5, 1.0, float("inf")])))
    return parents, scores


@settings(max_examples=200, deadline=None)
@given(trees=st.lists(scored_trees(), min_size=1, max_size=3), count=st.integers(1, 14))
def test_best_nodes(trees: list[tuple[list[int], list[float]]], count: int) -> None:
    """The m best and no other, ties to the first, ancestors included, the same tree re-indexed."""
    total = max(len(parents) for parents, _ in trees)
    above = torch.full((len(trees), total), -1)
    scores = torch.full((len(trees), total), -torch.inf)
    for b, (parents, mine) in enumerate(trees):
        above[b, : len(parents)] = torch.tensor(parents)
        scores[b, : len(mine)] = torch.tensor(mine)
    kept, parents_kept, lengths = best_nodes(scores, above, count)
    width = min(count, total)
    assert kept.shape == parents_kept.shape == (len(trees), width)
    for b, (parents, mine) in enumerate(trees):
        real = [i for i in range(len(mine)) if mine[i] > float("-inf")]
        want = sorted(sorted(real, key=lambda i: (-mine[i], i))[:count])
        n = int(lengths[b])
        nodes, tree = kept[b, :n].tolist(), parents_kept[b].tolist()
        assert nodes == want
        for node, parent in zip(nodes, tree[:n], strict=True):
            assert (nodes[parent] if parent >= 0 else -1) == parents[node]
        assert tree[n:] == list(range(n - 1, width - 1))  # padding goes on like a chain
    Proposal(kept, parents_kept, lengths=lengths)  # parents come before their children
    again = best_nodes(scores, above, count)
    assert all(torch.equal(a, b) for a, b in zip((kept, parents_kept, lengths), again, strict=True))


def test_best_nodes_by_hand() -> None:
    """The example drawn in `drafts/eagle_tree.py`."""
    #                         a    b   aa   ab   ba    bb  aaa   aab  baa   bab
    scores = torch.tensor([[0.6, 0.3, 0.4, 0.1, 0.2, 0.05, 0.3, 0.05, 0.1, 0.02]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    kept, above, lengths = best_nodes(scores, parents, 5)
    assert kept.tolist() == [[0, 1, 2, 4, 6]]  # a, b, aa, ba, aaa
    assert above.tolist() == [[-1, -1, 0, 1, 2]]
    assert lengths.tolist() == [5]
