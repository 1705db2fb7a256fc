"""The cache against plain Python lists and literal masks.

Every cached entry is a number that says which token it is, in which layer and head; the model of
a slot is the list of the tokens it should hold.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculant.cache import CacheRows, KVCache

LAYERS, HEADS, DIM = 2, 3, 4


def new_cache(rows: int = 4, capacity: int = 16) -> KVCache:
    cache = KVCache(LAYERS, rows, capacity, HEADS, DIM)
    cache.data.fill_(float("nan"))  # garbage that would show
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unwritten_columns_are_finite(dtype: torch.dtype) -> None:
    """A view shows a shorter row's unwritten columns, and a mask does not protect from NaN."""
    for _ in range(20):
        used = [torch.full((2, LAYERS, 4, HEADS, 16, DIM), float("nan")) for _ in range(8)]
        del used  # dirty memory for the next allocation to reuse
        cache = KVCache(LAYERS, 4, 16, HEADS, DIM, dtype=dtype)
        assert cache.data.dtype == dtype
        assert bool(cache.data.isfinite().all())


def entries(tokens: list[list[int]], layer: int) -> Tensor:
    """Keys [B, Hkv, T, D] of tokens [B, T]: every number differs by token, layer, head, dim."""
    ids = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None]
    heads = torch.arange(HEADS)[None, :, None, None] / 10
    return ids + 1000 * layer + heads + torch.arange(DIM) / 100


def write(rows: CacheRows, tokens: list[list[int]]) -> None:
    for layer in range(LAYERS):
        keys = entries(tokens, layer)
        rows.write(layer, keys, -keys)


def held(cache: KVCache, slot: int) -> list[int]:
    """The tokens a slot holds, read back through `read`; checks keys, values, layers and heads."""
    count = cache.lengths[slot]
    tokens: list[int] = []
    for layer in range(LAYERS):
        keys, values = cache.rows([slot], 0).read(layer, 0, 1)
        assert keys.shape == (1, HEADS, count, DIM)
        tokens = keys[0, 0, :, 0].round().sub(1000 * layer).int().tolist()
        assert torch.equal(keys, entries([tokens], layer))
        assert torch.equal(values, -keys)
    return tokens


