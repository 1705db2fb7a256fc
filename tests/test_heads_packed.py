"""Packed heads draft what the heads in their files do, up to what int8 rounds away."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fake import make_row
from speculant.drafts.base import Feedback
from speculant.drafts.eagle import EagleDraft
from speculant.drafts.eagle_head import CachedHead
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.heads.layers import causal
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.packed import Packed, pack
from speculant.native.library import library
from speculant.native.linear import quantise, rounded
from speculant.prices import Prices

H, V = 64, 96
SIZES: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": 128, "num_heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab_size": V,
}  # fmt: skip
compiled = pytest.mark.skipif(library() is None, reason="the compiled library is not here")


def make(kind: str, narrow: bool = False, **switches: Any) -> Any:
    """A random head. narrow: of a width that 32 does not divide."""
    torch.manual_seed(0)
    sizes = SIZES | ({"hidden_size": 40} if narrow else {})
    head: Any
    if kind == "eagle1":
        head = Eagle1Head(Eagle1Config(**sizes))
    elif kind == "medusa":
        head = MedusaHead(MedusaConfig(sizes["hidden_size"], V, 3, 2))
    else:
        head = Eagle3Head(Eagle3Config(**sizes, draft_vocab_size=48, taps=(0, 1), **switches))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(0.2 * torch.randn_like(p) + (p.dim() == 1))
    return head


class Rounded(nn.Module):
    """A linear layer whose weights, and inputs, were rounded: what packing is to compute."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.detach(), linear.bias
        self.integers = self.weight.shape[1] % 32 == 0
        if self.integers:
            self.weight = quantise(self.weight, "q8_0").dequantised()
        else:
            self.weight = self.weight.bfloat16().float()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(rounded(x) if self.integers else x, self.weight, self.bias)


def with_rounded(head: nn.Module) -> nn.Module:
    """The head with its linear layers replaced."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Rounded(child))
    return head


@compiled
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa"])
def test_a_packed_head_computes_what_rounded_matrices_do(kind: str, narrow: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    width = 40 if narrow else H
    head = make(kind, narrow)
    unembed = torch.randn(V, width, generator=generator)
    x, y = torch.randn(2, 2, 5, width, generator=generator)

    @torch.no_grad()
    def run(it: Any) -> Tensor:
        if kind != "eagle3":
            it.bind(lambda h: h @ unembed.T)
        if kind == "medusa":
            return it.logits(x)
        positions = torch.arange(5).expand(2, -1)
        features = it.fuse(torch.cat([y, x], dim=-1)) if kind == "eagle3" else y
        return it.logits(it(x, features, positions, causal))

    exact, want = run(head), run(with_rounded(copy.deepcopy(head)))
    packed: Any = pack(head)
    assert any(isinstance(module, Packed) for module in packed.modules())
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    out = run(packed)
    # a code on the edge between two integers may fall to either side
    assert (out - want).abs().mean() < 0.1 * (exact - want).abs().mean() + 1e-5
    assert (exact - want).abs().max() < 0.1 * exact.abs().max()
    assert next(packed.parameters()).dtype is torch.float32


def passes(head: Any, embedding: Tensor) -> tuple[Tensor, ...]:
    """Two rows of unlike length; then behind them a drafted step, a masked and a ragged one."""
    cached = CachedHead(head, lambda ids: embedding[ids], V)
    cached.start(2, 24)
    generator = torch.Generator().manual_seed(4)
    outputs = []
    for slot, count in ((0, 7), (1, 3)):
        ids = torch.randint(V, (1, count), generator=generator)
        features = torch.randn(1, count, H, generator=generator)
        outputs.append(cached.run([slot], ids, features, torch.arange(count)))
        cached.cache.advance(slot, count)
    ids, features = torch.tensor([[5], [9]]), torch.randn(2, 1, H, generator=generator)
    outputs.append(cached.run([0, 1], ids, features, torch.tensor([0])))
    mask = torch.tensor([[[1, 1, 0], [1, 0, 1]]] * 2, dtype=torch.bool)  # two siblings
    ids, features = torch.tensor([[5, 6], [9, 8]]), torch.randn(2, 2, H, generator=generator)
    outputs.append(cached.run([0, 1], ids, features, torch.tensor([1, 1]), mask, behind=1))
    ids, features = torch.tensor([[5, 6, 1], [9, 0, 0]]), torch.randn(2, 3, H, generator=generator)
    ragged = cached.run([0, 1], ids, features, torch.arange(3), counts=[3, 1])
    outputs += [ragged[:1], ragged[1:, :1]]  # the rest is padding
    return tuple(outputs)


@compiled
@torch.no_grad()
def test_the_compiled_layer_is_the_layer() -> None:
    """Over a cache, at every row's own position, with drafted entries behind and under a mask."""
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    head = make("eagle3")
    operators = with_rounded(copy.deepcopy(head))
    packed: Any = pack(head)
    assert packed.compiled is not None
    for out, want in zip(passes(packed, embedding), passes(operators, embedding), strict=True):
        assert out.shape == want.shape
        torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)


