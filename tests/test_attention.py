"""Attention over a cache, compiled and in torch, against keys gathered one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculant import attention
from speculant.attention import Reading
from speculant.cache import CacheRows, KVCache
from speculant.native.attention import can_attend
from speculant.native.library import library

HEADS, CPU = 2, torch.device("cpu")
GARBAGE = 1e4
"""What lies where nothing may look: finite and large."""
PATHS = ["torch", "compiled"]


def use(path: str, patch: pytest.MonkeyPatch) -> None:
    """Run `Reading` on one of its two ways; skip where no compiler made the library."""
    if path == "torch":
        patch.setattr(attention, "can_attend", lambda *_: False)
    elif library() is None:
        pytest.skip("the compiled library is not here")


def reference(
    rows: CacheRows, mask: Tensor | None, q: Tensor, groups: int, window: int | None = None
) -> Tensor:
    """Every query in float64 against the columns it may see, after the new K/V were written."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
        for t in range(rows.new_tokens):
            own = torch.arange(rows.behind + t + 1)
            late = own if mask is None else mask[b, t].nonzero().flatten()
            columns = torch.cat([torch.arange(start), late + start])
            if window is not None:
                columns = columns[columns > start + rows.behind + t - window]
            for h in range(q.shape[1]):
                keys, values = rows.cache.data[:, 0, slot, h // groups, columns].double()
                scores = keys @ q[b, h, t].double() / math.sqrt(q.shape[-1])
                out[b, h, t] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_a_tree_over_a_ragged_batch(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some slots, any mask among uncommitted entries, head sizes of one vector and more."""
    use(path, monkeypatch)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        dim = 16 * data.draw(st.sampled_from([1, 2, 4, 5, 8]))
        groups, new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
        cache = KVCache(1, 4, 200, HEADS, dim, dtype)
        cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
        cache.lengths[:] = data.draw(st.permutations([0, 3, 31, 140]))  # read in stretches
        slots = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        lengths, count = [cache.lengths[s] for s in slots], len(slots)
        for step in range(3):
            behind = new * step
            mask: Tensor | None = None
            if data.draw(st.booleans()):
                mask = torch.rand(count, new, behind + new, generator=generator) < 0.5
                mask[:, range(new), range(behind, behind + new)] = True
            rows = cache.rows(slots, new, behind)
            # as a decoder's fused projection gives them: [B, T, heads, D], seen across
            shape = (count, new, HEADS * (groups + 2), dim)
            qkv = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)
            q, k, v = qkv.split([HEADS * groups, HEADS, HEADS], dim=1)
            for slot in slots:
                cache.data[:, :, slot, :, cache.lengths[slot] + behind + new :] = GARBAGE
            out = Reading(rows, mask, groups).attend(0, q, k, v)
            assert out.dtype is dtype
            for b, slot in enumerate(slots):
                start = cache.lengths[slot] + behind
                assert torch.equal(cache.data[0, 0, slot, :, start : start + new], k[b])
                assert torch.equal(cache.data[1, 0, slot, :, start : start + new], v[b])
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2
            want = reference(rows, mask, q, groups)
            torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
        assert [cache.lengths[slot] for slot in slots] == lengths

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_row_is_what_it_is_alone_and_a_token_what_it_is_in_a_block(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled: to the last bit. In torch: within rounding, since the matrices' shapes differ."""
    use(path, monkeypatch)
    generator = torch.Generator().manual_seed(3)
    cache = KVCache(1, 3, 300, HEADS, 64)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    cache.lengths[:] = [250, 7, 100]
    q = torch.randn(3, 2 * HEADS, 5, 64, generator=generator)
    k, v = torch.randn(2, 3, HEADS, 5, 64, generator=generator)
    together = Reading(cache.rows([0, 1, 2], 5), None, 2).attend(0, q, k, v)

    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b) if path == "compiled" else torch.allclose(a, b, atol=1e-6)

    for b in range(3):
        alone = Reading(cache.rows([b], 5), None, 2).attend(0, *(x[b : b + 1] for x in (q, k, v)))
        assert same(alone, together[b : b + 1])
        one_by_one = []
        for t in range(5):
            rows = cache.rows([b], 1, behind=t)
            parts = (x[b : b + 1, :, t : t + 1] for x in (q, k, v))
            one_by_one.append(Reading(rows, None, 2).attend(0, *parts))
        assert same(torch.cat(one_by_one, dim=2), together[b : b + 1])


@pytest.mark.parametrize("window", [1, 4, 9, 50])
def test_a_window(window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    cache = KVCache(1, 2, 40, HEADS, 16)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    cache.lengths[:] = [20, 5]
    q = torch.randn(2, 2 * HEADS, 3, 16, generator=generator)
    k, v = torch.randn(2, 2, HEADS, 3, 16, generator=generator)
    rows = cache.rows([0, 1], 3)
    positions = torch.tensor([[20, 21, 22], [5, 6, 7]])
    out = Reading(rows, None, 2, positions, window).attend(0, q, k, v)
    want = reference(rows, None, q, 2, window)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_extreme_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of +-1e4 neither overflow nor vanish: the softmax subtracts the largest."""
    use("compiled", monkeypatch)
    cache = KVCache(1, 1, 64, 1, 16)
    cache.data.zero_()
    cache.lengths[0] = 33
    cache.data[0, 0, 0, 0, :33, 0] = torch.linspace(-1e4, 1e4, 33)
    cache.data[1, 0, 0, 0, :33, 1] = torch.arange(33.0)
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 4.0
    zeros = torch.zeros(1, 1, 1, 16)
    out = Reading(cache.rows([0], 1), None, 1).attend(0, q, zeros, zeros)
    assert out[0, 0, 0, 1] == 32.0  # all the weight on the largest
    q[..., 0] = -4.0
    out = Reading(cache.rows([0], 1), None, 1).attend(0, q, zeros, zeros)
    assert out[0, 0, 0, 1] == 0.0


def test_what_the_compiled_attention_does_not_do() -> None:
    assert not can_attend(torch.float16, CPU, 64)
    assert not can_attend(torch.float32, CPU, 24)
    assert not can_attend(torch.float32, CPU, 144)
    assert not can_attend(torch.float32, torch.device("meta"), 64)
    assert can_attend(torch.float32, CPU, 64) == (library() is not None)
