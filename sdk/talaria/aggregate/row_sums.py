"""Sums over rows of tensors, in float64: the inner loops of the mean under masks, in numpy.

:mod:`talaria.aggregate.compiled` has the same four functions compiled; both take the same steps in the same order,
so that their results have the same bits and an installation's extras change none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from talaria.aggregate.validation import is_finite
from talaria.tensors import Array

_BLOCK = 1 << 15
"""Values worked on at once: float64 copies of so many stay in the cache."""


class RowSums(Protocol):
    """Four functions, in numpy or compiled."""

    def add(self, total: Array, values: Array, weight: float) -> None:
        """``total += weight * values``, in place: float64 (n,) and any floats (n,), contiguous."""
        ...

    def add_grid(self, total: Array, first: Array, second: Array, values: Array, weight: float) -> None:
        """``total[outer product of first and second] += weight * values``, in place: float64 (a, b, width), int64 (n,)
        and (m,) without repetition, and any floats (n, m, width), contiguous."""
        ...

    def weigh(self, lines: Array, kept: Array, out: Array) -> None:
        """The matrix product of ``lines`` and ``kept``, its terms added in their order: float64 (rows, n) of at least 0
        and float32 (n, columns) of zeros and ones; ``out`` is float64 (rows, columns). All are contiguous."""
        ...

    def mean_rows(self, total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> bool:
        """``out = total / weight`` (added to ``old`` where ``delta``), and ``old`` itself in rows that stay: float64
        (rows, width), float64 (rows,), any floats (rows, width), bool (rows,), and ``out`` like ``old``. All are
        contiguous; ``total`` is lost. True where ``out`` and the sums of rows that stay are finite: those of other
        rows show in ``out``."""
        ...


class Plain:
    """The loops in numpy, block by block in the cache; see :class:`RowSums`."""

    def add(self, total: Array, values: Array, weight: float) -> None:
        scratch = np.empty(min(len(total), _BLOCK))
        if len(total) <= _BLOCK:
            total += weighted(values, weight, scratch)
            return
        for part in blocks(len(total), _BLOCK):
            here = total[part]
            here += weighted(values[part], weight, scratch[: len(here)])

    def add_grid(self, total: Array, first: Array, second: Array, values: Array, weight: float) -> None:
        width = total.shape[2]
        if not values.size:
            return
        # A row moves as one item: numpy copies such an item at once, and rows of numbers one number at a time.
        item = np.dtype((np.void, 8 * width)) if width > 1 else np.dtype(np.float64)
        into, rows = total.reshape(-1).view(item), values.reshape(-1, width)
        index = (first[:, None] * total.shape[1] + second).reshape(-1)
        step = max(1, _BLOCK // width)
        scratch, found = np.empty(min(len(index), step) * width), np.empty(min(len(index), step), item)
        for part in blocks(len(index), step):
            where = index[part]
            here = into.take(where, 0, found[: len(where)], "clip")  # other modes copy what they give
            sums = here.view(np.float64)
            sums += weighted(rows[part].reshape(-1), weight, scratch[: len(sums)])
            into[where] = here  # no row comes twice, so that this is an addition in place

    def weigh(self, lines: Array, kept: Array, out: Array) -> None:
        if (lines == np.rint(lines)).all() and lines.max(0, initial=0.0).sum() < 2.0**53:
            np.matmul(lines, kept, out=out)  # whole numbers: exact in any order
            return
        out.fill(0.0)
        for line, columns in zip(lines.T, kept, strict=True):
            out += line[:, None] * columns

    def mean_rows(self, total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> bool:
        finite = True
        for part in blocks(len(total), max(1, _BLOCK // max(1, total.shape[1]))):
            mean, new, idle = total[part], out[part], stays[part]
            some = idle.any()
            finite = finite and (not some or is_finite(mean[idle]))
            mean /= weight[part, None]
            if delta:
                mean += old[part]
            new[...] = mean
            if some:
                new[idle] = old[part][idle]
        return finite and is_finite(out)


def weighted(values: Array, weight: float, scratch: Array) -> Array:
    """``weight * values`` in ``scratch``, float64 and as long: converted first, which is faster than in one step."""
    scratch[...] = values
    scratch *= weight
    return scratch


def blocks(size: int, block: int) -> Iterator[slice]:
    """``size`` things in slices of ``block``."""
    return (slice(start, start + block) for start in range(0, size, block))
