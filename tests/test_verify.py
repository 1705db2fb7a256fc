"""Acceptance rules against their definition, by enumeration.

The independent truth is twofold. Each rule is written down a second time, literally and for one
proposal, asking a `Chance` for every decision; walking all its branches with their exact
probabilities gives the joint distribution of what it emits, which must be the target's own to
1e-9. Every branch is also a cell of the uniforms' cube; the vectorised function is run at the
ends and inside every cell and must do what the branch did. Together: the function is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from speculant.proposal import Proposal, Verdict
from speculant.sampling import draw
from speculant.tree import node_paths, shape_parents
from speculant.verify import residual, verify_block, verify_chain, verify_chosen, verify_tree

Array = NDArray[np.float64]
Prefix = tuple[int, ...]
Rule = Callable[[Proposal, Tensor, Tensor], Verdict]
BELOW_ONE = 1 - 2**-53
EPS = 1e-10


# ---------------------------------------------------------------- enumeration


@dataclass
class Chance:
    """Answers a rule's questions by a script, keeps the branch's weight and its uniforms."""

    script: tuple[int, ...]
    weight: float = 1.0
    cells: dict[int, tuple[float, float]] = field(default_factory=dict)  # column -> [lo, hi)
    picked: dict[int, int] = field(default_factory=dict)  # column -> token
    taken: tuple[int, ...] = ()
    others: list[tuple[int, ...]] = field(default_factory=list)

    def coin(self, column: int, threshold: float) -> bool:
        """True with probability min(1, threshold): the column's uniform is below it."""
        edge = min(1.0, threshold)
        return self._choose(column, [0.0, edge, 1.0]) == 0

    def pick(self, column: int, probs: Array) -> int:
        """A token of probs, by inversion of the cumulative sum."""
        assert abs(probs.sum() - 1) < 1e-9
        self.picked[column] = self._choose(column, [0.0, *np.cumsum(probs / probs.sum())])
        return self.picked[column]

    def _choose(self, column: int, edges: Sequence[float]) -> int:
        assert column not in self.cells, "one uniform decides one thing"
        widths = np.diff(edges)
        options = [i for i, width in enumerate(widths) if width > 1e-12]
        depth = len(self.taken)
        if depth < len(self.script):
            choice = self.script[depth]
        else:
            choice = options[0]
            self.others += [(*self.taken, other) for other in options[1:]]
        self.taken += (choice,)
        self.weight *= float(widths[choice])
        self.cells[column] = (float(edges[choice]), float(edges[choice + 1]))
        return choice


@dataclass
class World:
    """Target and draft conditionals after every prefix of up to `depth` tokens."""

    vocab: int
    depth: int
    target: dict[Prefix, Array]
    draft: dict[Prefix, Array]

    @staticmethod
    def random(seed: int, vocab: int, depth: int, zeros: bool = False, siblings: int = 1) -> World:
        """Path-dependent; with `zeros`, both have tails cut off like top-k's."""
        g = np.random.default_rng(seed)

        def probs(least: int) -> Array:
            p = g.dirichlet(np.full(vocab, 0.8)) + 0.01
            kept = int(g.integers(least, vocab + 1)) if zeros else vocab
            p[np.argsort(-p)[kept:]] = 0.0
            return p / p.sum()

        prefixes = [p for n in range(depth + 1) for p in product(range(vocab), repeat=n)]
        target = {p: probs(1) for p in prefixes}
        return World(vocab, depth, target, {p: probs(siblings) for p in prefixes})

    @staticmethod
    def constant(target: Sequence[float], draft: Sequence[float], depth: int) -> World:
        """The same conditionals after every prefix."""
        world = World.random(0, len(target), depth)
        world.target = dict.fromkeys(world.target, np.array(target))
        world.draft = dict.fromkeys(world.draft, np.array(draft))
        return world

    def joint(self, after: Prefix = ()) -> Array:
        """The target's joint of the tokens that complete `after` to depth + 1 tokens."""
        if len(after) == self.depth + 1:
            return np.array(1.0)
        p = self.target[after]
        return np.stack([p[x] * self.joint((*after, x)) for x in range(self.vocab)])


