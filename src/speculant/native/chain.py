"""A greedy chain, or a dynamic tree, of a one-layer draft head in one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .layers import INT, POINTER, Layers, Matrix, Model, Pass, address, matrix
from .library import library
from .linear import PackedLinear

Priced = tuple[float, tuple[float, ...], float]
"""The numbers of `prices.Prices`, in order."""


class Call(ctypes.Structure):
    """The arguments of `speculant_chain`; calls.h has the same struct."""

    _fields_ = (
        ("model", ctypes.POINTER(Model)),
        ("work", ctypes.POINTER(Pass)),
        ("norm", POINTER),
        *((name, Matrix) for name in ("fc", "head")),
        *((name, POINTER) for name in ("embeddings", "cos", "sin", "depths")),
        *((name, INT) for name in ("steps", "tokens")),
        *((name, POINTER) for name in ("ids", "taps", "features")),
    )


class TreeCall(ctypes.Structure):
    """The arguments of `speculant_tree`; calls.h has the same struct."""

    _fields_ = (
        ("draft", ctypes.POINTER(Call)),
        *((name, INT) for name in ("branch", "count")),
        *((name, POINTER) for name in ("node_ms", "priced", "rates", "step_ms", "trust")),
        *((name, POINTER) for name in ("ids", "parents", "sizes", "hoped", "broken")),
    )


@dataclass(frozen=True)
class Tree:
    """A row's tree. ids, parents: of its nodes, draft ids and places among them or -1

    hoped: the sum of its nodes' confidences; broken: NaN may lie behind the row's length
    """

    ids: list[int]
    parents: list[int]
    hoped: float
    broken: bool


@dataclass(frozen=True)
class _Work:
    """A call, what it begins with [B, H], and what its pointers need kept."""

    call: Call
    hidden: Tensor
    kept: tuple[object, ...]


@dataclass(frozen=True)
class Pairs:
    """Pairs to run before the chain, one row's behind the other's: R of them, at least one a row.

    taps: [R, n * H] float32, the target's states; embedded: [R, H] float32; counts: of each row
    """

    taps: Tensor
    embedded: Tensor
    counts: Sequence[int]


class Chain:
    """What a chain needs of a head: its layer, norm, LM head and the draft vocabulary's embeddings.

    layer: one layer with a `beside_norm`; norm: [H], before the LM head; head: H -> N
    embeddings: [N, H] float32, of the tokens that it drafts; inv_freq: [D / 2], of RoPE
    fc: tapped states to features, where that is all that makes them
    """

    def __init__(
        self,
        layer: Layers,
        norm: Tensor,
        head: PackedLinear,
        embeddings: Tensor,
        inv_freq: Tensor,
        fc: PackedLinear | None = None,
    ) -> None:
        self.layer, self.norm, self.head, self.fc = layer, norm.contiguous(), head, fc
        self.embeddings, self.inv_freq = embeddings.contiguous(), inv_freq
        self._taps = (POINTER * 2)()  # of one layer, none
        self._matrices = (Matrix() if fc is None else matrix(fc), matrix(head))

    def __call__(
        self,
        first: Tensor | Pairs,
        depths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Tensor,
    ) -> tuple[list[list[int]], Tensor]:
        """Draft ids of every row, `depths` of them (at least one); and what predicts the first, [B, H].

        first: that, [B, H] float32, or the pairs whose last outputs it is
        slots, starts: of each row in `cache`, `KVCache.data`; pairs and what is drafted lie behind
        A row ends with -1 where a logit is NaN, or the largest is infinite.
        """
        work = self._prepared(first, depths, slots, starts, cache)
        ids = torch.empty(len(slots), max(depths), dtype=torch.int64)
        work.call.ids = ids.data_ptr()
        _loaded().speculant_chain(ctypes.byref(work.call))
        chains = [row[:depth] for row, depth in zip(ids.tolist(), depths, strict=True)]
        return chains, work.hidden

    def trees(
        self,
        first: Tensor | Pairs,
        depths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Tensor,
        branch: int,
        count: int,
        prices: Sequence[Priced | None],
        trust: Sequence[float],
    ) -> tuple[list[Tree], Tensor]:
        """A tree of at most `count` nodes and `depths` levels for every row; the rest as of a chain.

        branch: nodes expanded a level, and children of each
        prices: tokens a millisecond, milliseconds of 1, 2, ... nodes and of a pass, as in
                `prices.Prices`; trust: see `drafts.eagle_tree`
        """
        work, rows = self._prepared(first, depths, slots, starts, cache), len(slots)
        where = torch.empty(2, rows, count, dtype=torch.int64)
        sizes, hoped = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        broken = torch.empty(rows, dtype=torch.uint8)
        times = [None if p is None else _floats(p[1]) for p in prices]
        pointers = (POINTER * rows)()
        for b, mine in enumerate(times):
            pointers[b] = None if mine is None else ctypes.addressof(mine)
        lengths = torch.tensor([len(p[1]) if p else 0 for p in prices])
        numbers = [(p[0], p[2]) if p else (0.0, 0.0) for p in prices]
        rates, step_ms = zip(*numbers, strict=True)
        floats = torch.tensor([rates, step_ms, trust])  # shape: [3, B]
        call = TreeCall(
            ctypes.pointer(work.call),
            branch,
            count,
            ctypes.cast(pointers, POINTER),
            lengths.data_ptr(),
            *(row.data_ptr() for row in floats),
            where[0].data_ptr(),
            where[1].data_ptr(),
            sizes.data_ptr(),
            hoped.data_ptr(),
            broken.data_ptr(),
        )
        _loaded().speculant_tree(ctypes.byref(call))
        ids, above = where.tolist()
        parts = zip(ids, above, sizes.tolist(), hoped.tolist(), broken.tolist(), strict=True)
        return [Tree(i[:n], a[:n], h, bool(b)) for i, a, n, h, b in parts], work.hidden

    def _prepared(
        self,
        first: Tensor | Pairs,
        depths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Tensor,
    ) -> _Work:
        """The call, but for where its results go."""
        batch, steps = len(slots), max(depths)
        pairs = first if isinstance(first, Pairs) else None
        counts = [0] * batch if pairs is None else pairs.counts
        where = torch.tensor([slots, starts, depths, counts])  # shape: [4, B]
        turns = (torch.arange(steps - 1)[:, None] + (where[1] + where[3])).flatten()
        rows, widest = batch, 1
        firsts = features = None
        if pairs is not None:
            rows, widest = len(pairs.taps), max(counts)
            firsts = where[3].cumsum(0) - where[3]
            own = [place for s, n in zip(starts, counts, strict=True) for place in range(s, s + n)]
            turns = torch.cat([torch.tensor(own), turns])
            hidden, features = (
                torch.empty(batch, self.layer.hidden),
                torch.empty_like(pairs.embedded),
            )
        else:
            assert isinstance(first, Tensor)
            hidden = first.contiguous()
        angles = turns[:, None].float() * self.inv_freq  # shape: [R + (steps - 1) * B, D / 2]
        cos, sin = angles.cos(), angles.sin()
        done = 0 if pairs is None else rows * cos.stride(0) * cos.element_size()
        work = Pass(
            hidden=hidden.data_ptr(),
            beside=None if pairs is None else pairs.embedded.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=cache[0].data_ptr(),
            values=cache[1].data_ptr(),
            taps=ctypes.cast(self._taps, POINTER),
            slots=where[0].data_ptr(),
            starts=where[1].data_ptr(),
            firsts=address(firsts),
            counts=None if pairs is None else where[3].data_ptr(),
            rows=rows,
            batch=batch,
            tokens=widest,
            layer_stride=cache.stride(1),
            row_stride=cache.stride(2),
            head_stride=cache.stride(3),
            threads=torch.get_num_threads(),
        )
        call = Call(
            ctypes.pointer(self.layer.model),
            ctypes.pointer(work),
            self.norm.data_ptr(),
            *self._matrices,
            address(self.embeddings),
            cos.data_ptr() + done,
            sin.data_ptr() + done,
            where[2].data_ptr(),
            steps,
            len(self.embeddings),
            None,
            None if pairs is None else pairs.taps.data_ptr(),
            address(features),
        )
        return _Work(call, hidden, (where, firsts, features, cos, sin, pairs))


@lru_cache(maxsize=64)
def _floats(numbers: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None
    return loaded
