"""Drawing from many known distributions at once, without a loop over tokens."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

USED_UP = 1e-12  # mass of a draft below which no sibling is left to draw


class Sampler:
    """Draws from the rows of a table of distributions: by alias, or by inversion."""

    def __init__(self, probs: Floats) -> None:
        """probs: [R, V]."""
        self.probs = probs
        self.width = int(probs.shape[1])

    def draw(self, rows: Ints, uniforms: Floats) -> Ints:
        """One token [B] of each named row [B], at uniforms [B] in [0, 1). For many draws."""
        share, alias = self.cells
        place = uniforms * self.width
        cell = place.astype(np.int64)
        entry = rows * self.width + cell
        tokens: Ints = np.where(place - cell < share[entry], cell, alias[entry])
        return tokens

    def invert(self, rows: Ints, uniforms: Floats) -> Ints:
        """As `draw`, without its tables: by one binary search."""
        found = self.sums.searchsorted(rows + uniforms, side="right") - rows * self.width
        tokens: Ints = np.minimum(found, self.last[rows])  # the sum may round up to the next row
        return tokens

    def draw_others(self, rows: Ints, without: Ints, uniforms: Floats) -> Ints:
        """One token [B] of each row but none of `without` [B, k], distinct tokens of that row.

        By inversion: a threshold in the mass that is left, raised over the gaps below it.
        """
        entries = np.sort(without, axis=1) + (rows * self.width)[:, None]
        masses = self.probs.ravel()[entries]
        threshold = uniforms * (1 - masses.sum(axis=1))
        for entry, mass in zip(entries.T, masses.T, strict=True):
            threshold += np.where(threshold >= self.sums[entry] - rows - mass, mass, 0.0)
        tokens = self.invert(rows, threshold)
        astray = (tokens[:, None] == without).any(axis=1)  # at the edge of a gap, by rounding
        if astray.any():
            others = self.probs[rows[astray]]
            np.put_along_axis(others, without[astray], 0.0, axis=1)
            tokens[astray] = draw_rows(others, uniforms[astray])
        return tokens

    @cached_property
    def cells(self) -> tuple[Floats, Ints]:
        """Walker's alias tables (1977), [R * V] each.

        A row of V probabilities becomes V cells of equal mass, each shared by at most two tokens:
        its own, up to `share`, and `alias`.
        """
        at = np.arange(len(self.probs))
        left = self.probs * (self.width / self.probs.sum(axis=1, keepdims=True))
        share, alias = np.ones_like(left), np.zeros(left.shape, np.int64)
        for _ in range(self.width):  # the emptiest cell is filled up from the fullest
            low, high = left.argmin(axis=1), left.argmax(axis=1)
            missing = 1 - left[at, low]
            if (missing <= 0).all():
                break
            fill = (missing > 0).nonzero()[0]
            share[fill, low[fill]] = left[fill, low[fill]]
            alias[fill, low[fill]] = high[fill]
            left[fill, high[fill]] -= missing[fill]
            left[fill, low[fill]] = 1.0
        return share.ravel(), alias.ravel()

    @cached_property
    def sums(self) -> Floats:
        """[R * V] cumulative sums, those of row r raised by r: one ascending list."""
        sums: Floats = self.probs.cumsum(axis=1)
        sums = sums / sums[:, -1:] + np.arange(len(sums))[:, None]
        return sums.reshape(-1)

    @cached_property
    def last(self) -> Ints:
        """[R] the last token that is possible at all."""
        found: Ints = self.width - 1 - (self.probs[:, ::-1] > 0).argmax(axis=1)
        return found


class Residuals:
    """norm((p - a q)+) for pairs of distributions and any number a >= 0, one a a draw.

    Every residual is of this form: a = 1 in the token rule; (w p - q)+ is w (p - q / w)+ in block
    verification; and among siblings each rejection raises a (docs/theory.md). A token is in it
    while p / q > a. So with tokens in descending order of p / q it is a prefix of k tokens, and its
    mass is P_k - a Q_k with cumulative sums P and Q: nothing here takes time of order V.
    """

    def __init__(self, target: Floats, draft: Floats) -> None:
        """target, draft: [R, V] each."""
        self.count, self.width = target.shape
        # q / (p + q) rises where p / q falls, and stays in 0..1
        both = target + draft
        rank = np.where(target > 0, draft / np.where(both > 0, both, 1.0), 1.0)
        order = rank.argsort(axis=1)
        self.order = order.ravel()
        offsets = np.arange(self.count)[:, None]
        self.rank = (np.take_along_axis(rank, order, axis=1) + offsets).ravel()
        zero = np.zeros((self.count, 1))
        target, draft = (np.take_along_axis(x, order, axis=1) for x in (target, draft))
        self.target = np.concatenate([zero, target.cumsum(axis=1)], axis=1).ravel()
        self.draft = np.concatenate([zero, draft.cumsum(axis=1)], axis=1).ravel()

    def mass(self, rows: Ints, a: Floats) -> tuple[Floats, Ints]:
        """sum (p - a q)+ [B] of rows [B] at a [B], and the number k [B] of tokens in it."""
        found = self.rank.searchsorted(rows + 1 / (1 + a), side="left")
        inside = found - rows * self.width
        entry = rows * (self.width + 1) + inside
        return np.maximum(self.target[entry] - a * self.draft[entry], 0.0), inside

    def draw(self, rows: Ints, a: Floats, uniforms: Floats) -> Ints:
        """One token [B] of norm((p - a q)+); of p where nothing is left, as `residual` has it."""
        mass, inside = self.mass(rows, a)
        empty = mass == 0
        if empty.any():
            rest, a = rows[empty], np.where(empty, 0.0, a)
            mass[empty], inside[empty] = self.mass(rest, a[empty])
        threshold = uniforms * mass
        first = rows * (self.width + 1) + 1
        low, high = np.zeros_like(inside), np.maximum(inside - 1, 0)
        for _ in range(
            int(inside.max(initial=1)).bit_length()
        ):  # the first prefix whose mass exceeds it
            middle = (low + high) >> 1
            entry = first + middle
            beyond = self.target[entry] - a * self.draft[entry] > threshold
            high = np.where(beyond, middle, high)
            low = np.where(beyond, low, np.minimum(middle + 1, high))
        tokens: Ints = self.order[rows * self.width + low]
        return tokens


def draw_rows(probs: Floats, uniforms: Floats) -> Ints:
    """One token [B] from every row of probs [B, V], at uniforms [B]; no row is used twice."""
    sums = probs.cumsum(axis=1)
    below = np.nextafter(sums[:, -1], 0.0)
    threshold = np.minimum(uniforms * sums[:, -1], below)
    tokens: Ints = (sums > threshold[:, None]).argmax(axis=1)
    return tokens


def residual(target: Floats, draft: Floats) -> Floats:
    """norm((target - draft)+) over the last axis: what a rejected token is replaced from.

    Where no mass is left the two agree, nothing is rejected, and the target itself is returned.
    """
    spare = np.maximum(target - draft, 0.0)
    mass = spare.sum(axis=-1, keepdims=True)
    return np.where(mass > 0, spare / np.where(mass > 0, mass, 1.0), target)