@dataclass
class Tree:
    """One drafted tree with everything a rule may look at."""

    world: World
    parents: list[int]
    tokens: list[int]

    def path(self, node: int) -> Prefix:
        return () if node < 0 else (*self.path(self.parents[node]), self.tokens[node])

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    @property
    def draft_probs(self) -> Array:
        """[n, V]: the distribution, nothing removed, that each node's parent drew from."""
        rows = [self.world.draft[self.path(parent)] for parent in self.parents]
        return np.array(rows).reshape(len(rows), self.world.vocab)

    @property
    def target_probs(self) -> Array:
        """[1 + n, V]."""
        return np.stack([self.world.target[self.path(i)] for i in range(-1, len(self.parents))])


def drafts(world: World, parents: list[int]) -> Iterator[tuple[float, Tree]]:
    """Every drafted tree with its probability; siblings are drawn without replacement."""
    pending: list[tuple[float, list[int]]] = [(1.0, [])]
    for i, parent in enumerate(parents):
        grown = []
        for weight, tokens in pending:
            p = world.draft[Tree(world, parents, tokens).path(parent)].copy()
            for sibling in range(i):
                if parents[sibling] == parent:
                    p[tokens[sibling]] = 0.0
            p = p / p.sum()
            grown += [(weight * p[x], [*tokens, x]) for x in range(world.vocab) if p[x] > 0]
        pending = grown
    for weight, tokens in pending:
        yield weight, Tree(world, parents, tokens)


@dataclass
class Branch:
    """One way a round can go."""

    weight: float
    tree: Tree
    emitted: Prefix
    is_bonus: bool
    chance: Chance


Reference = Callable[[Tree, Chance], tuple[Prefix, bool]]


def branches(world: World, parents: list[int], reference: Reference) -> list[Branch]:
    """All rounds of a sampled proposal under a rule, with exact weights."""
    found = [b for w, tree in drafts(world, parents) for b in walk(w, tree, reference)]
    assert sum(b.weight for b in found) == pytest.approx(1, abs=1e-9)
    return found


def walk(weight: float, tree: Tree, reference: Reference) -> list[Branch]:
    """All branches of one rule on one tree."""
    pending: list[tuple[int, ...]] = [()]
    found = []
    while pending:
        chance = Chance(pending.pop())
        emitted, is_bonus = reference(tree, chance)
        pending += chance.others
        found.append(Branch(weight * chance.weight, tree, emitted, is_bonus, chance))
    return found


def law_error(world: World, found: Sequence[Branch]) -> float:
    """Largest difference between the emitted joint and the target's, over all token strings.

    A shorter emission is completed by the target's own conditionals to depth + 1 tokens.
    """
    joint = np.zeros((world.vocab,) * (world.depth + 1))
    after: dict[Prefix, Array] = {}
    for b in found:
        if b.emitted not in after:
            after[b.emitted] = world.joint(b.emitted)
        joint[b.emitted] += b.weight * after[b.emitted]
    return float(np.abs(joint - world.joint()).max())


def expected_accepted(found: Sequence[Branch]) -> float:
    return sum(b.weight * (len(b.emitted) - 1) for b in found)


def disagreements(found: Sequence[Branch], rule: Rule) -> int:
    """On how many points of the branches' cells the real function does something else.

    Each cell is tried at its low end, its high end and inside; columns the rule never looks at
    hold random numbers. All in one call.
    """
    g = np.random.default_rng(0)
    points = []
    for b in found:
        for where in ("low", "high", "inside"):
            u = g.random(len(b.tree.parents) + 1)
            for column, (lo, hi) in b.chance.cells.items():
                edge = min(EPS, (hi - lo) / 4)
                low = lo + edge if lo > 0 else 0.0
                u[column] = {"low": low, "high": hi - edge, "inside": lo + u[column] * (hi - lo)}[
                    where
                ]
            points.append(u)
    rows = [b for b in found for _ in range(3)]
    proposal = batch([b.tree for b in rows])
    target = torch.tensor(np.stack([b.tree.target_probs for b in rows]))
    verdict = rule(proposal, target, torch.tensor(np.stack(points)))
    return sum(
        (row, bonus) != (b.emitted, b.is_bonus)
        for row, bonus, b in zip(
            emitted(proposal, verdict), verdict.is_bonus.tolist(), rows, strict=True
        )
    )