def test_sizes() -> None:
    cache = KVCache(2, 3, 5, 1, 8, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 2 * 3 * 5 * 1 * 8 * 2
    assert cache.lengths == [0, 0, 0]
    assert [part.shape for part in cache.layer(1)] == [(3, 1, 5, 8)] * 2


def test_runs_are_stretches_of_neighbours() -> None:
    cache = new_cache(rows=8)
    for slots, runs in (
        ([0, 1, 2, 5], [(0, 3), (3, 4)]),
        ([3], [(0, 1)]),
        ([2, 1, 0], [(0, 1), (1, 2), (2, 3)]),
        ([6, 7, 0, 1], [(0, 2), (2, 4)]),
    ):
        assert cache.rows(slots, 1).runs() == runs


def test_read_is_a_view_of_the_cache() -> None:
    cache = new_cache()
    cache.lengths[:] = [3, 1, 2, 0]
    rows = cache.rows([1, 2], 2)
    before = cache.data.data_ptr()
    write(rows, [[1, 2], [3, 4]])
    keys, values = rows.read(1, 0, 2)
    assert keys.shape == (2, HEADS, 4, DIM)  # the longer row's 2 tokens, and 2 new ones
    assert keys.data_ptr() == cache.data[0, 1, 1].data_ptr()
    assert values.data_ptr() == cache.data[1, 1, 1].data_ptr()
    assert cache.data.data_ptr() == before
    keys[0, 0, 0, 0] = 77.0
    assert cache.data[0, 1, 1, 0, 0, 0] == 77


@pytest.mark.parametrize("slots", [[2], [0, 1, 2], [3, 0, 2]])
def test_write_touches_only_the_new_columns(slots: list[int]) -> None:
    cache = new_cache()
    cache.lengths[:] = [3, 1, 7, 0]
    rows = cache.rows(slots, 2)
    cache.data.fill_(-1.0)
    write(rows, [[10 * slot, 10 * slot + 1] for slot in slots])
    for slot in range(4):
        start = cache.lengths[slot]
        new = {start, start + 1} if slot in slots else set()
        for column in range(16):
            cell = cache.data[:, :, slot, :, column]
            if column in new:
                token = 10 * slot + column - start
                expected = torch.cat([entries([[token]], layer) for layer in range(LAYERS)])
                assert torch.equal(cell[0], expected[:, :, 0])
                assert torch.equal(cell[1], -expected[:, :, 0])
            else:
                assert bool((cell == -1).all())
    assert cache.lengths == [3, 1, 7, 0]  # writing commits nothing


def matrix(*rows: str) -> list[list[bool]]:
    return [[cell == "1" for cell in row.split()] for row in rows]


def test_visible_causal() -> None:
    cache = new_cache()
    cache.lengths[:] = [3, 1, 0, 4]
    seen = cache.rows([0, 1, 2], 2).visible(0, 3, None)
    assert seen.tolist() == [
        matrix("1 1 1 1 0", "1 1 1 1 1"),
        matrix("1 1 0 0 0", "1 1 1 0 0"),
        matrix("1 0 0 0 0", "1 1 0 0 0"),
    ]
    rows = cache.rows([0, 1, 3], 2)
    assert rows.visible(2, 3, None).tolist() == [matrix("1 1 1 1 1 0", "1 1 1 1 1 1")]
    assert rows.visible(0, 2, None).shape == (2, 2, rows.span(0, 2)) == (2, 2, 5)


def test_visible_with_a_tree() -> None:
    cache = new_cache()
    cache.lengths[:] = [2, 0, 1, 0]
    tree = torch.tensor(
        [
            matrix("1 0 0", "1 1 0", "1 0 1"),
            matrix("1 0 0", "1 1 0", "1 1 1"),
            matrix("1 0 0", "0 1 0", "0 0 1"),
        ]
    )
    rows = cache.rows([0, 1, 2], 3)
    assert rows.visible(0, 3, tree).tolist() == [
        matrix("1 1 1 0 0", "1 1 1 1 0", "1 1 1 0 1"),
        matrix("1 0 0 0 0", "1 1 0 0 0", "1 1 1 0 0"),
        matrix("1 1 0 0 0", "1 0 1 0 0", "1 0 0 1 0"),
    ]
    assert rows.visible(2, 3, tree).tolist() == [matrix("1 1 0 0", "1 0 1 0", "1 0 0 1")]
    assert rows.select(1, 2).visible(0, 1, tree[1:2]).tolist() == [
        matrix("1 0 0", "1 1 0", "1 1 1")
    ]


def test_visible_behind_the_lengths() -> None:
    """Two uncommitted entries lie behind every length, and the new tokens behind those."""
    cache = new_cache()
    cache.lengths[:] = [2, 0, 1, 0]
    mask = torch.tensor(
        [
            matrix("1 0 1 0", "0 1 0 1"),  # each sees the entry above it and itself
            matrix("1 1 1 0", "1 1 1 1"),
            matrix("0 0 1 0", "0 1 0 1"),
        ]
    )
    rows = cache.rows([0, 1, 2], 2, behind=2)
    assert rows.span(0, 3) == 6
    assert rows.visible(0, 3, mask).tolist() == [
        matrix("1 1 1 0 1 0", "1 1 0 1 0 1"),
        matrix("1 1 1 0 0 0", "1 1 1 1 0 0"),
        matrix("1 0 0 1 0 0", "1 0 1 0 1 0"),
    ]
    assert rows.visible(1, 3, None).tolist() == [
        matrix("1 1 1 0 0", "1 1 1 1 0"),
        matrix("1 1 1 1 0", "1 1 1 1 1"),
    ]
    assert rows.select(2, 3).visible(0, 1, mask[2:]).tolist() == [matrix("1 0 0 1 0", "1 0 1 0 1")]


@pytest.mark.parametrize("slots", [[2], [0, 2, 3]])
def test_write_behind_the_lengths(slots: list[int]) -> None:
    """A round's forwards write one behind the other; the lengths and the rest stay."""
    cache = new_cache()
    cache.lengths[:] = [3, 1, 7, 0]
    cache.data.fill_(-1.0)
    for step in range(3):
        tokens = [[10 * slot + 2 * step, 10 * slot + 2 * step + 1] for slot in slots]
        write(cache.rows(slots, 2, behind=2 * step), tokens)
    for slot in range(4):
        start = cache.lengths[slot]
        for column in range(16):
            cell = cache.data[0, 1, slot, :, column]
            written = slot in slots and start <= column < start + 6
            want = entries([[10 * slot + column - start]], 1)[0, :, 0] if written else -1.0
            assert bool((cell == want).all())
    assert cache.lengths == [3, 1, 7, 0]


def test_erase_zeroes_what_lies_behind() -> None:
    cache = new_cache()
    write(cache.rows([0, 1], 5), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    for slot in (0, 1):
        cache.advance(slot, 5)
    before = cache.data[:, :, 1].clone()
    cache.erase(0, 2)
    assert held(cache, 0) == [1, 2]
    assert bool((cache.data[:, :, 0, :, 2:] == 0).all())
    assert torch.equal(cache.data[:, :, 1].nan_to_num(), before.nan_to_num())
    with pytest.raises(ValueError, match="cannot truncate row 0 of 2 to 3"):
        cache.erase(0, 3)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_interleaving_against_lists(data: st.DataObject) -> None:
    """Rounds on any slots, kept paths of any shape, roll-backs: every slot holds its list."""
    slots_count, capacity = 3, 12
    cache = new_cache(slots_count, capacity)
    model: list[list[int]] = [[] for _ in range(slots_count)]
    address, fresh = cache.data.data_ptr(), 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            slot = data.draw(st.integers(0, slots_count - 1))
            length = data.draw(st.integers(0, len(model[slot])))
            cache.truncate(slot, length)
            model[slot] = model[slot][:length]
            continue
        slots = data.draw(st.permutations(range(slots_count)))
        slots = slots[: data.draw(st.integers(1, slots_count))]
        room = capacity - max(len(model[slot]) for slot in slots)
        if room == 0:
            continue
        new = data.draw(st.integers(1, min(5, room)))
        tokens = [[fresh + new * b + i for i in range(new)] for b in range(len(slots))]
        fresh += new * len(slots)
        write(cache.rows(slots, new), tokens)
        for slot, mine in zip(slots, tokens, strict=True):
            offsets = sorted(data.draw(st.sets(st.integers(0, new - 1))))
            if data.draw(st.booleans()):  # a prompt's chunk: the first so many
                cache.advance(slot, len(offsets))
                model[slot] += mine[: len(offsets)]
            else:
                cache.keep(slot, offsets)
                model[slot] += [mine[offset] for offset in offsets]
        assert cache.lengths == [len(row) for row in model]
    assert [held(cache, slot) for slot in range(slots_count)] == model
    assert cache.data.data_ptr() == address


@pytest.mark.parametrize("offsets", [[], [0], [0, 1, 2], [0, 2, 4], [1, 3], [4]])
def test_keep_moves_nothing_but_the_kept_path(offsets: list[int]) -> None:
    """The prefix, other slots and what is in place already stay untouched."""
    cache = new_cache()
    write(cache.rows([0, 1, 2, 3], 6), [list(range(10 * r, 10 * r + 6)) for r in range(4)])
    for slot in range(4):
        cache.advance(slot, 6)
    write(cache.rows([1], 5), [[90, 91, 92, 93, 94]])
    before = cache.data.clone()
    cache.keep(1, offsets)
    moved = [6 + i for i, offset in enumerate(offsets) if offset != i]
    changed = [
        (slot, column)
        for slot in range(4)
        for column in range(11)
        if not torch.equal(cache.data[:, :, slot, :, column], before[:, :, slot, :, column])
        and not bool(before[:, :, slot, :, column].isnan().all())
    ]
    assert changed == [(1, column) for column in moved]
    assert held(cache, 1) == [10, 11, 12, 13, 14, 15, *(90 + offset for offset in offsets)]


def test_rolled_back_entries_are_overwritten() -> None:
    cache = new_cache()
    write(cache.rows([0], 4), [[1, 2, 3, 4]])
    cache.advance(0, 4)
    cache.truncate(0, 1)
    write(cache.rows([0], 2), [[8, 9]])
    cache.keep(0, [0])
    assert held(cache, 0) == [1, 8]
    assert cache.rows([0], 1).visible(0, 1, None).tolist() == [matrix("1 1 1")]


def test_refusals() -> None:
    cache = new_cache(rows=2, capacity=4)
    cache.lengths[:] = [3, 0]
    assert cache.rows([0, 1], 1).starts == (3, 0)
    with pytest.raises(ValueError, match=r"holds 4 .*3 \+ 2 do not fit"):
        cache.rows([0, 1], 2)
    with pytest.raises(ValueError, match=r"3 \+ 2 do not fit"):
        cache.rows([0], 1, behind=1)
    with pytest.raises(ValueError, match="each once"):
        cache.rows([1, 1], 1)
    for count in (-1, 2):
        with pytest.raises(ValueError, match="cannot advance row 0 of length 3"):
            cache.advance(0, count)
    for length in (-1, 4):
        with pytest.raises(ValueError, match="cannot truncate row 0 of 3"):
            cache.truncate(0, length)
    assert cache.lengths == [3, 0]
