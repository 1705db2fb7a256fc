"""Channels of one size: the same function, other steps of the optimiser."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from speculant.train.data import Batch, Item
from speculant.train.init import channel_scale, condition, fold
from test_eagle import make_head


def taps(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed))


def test_a_trained_fc_computes_the_same_conditioned_and_folded() -> None:
    head, scale = make_head(3), torch.linspace(0.1, 50, 32)
    before, names = head.fuse(taps()), set(head.state_dict())
    condition(head, scale, fresh=False)
    torch.testing.assert_close(head.fuse(taps()), before)
    fold(head)
    torch.testing.assert_close(head.fuse(taps()), before)
    assert set(head.state_dict()) == names  # plain tensors again, as they are saved


def test_a_fresh_fc_is_meant_for_channels_of_size_one() -> None:
    head, scale = make_head(3), torch.linspace(0.1, 50, 32)
    want = head.fuse(taps() / scale)
    condition(head, scale, fresh=True)
    torch.testing.assert_close(head.fuse(taps()), want)
    fold(head)
    torch.testing.assert_close(head.fuse(taps()), want)


def test_a_step_moves_large_and_small_channels_alike() -> None:
    """What it is for: one step of Adam changes the output as much through either channel."""
    head, scale = make_head(3), torch.ones(32)
    scale[0] = 1000.0
    condition(head, scale, fresh=True)
    old = head.fc.weight.detach().clone()
    optimizer = torch.optim.Adam(head.fc.parameters(), lr=1e-3)
    head.fuse(taps() * scale).sum().backward()
    optimizer.step()
    moved = ((head.fc.weight.detach() - old).abs() * scale)[0]
    assert float(moved.max() / moved.min()) == pytest.approx(1.0, rel=0.01)


def test_the_scale_is_over_answers_only_and_never_nothing() -> None:
    states = taps()
    states[:, 0] = 1e4  # the first token's attention sink, a prompt's
    states[..., 7] = 0.0
    items = (Item(None, 0, 0, 3, 2), Item(None, 1, 0, 4, 2))  # type: ignore[arg-type]
    batch = Batch(torch.zeros(2, 6, dtype=torch.int64), torch.tensor([3, 4]),
                  torch.tensor([2, 2]), items)  # fmt: skip
    features = SimpleNamespace(states=lambda _: SimpleNamespace(taps=states))
    scale = channel_scale(features, [batch])  # type: ignore[arg-type]
    rows = torch.stack([states[0, 1], states[0, 2], states[1, 2], states[1, 3]])  # the bases
    want = rows.square().mean(dim=0).sqrt()
    silent = torch.arange(32) == 7
    torch.testing.assert_close(scale[~silent], want[~silent])
    assert 0 < float(scale[7]) < 0.01