def batch(trees: Sequence[Tree], sampled: bool = True) -> Proposal:
    tokens = torch.tensor([t.tokens for t in trees]).reshape(len(trees), -1)
    parents = torch.tensor(trees[0].parents, dtype=torch.int64)
    probs = torch.tensor(np.stack([t.draft_probs for t in trees])) if sampled else None
    return Proposal(tokens, parents, probs)


def emitted(proposal: Proposal, verdict: Verdict) -> list[Prefix]:
    """Accepted tokens and the last one, per row; checks that a verdict fits together."""
    out = []
    assert torch.equal((verdict.path >= 0).sum(1), verdict.num_accepted)
    for b, count in enumerate(verdict.num_accepted.tolist()):
        path = verdict.path[b, :count].tolist()
        assert [int(proposal.parents[b, i]) for i in path] == [-1, *path][:count]
        assert bool((verdict.path[b, count:] == -1).all())
        out.append((*proposal.tokens[b, path].tolist(), int(verdict.next_token[b])))
    return out


# ------------------------------------------------- the rules, literally


def norm(p: Array) -> Array:
    return p / p.sum()


def token_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Leviathan et al. 2023, algorithm 1."""
    out: Prefix = ()
    n = len(tree.tokens)
    for i, x in enumerate(tree.tokens):
        p, q = tree.world.target[out], tree.world.draft[out]
        if not chance.coin(i, p[x] / q[x]):
            return (*out, chance.pick(n, norm(np.maximum(p - q, 0)))), False
        out += (x,)
    return (*out, chance.pick(n, tree.world.target[out])), True


def block_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Sun et al. 2024, algorithm 2 (its p_i is w here, M_b the target, M_s the draft)."""
    n, w, kept, kept_w = len(tree.tokens), 1.0, 0, 1.0
    for i in range(1, n + 1):
        before, x, prefix = tuple(tree.tokens[: i - 1]), tree.tokens[i - 1], tuple(tree.tokens[:i])
        w = min(w * tree.world.target[before][x] / tree.world.draft[before][x], 1.0)
        h = w
        if i < n:
            s = np.maximum(w * tree.world.target[prefix] - tree.world.draft[prefix], 0).sum()
            h = s / (s + 1 - w) if s + 1 - w > 0 else 1.0
        if chance.coin(i - 1, h):
            kept, kept_w = i, w
    out = tuple(tree.tokens[:kept])
    p = tree.world.target[out]
    if kept < n:
        p = np.maximum(kept_w * p - tree.world.draft[out], 0)
        if p.sum() <= 0:  # only where a longer prefix stands for sure
            p = tree.world.target[out]
    return (*out, chance.pick(n, norm(p))), kept == n


def tree_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Design, law 2."""
    node, out, n = -1, (), len(tree.tokens)
    while True:
        r, p = tree.world.target[out], tree.world.draft.get(out)
        children = tree.children(node)
        for child in children:
            x = tree.tokens[child]
            if chance.coin(child, r[x] / p[x]):
                node, out = child, (*out, x)
                break
            r = norm(np.maximum(r - p, 0))
            p = p.copy()
            p[x] = 0.0
            p = norm(p) if p.sum() > 0 else p
        else:
            return (*out, chance.pick(n, r)), not children


def chosen_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Design, law 2, draft_probs None: columns are rows of the target's forward."""
    node, out = -1, ()
    while True:
        x = chance.pick(node + 1, tree.world.target[out])
        children = tree.children(node)
        match = [c for c in children if tree.tokens[c] == x]
        out += (x,)
        if not match:
            return out, not children
        node = match[0]


# -------------------------------------------------------------- exactness

CHAINS = [(v, n, zeros) for v in (3, 4) for n in (1, 2, 3) for zeros in (False, True)]
SHAPES = {
    "2": (4, shape_parents([2])),
    "3": (4, shape_parents([3])),
    "2-2": (3, shape_parents([2, 2])),
    "3-1": (3, shape_parents([3, 1])),
    "chain": (3, [-1, 0, 1]),
    "depth-first": (3, [-1, 0, -1, 1, 1, 2]),
    "uneven": (3, [-1, -1, 1, 1, 2]),
}