@compiled
@pytest.mark.parametrize(
    "switch", [{"norm_before_residual": True}, {"norm_output": True},
               {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}]
)  # fmt: skip
def test_a_layer_that_a_switch_changes_is_not_compiled(switch: dict[str, Any]) -> None:
    packed: Any = pack(make("eagle3", **switch))
    assert packed.compiled is None


@compiled
def test_biases_go_into_the_compiled_layer() -> None:
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    head = make("eagle3", qkv_bias=True, o_bias=True, mlp_bias=True)
    operators = with_rounded(copy.deepcopy(head))
    packed: Any = pack(head)
    assert packed.compiled is not None
    with torch.no_grad():
        pairs = zip(passes(packed, embedding), passes(operators, embedding), strict=True)
        for out, want in pairs:
            torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)


COUNTS = (7, 3, 9, 2)
"""Prompt tokens of each row whose states are known."""


class Round(NamedTuple):
    """What a round drafted, how many entries each row then had, and the cache."""

    chains: list[list[int]]
    parents: list[list[int]]
    lengths: list[int]
    cache: Tensor


def drafts_of(
    head: Any,
    embedding: Tensor,
    in_one_call: bool,
    budgets: Sequence[tuple[int, ...]],
    broken: float = 0.0,
    tree: int = 0,
    prices: Sequence[Prices | None] = (None,) * 4,
) -> list[Round]:
    """Rounds of four rows behind prompts of unlike length. Row b commits b + 1 tokens after each, of
    which the states of row 2 are broken."""
    draft = EagleDraft(head, lambda ids: embedding[ids], V, 5, tree, 4)
    assert draft.passes.chain is not None
    if not in_one_call:
        draft.passes.chain = None
    draft.start(4, 64)
    g = torch.Generator().manual_seed(5)
    rows, done = [], []
    for slot, count in enumerate(COUNTS):
        tokens = torch.randint(V, (count + 1,), generator=g).tolist()
        row = make_row(tokens, slot=slot, vocab_size=V)
        draft.open(row)
        draft.prefill(row, 0, torch.randn(count, 2 * H, generator=g))
        rows.append(row)
    for depths in budgets:
        for row, depth, price in zip(rows, depths, prices, strict=True):
            row.budget, row.prices = depth, price
        proposal = draft.propose(rows)
        counts = proposal.num_nodes.tolist()
        chains = [ids[:n] for ids, n in zip(proposal.tokens.tolist(), counts, strict=True)]
        above = [p[:n] for p, n in zip(proposal.parents.tolist(), counts, strict=True)]
        cache = draft.passes.cache
        done.append(Round(chains, above, list(cache.lengths), cache.data.clone()))
        committed = [torch.randint(V, (b + 1,), generator=g).tolist() for b in range(4)]
        for row, tokens in zip(rows, committed, strict=True):
            row.tokens += tokens
        hidden = torch.randn(4, 4, 2 * H, generator=g)
        hidden[2] += broken
        paths = [list(range(b)) for b in range(4)]
        draft.update(rows, Feedback(proposal, committed, paths, hidden))
    return done