@pytest.mark.parametrize("rule", [(token_rule, verify_chain), (block_rule, verify_block)])
@pytest.mark.parametrize(("vocab", "depth", "zeros"), CHAINS)
def test_chain_is_exact(rule: tuple[Reference, Rule], vocab: int, depth: int, zeros: bool) -> None:
    world = World.random(100 * vocab + 10 * depth + zeros, vocab, depth, zeros)
    found = branches(world, list(range(-1, depth - 1)), rule[0])
    assert law_error(world, found) < 1e-9
    assert disagreements(found, rule[1]) == 0


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_is_exact(shape: str, zeros: bool) -> None:
    vocab, parents = SHAPES[shape]
    siblings = max(parents.count(i) for i in parents)
    depth = max(map(len, node_paths(parents, parents)))
    world = World.random(len(parents) + zeros, vocab, depth, zeros, siblings)
    found = branches(world, parents, tree_rule)
    assert law_error(world, found) < 1e-9
    assert disagreements(found, verify_tree) == 0


@pytest.mark.parametrize(
    ("reference", "rule", "parents"),
    [
        (token_rule, verify_chain, [-1, 0, 1]),
        (block_rule, verify_block, [-1, 0, 1]),
        (tree_rule, verify_tree, [-1, -1, 0, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_exact_where_draft_and_target_agree_in_places(
    reference: Reference, rule: Rule, parents: list[int], seed: int
) -> None:
    """No residual mass is left where both say the same: after every other prefix here."""
    world = World.random(seed, 3, 3 if parents[1] == 0 else 2)
    for i, prefix in enumerate(world.draft):
        if (i + seed) % 2:
            world.draft[prefix] = world.target[prefix]
    found = branches(world, parents, reference)
    assert law_error(world, found) < 1e-9
    assert disagreements(found, rule) == 0


def test_one_branch_tree_is_the_token_rule() -> None:
    world = World.random(3, 4, 3, zeros=True)
    found = branches(world, [-1, 0, 1], token_rule)
    assert disagreements(found, verify_tree) == 0


CHOSEN = {
    "chain": ([-1, 0, 1], [2, 0, 1]),
    "tree": ([-1, -1, 0, 0, 1, 2], [0, 2, 1, 2, 0, 0]),
    "duplicate siblings": ([-1, -1, 1, 0], [1, 1, 0, 2]),
    "token of probability 0": ([-1, 0], [1, 1]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("case", CHOSEN)
@pytest.mark.parametrize("seed", range(3))
def test_chosen_is_exact(case: str, seed: int) -> None:
    parents, tokens = CHOSEN[case]
    world = World.random(seed, 3, 3, zeros=True)
    if case == "token of probability 0":
        world.target[()] = np.array([0.5, 0.0, 0.5])
    found = walk(1.0, Tree(world, parents, tokens), chosen_rule)
    assert law_error(world, found) < 1e-9
    own = np.random.default_rng(seed).integers(0, 3, (len(found), len(parents) + 1))
    for b, branch in enumerate(found):  # what the target says at the nodes that are walked
        for row, token in branch.chance.picked.items():
            own[b, row] = token
    proposal = batch([b.tree for b in found], sampled=False)
    verdict = verify_chosen(proposal, torch.tensor(own))
    assert emitted(proposal, verdict) == [b.emitted for b in found]
    assert verdict.is_bonus.tolist() == [b.is_bonus for b in found]


# ------------------------------------------- the check itself can fail


def dropping_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Wrong (law 3): a sampled token of low confidence is dropped, a bonus drawn instead."""
    (x,), q, p = tree.tokens, tree.world.draft[()], tree.world.target[()]
    if q[x] < 0.4:
        return (chance.pick(1, p),), True
    return token_rule(tree, chance)


def best_path_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Wrong (section 6): of all siblings that pass their own test, the likeliest wins."""
    p, q, n = tree.world.target[()], tree.world.draft[()], len(tree.tokens)
    passed = [x for i, x in enumerate(tree.tokens) if chance.coin(i, p[x] / q[x])]
    if not passed:
        return (chance.pick(n, norm(np.maximum(p - q, 0))),), False
    best = max(passed, key=lambda x: p[x])
    return (best, chance.pick(n, tree.world.target[(best,)])), True


def with_replacement_rule(tree: Tree, chance: Chance) -> tuple[Prefix, bool]:
    """Wrong: x is not taken out of p before the next sibling."""
    r, p, n = tree.world.target[()], tree.world.draft[()], len(tree.tokens)
    for i, x in enumerate(tree.tokens):
        if chance.coin(i, r[x] / p[x]):
            return (x, chance.pick(n, tree.world.target[(x,)])), True
        r = norm(np.maximum(r - p, 0))
    return (chance.pick(n, r),), False


@pytest.mark.parametrize(
    ("wrong", "parents"),
    [(dropping_rule, [-1]), (best_path_rule, [-1, -1]), (with_replacement_rule, [-1, -1])],
)
def test_biased_rules_are_caught(wrong: Reference, parents: list[int]) -> None:
    world = World.constant([0.5, 0.3, 0.2, 0.0], [0.25, 0.1, 0.25, 0.4], 1)
    assert law_error(world, branches(world, parents, wrong)) > 1e-3
    right = tree_rule if len(parents) > 1 else token_rule
    assert law_error(world, branches(world, parents, right)) < 1e-9


@pytest.mark.parametrize(
    ("reference", "parents", "other"),
    [(block_rule, [-1, 0], verify_chain), (token_rule, [-1, 0], verify_block)],
)
def test_another_rule_is_caught(reference: Reference, parents: list[int], other: Rule) -> None:
    found = branches(World.random(1, 3, 2), parents, reference)
    assert disagreements(found, other) > 0


# ------------------------------------------------------------- acceptance


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_block_accepts_at_least_as_much(depth: int) -> None:
    for seed in range(12 if depth < 3 else 4):
        world = World.random(seed, 3, depth, zeros=seed % 2 == 1)
        chain = list(range(-1, depth - 1))
        token, block = (
            expected_accepted(branches(world, chain, rule)) for rule in (token_rule, block_rule)
        )
        assert block >= token - 1e-12
        if depth == 1:
            assert block == pytest.approx(token, abs=1e-12)


def test_the_block_papers_example() -> None:
    world = World.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2)
    chain = [-1, 0]
    for reference, rule, accepted in (
        (token_rule, verify_chain, 10 / 9),
        (block_rule, verify_block, 11 / 9),
    ):
        found = branches(world, chain, reference)
        assert expected_accepted(found) == pytest.approx(accepted, abs=1e-12)
        assert law_error(world, found) < 1e-12
        assert disagreements(found, rule) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_draft_equal_to_the_target_accepts_everything(rule: Rule, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    rows, n, vocab = 200, 4, 50
    probs = torch.rand(rows, n + 1, vocab, generator=g, dtype=dtype).softmax(-1)
    tokens = torch.randint(vocab, (rows, n), generator=g)
    proposal = Proposal(tokens, torch.arange(-1, n - 1), probs[:, :n])
    uniforms = torch.rand(rows, n + 1, generator=g, dtype=torch.float64)
    uniforms[: rows // 2] = BELOW_ONE
    verdict = rule(proposal, probs, uniforms)
    assert verdict.num_accepted.tolist() == [n] * rows
    assert bool(verdict.is_bonus.all())
    assert torch.equal(verdict.next_token, draw(probs[:, n], uniforms[:, n]))


def test_greedy_is_plain_argmax_decoding() -> None:
    """Any chosen tree, any table of argmaxes: the emission is plain decoding's, and maximal."""
    g = np.random.default_rng(0)
    for _ in range(300):
        n = int(g.integers(0, 8))
        parents = [int(g.integers(-1, i)) for i in range(n)]
        tokens: list[int] = []
        for i in range(n):  # siblings differ, where three tokens suffice
            used = {tokens[j] for j in range(i) if parents[j] == parents[i]}
            tokens.append(int(g.choice(sorted({0, 1, 2} - used) or [0])))
        paths: list[Prefix] = [()]
        for parent, token in zip(parents, tokens, strict=True):
            paths.append((*paths[parent + 1], token))
        says = {path: int(g.integers(3)) for path in paths}
        verdict = verify_chosen(
            Proposal.trees([(tokens, parents)]), torch.tensor([[says[path] for path in paths]])
        )
        plain: list[int] = []
        while tuple(plain) in says:  # plain decoding, as far as the tree goes
            plain.append(says[tuple(plain)])
        (mine,) = emitted(Proposal.trees([(tokens, parents)]), verdict)
        walked_first_copies = len(set(paths)) == len(paths)
        assert list(mine) == plain[: len(mine)]
        assert list(mine) == plain or not walked_first_copies


# ------------------------------------------------------ rows of a batch


def ragged(
    seed: int, parents: Sequence[int], vocab: int = 5, rows: int = 40
) -> tuple[Proposal, Tensor, Tensor]:
    """Rows of 0..n real nodes, siblings distinct, zeros in the target; padding holds garbage."""
    g = torch.Generator().manual_seed(seed)
    n = len(parents)
    by_parent = torch.rand(rows, n + 1, vocab, generator=g) + 0.05
    by_parent = by_parent / by_parent.sum(-1, keepdim=True)
    above = torch.tensor(parents) + 1
    draft = by_parent[:, above]  # siblings share their parent's distribution
    ranks = torch.tensor([list(parents[:i]).count(p) for i, p in enumerate(parents)])
    order = by_parent.argsort(-1)[:, above]  # a permutation per parent
    tokens = order.gather(2, ranks.expand(rows, n)[:, :, None]).squeeze(2)
    target = torch.rand(rows, n + 1, vocab, generator=g)
    target = target.masked_fill(torch.rand(target.shape, generator=g) < 0.3, 0.0)
    target[..., 0] += 0.01
    target = target / target.sum(-1, keepdim=True)
    lengths = torch.randint(0, n + 1, (rows,), generator=g)
    padding = torch.arange(n) >= lengths[:, None]
    draft = draft.masked_fill(padding[:, :, None], float("nan"))
    uniforms = torch.rand(rows, n + 1, generator=g, dtype=torch.float64)
    uniforms[:, :n] = uniforms[:, :n].masked_fill(padding, 0.0)  # would accept whatever is asked
    return Proposal(tokens, above - 1, draft, lengths), target, uniforms


def chosen_by_uniforms(proposal: Proposal, target: Tensor, uniforms: Tensor) -> Verdict:
    """verify_chosen as a rule of the others' signature."""
    bare = Proposal(proposal.tokens, proposal.parents, None, proposal.lengths)
    return verify_chosen(bare, draw(target, uniforms))


ALONE = [
    (verify_chain, [-1, 0, 1, 2]),
    (verify_block, [-1, 0, 1, 2]),
    (verify_tree, [-1, -1, 0, 0, 1, 2]),
    (chosen_by_uniforms, [-1, -1, 0, 0, 1, 2]),
]


@pytest.mark.parametrize(("rule", "parents"), ALONE)
def test_a_row_is_what_it_is_alone(rule: Rule, parents: list[int]) -> None:
    proposal, target, uniforms = ragged(1, parents)
    together = rule(proposal, target, uniforms)
    n = len(parents)
    for b, length in enumerate(proposal.num_nodes.tolist()):
        assert proposal.draft_probs is not None
        parts = (proposal.tokens, proposal.parents, proposal.draft_probs)
        single = Proposal(*(part[b : b + 1, :length] for part in parts))
        last = length if rule is chosen_by_uniforms else n  # one number a forward row there
        columns = [*range(length), last]
        alone = rule(single, target[b : b + 1, : length + 1], uniforms[b : b + 1, columns])
        count = int(alone.num_accepted)
        assert int(together.num_accepted[b]) == count <= length
        assert together.path[b, :count].tolist() == alone.path[0, :count].tolist()
        assert int(together.next_token[b]) == int(alone.next_token)
        assert bool(together.is_bonus[b]) == bool(alone.is_bonus)
    assert len(set(together.num_accepted.tolist())) > 1  # the rows did differ


@pytest.mark.parametrize(("rule", "parents"), ALONE)
def test_rows_without_a_draft_are_plain_sampling(rule: Rule, parents: list[int]) -> None:
    proposal, target, uniforms = ragged(2, parents)
    if rule is chosen_by_uniforms:
        uniforms[:, 0] = uniforms[:, -1]
    nothing = torch.zeros_like(proposal.num_nodes)
    empty = Proposal(proposal.tokens, proposal.parents, proposal.draft_probs, nothing)
    verdict = rule(empty, target, uniforms)
    assert verdict.num_accepted.sum() == 0
    assert bool(verdict.is_bonus.all())
    assert torch.equal(verdict.next_token, draw(target[:, 0], uniforms[:, -1]))


# ------------------------------------------------------ what may never be


@pytest.mark.parametrize("bad", [0.0, float("nan")])
@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_a_token_that_was_not_drawn_raises(rule: Rule, bad: float) -> None:
    draft = torch.tensor([[[bad, 1.0, 0.0]]])
    target = torch.full((1, 2, 3), 1 / 3)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([-1]), draft)
    with pytest.raises(ValueError, match="drafted token 0"):
        rule(proposal, target, torch.full((1, 2), 0.5))


def test_a_sibling_drawn_twice_raises() -> None:
    draft = torch.tensor([[[0.5, 0.5, 0.0]] * 2])
    target = torch.tensor([[[0.0, 0.5, 0.5]] * 3])
    proposal = Proposal(torch.tensor([[0, 0]]), torch.tensor([-1, -1]), draft)
    with pytest.raises(ValueError, match="drafted token 0"):
        verify_tree(proposal, target, torch.full((1, 3), 0.5))


@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_chosen_nodes_are_refused_by_the_rules_for_sampled_ones(rule: Rule) -> None:
    with pytest.raises(ValueError, match="draft_probs"):
        rule(Proposal.chains([[1]]), torch.full((1, 2, 3), 1 / 3), torch.zeros(1, 2))


EDGES = st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2**-24, BELOW_ONE])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    case=st.sampled_from(ALONE),
    edges=st.lists(EDGES, min_size=8, max_size=8),
    edgy=st.booleans(),
)
def test_a_token_of_target_probability_0_is_never_emitted(
    seed: int, case: tuple[Rule, list[int]], edges: list[float], edgy: bool
) -> None:
    rule, parents = case
    proposal, target, uniforms = ragged(seed, parents, rows=16)
    if edgy:
        uniforms[:] = torch.tensor(edges[: len(parents) + 1], dtype=torch.float64)
    verdict = rule(proposal, target, uniforms)
    for b, tokens in enumerate(emitted(proposal, verdict)):
        rows = [0, *(i + 1 for i in verdict.path[b, : len(tokens) - 1].tolist())]
        assert all(target[b, row, x] > 0 for row, x in zip(rows, tokens, strict=True))


@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-7, 1e-6])
def test_next_to_no_residual_mass(rule: Rule, noise: float) -> None:
    """Draft and target agree up to float32 rounding, at uniforms that reject if anything does."""
    g = torch.Generator().manual_seed(0)
    rows, n, vocab = 400, 3, 6
    target = torch.rand(rows, n + 1, vocab, generator=g)
    target[..., 3:5] = 0.0
    target = target / target.sum(-1, keepdim=True)
    draft = (target[:, :n] * (1 + noise * torch.randn(rows, n, vocab, generator=g))).clamp(min=0)
    tokens = torch.randint(3, (rows, n), generator=g)
    uniforms = torch.full((rows, n + 1), BELOW_ONE, dtype=torch.float64)
    verdict = rule(Proposal(tokens, torch.arange(-1, n - 1), draft), target, uniforms)
    proposal = Proposal(tokens, torch.arange(-1, n - 1))
    for b, out in enumerate(emitted(proposal, verdict)):
        assert all(target[b, i, x] > 0 for i, x in enumerate(out))


def test_residual_against_its_definition() -> None:
    target = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    draft = torch.tensor([[0.125, 0.5, 0.125, 0.25], [0.25, 0.25, 0.25, 0.25]])
    expected = torch.tensor([[0.75, 0.0, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert torch.equal(residual(target, draft), expected)