@compiled
@torch.no_grad()
def test_a_chain_in_one_call_is_the_chain_step_by_step() -> None:
    """The same tokens and the same cache, in rounds that go unlike deep, of which some draft nothing,
    for one round or for many."""
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    packed: Any = pack(make("eagle3"))
    budgets = [(5, 2, 3, 0), (1, 1, 1, 1), (4, 5, 5, 5), (0, 3, 0, 2), (5, 0, 5, 5)]
    budgets += [(0, 0, 0, 0)] * 9 + [(5, 5, 5, 5)] * 2
    mine = drafts_of(packed, embedding, True, budgets)
    want = drafts_of(packed, embedding, False, budgets)
    for one, other, depths in zip(mine, want, budgets, strict=True):
        assert one.chains == other.chains
        assert [len(chain) for chain in one.chains] == list(depths)
        assert one.lengths == other.lengths
        for slot, length in enumerate(one.lengths):
            a, b = (r.cache[:, :, slot, :, :length] for r in (one, other))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len({tuple(chain) for chain in mine[-1].chains}) > 1


PRICES = Prices(0.08, tuple(0.4 * n for n in range(1, 13)), 0.3)


@compiled
@torch.no_grad()
@pytest.mark.parametrize(
    "prices", [(None,) * 4, (PRICES,) * 4, (PRICES, None, Prices(0.05, (1.0, 2.0, 4.0), 0.0), None)]
)
def test_a_tree_in_one_call_is_the_tree_level_by_level(prices: Sequence[Prices | None]) -> None:
    """The same nodes in the same order, whatever they cost, behind the same pairs."""
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    packed: Any = pack(make("eagle3"))
    with torch.no_grad():
        packed.norm.weight *= 3.0  # as sure of itself as a trained one
    budgets = [(5, 5, 5, 5), (5, 2, 3, 0), (1, 1, 1, 1), (4, 5, 5, 5), (0, 3, 0, 2), (5, 0, 5, 5)]
    budgets += [(0, 0, 0, 0)] * 9 + [(5, 5, 5, 5)] * 4
    sizes: set[int] = set()
    for only in range(4):  # by the operators, a row that is priced widens the passes of the others
        some = [tuple(d if b == only else 0 for b, d in enumerate(depths)) for depths in budgets]
        mine = drafts_of(packed, embedding, True, some, tree=9, prices=prices)
        want = drafts_of(packed, embedding, False, some, tree=9, prices=prices)
        for one, other in zip(mine, want, strict=True):
            assert (one.chains, one.parents) == (other.chains, other.parents)
            assert one.lengths == other.lengths
            for slot, length in enumerate(one.lengths):
                a, b = (r.cache[:, :, slot, :, :length] for r in (one, other))
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            sizes.add(len(one.chains[only]))
        together = drafts_of(packed, embedding, True, budgets, tree=9, prices=prices)
        for one, all_, depths in zip(mine, together, budgets, strict=True):
            if depths[only]:
                assert one.chains[only] == all_.chains[only]
    assert max(sizes) > 3
    assert len(sizes) > 2


@compiled
@torch.no_grad()
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_no_row_notices_that_the_states_of_another_are_broken(
    broken: float,
) -> None:
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    packed: Any = pack(make("eagle3"))
    budgets = [(3, 3, 3, 3)] * 4
    mine = drafts_of(packed, embedding, True, budgets, broken)
    sound = drafts_of(packed, embedding, True, budgets)
    assert mine[0].chains == sound[0].chains
    for one, other in zip(mine[1:], sound[1:], strict=True):
        # rounding to integers makes a number of NaN: what is drafted then is wrong, but sound
        assert one.chains[2] == [] or math.isnan(broken)
        assert [c for b, c in enumerate(one.chains) if b != 2] == [
            c for b, c in enumerate(other.chains) if b != 2
        ]
        assert bool(one.cache.isfinite().all())


@compiled
@torch.no_grad()
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_chain_in_one_call_ends_where_its_numbers_break(broken: float) -> None:
    """As step by step does: nothing is drafted from logits of which one is NaN or plus infinity."""
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    packed: Any = pack(make("eagle3"))
    packed.lm_head.linear.scales.view(-1)[5] = broken
    budgets = [(5, 5, 5, 5)] * 2
    mine = drafts_of(packed, embedding, True, budgets)
    want = drafts_of(packed, embedding, False, budgets)
    for one, other in zip(mine, want, strict=True):
        assert one.chains == other.chains
        assert one.lengths == other.lengths
        assert all(not chain for chain in one.chains) == math.isnan(broken)
        assert any(not chain for chain in one.chains)
