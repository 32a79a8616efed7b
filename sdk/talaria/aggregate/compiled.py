"""The loops of :mod:`talaria.aggregate.row_sums` compiled by numba (``talaria[fast]``): same steps, same bits.

No sum is reordered and no product joined with a sum (numba does either only where ``fastmath`` is asked for). Other
types than float32 and float64 go the way of numpy. The interpreter is left free meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from talaria.aggregate.row_sums import Plain
from talaria.tensors import Array

numba: Any = import_module("numba")  # untyped here, so that types are checked alike where it is not installed
_KNOWN = (np.dtype(np.float32), np.dtype(np.float64))


class Compiled(Plain):
    """The loops compiled; see :class:`~talaria.aggregate.row_sums.RowSums`."""

    def add(self, total: Array, values: Array, weight: float) -> None:
        if values.dtype in _KNOWN:
            _loops()["add"](total, np.ascontiguousarray(values), weight)
        else:
            super().add(total, values, weight)

    def add_grid(self, total: Array, first: Array, second: Array, values: Array, weight: float) -> None:
        if values.dtype in _KNOWN:
            _loops()["add_grid"](total, first, second, np.ascontiguousarray(values), weight)
        else:
            super().add_grid(total, first, second, values, weight)

    def weigh(self, lines: Array, kept: Array) -> Array:
        total = np.zeros((lines.shape[1], kept.shape[1]))
        _loops()["weigh"](total, np.ascontiguousarray(lines), np.ascontiguousarray(kept))
        return total

    def mean_rows(self, total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> None:
        if old.dtype not in _KNOWN:
            super().mean_rows(total, weight, old, stays, delta, out)
        else:
            _loops()["mean_rows"](total, weight, old, stays, delta, out)


def _add(total: Array, values: Array, weight: float) -> None:
    for n in range(total.size):
        total[n] += weight * np.float64(values[n])


def _add_grid(total: Array, first: Array, second: Array, values: Array, weight: float) -> None:
    count, width = second.size, values.shape[2]
    if count == 0:
        return
    into, sent, line = total.reshape(-1), values.reshape(-1), total.shape[1] * width
    if second[-1] - second[0] == count - 1:  # neighbours, as under nested masks: a row is one run of values
        for n in range(first.size):
            run, part = into[first[n] * line + second[0] * width :], sent[n * count * width :]
            for t in range(count * width):
                run[t] += weight * np.float64(part[t])
        return
    for n in range(first.size):
        # Flat arrays, and places without a sign: none is asked whether it counts from the end, and no view is made.
        row, begin = np.uint64(first[n] * line), np.uint64(n * count * width)
        if width == 1:  # a linear layer's rows: a loop around one value took twice the time
            for m in range(count):
                into[row + np.uint64(second[m])] += weight * np.float64(sent[begin + np.uint64(m)])
        else:
            for m in range(count):
                to, of = row + np.uint64(second[m] * width), begin + np.uint64(m * width)
                for t in range(width):
                    into[to + np.uint64(t)] += weight * np.float64(sent[of + np.uint64(t)])


def _weigh(total: Array, lines: Array, kept: Array) -> None:
    for row in range(total.shape[0]):
        into = total[row]
        for n in range(lines.shape[0]):
            weight, columns = lines[n, row], kept[n]
            if weight != 0.0:
                for column in range(into.size):
                    into[column] += weight * np.float64(columns[column])


def _mean_rows(total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> None:
    for n in range(total.shape[0]):
        if stays[n]:
            for t in range(total.shape[1]):
                out[n, t] = old[n, t]
        elif delta:
            for t in range(total.shape[1]):
                out[n, t] = total[n, t] / weight[n] + np.float64(old[n, t])
        else:
            for t in range(total.shape[1]):
                out[n, t] = total[n, t] / weight[n]


@cache
def _loops() -> dict[str, Callable[..., None]]:
    """The four functions for float32 and float64 values that may be read-only."""

    def read(dtype: Any, dims: int) -> Any:
        return numba.types.Array(dtype, dims, "C", readonly=True)

    wide, index, number = numba.float64, numba.int64, numba.float64
    signatures = {
        "add": lambda f: numba.void(wide[::1], read(f, 1), number),
        "add_grid": lambda f: numba.void(wide[:, :, ::1], read(index, 1), read(index, 1), read(f, 3), number),
        "weigh": lambda f: numba.void(wide[:, ::1], read(wide, 2), read(numba.float32, 2)),
        "mean_rows": lambda f: numba.void(
            wide[:, ::1], read(wide, 1), read(f, 2), read(numba.boolean, 1), numba.boolean, f[:, ::1]
        ),
    }
    sources: dict[str, Callable[..., None]] = {
        "add": _add,
        "add_grid": _add_grid,
        "weigh": _weigh,
        "mean_rows": _mean_rows,
    }
    types = {"weigh": (wide,)}
    both = (numba.float32, numba.float64)
    return {k: _compiled([signatures[k](f) for f in types.get(k, both)], source) for k, source in sources.items()}


def _compiled(signatures: list[Any], source: Callable[..., None]) -> Callable[..., None]:
    options = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., None] = numba.njit(signatures, cache=True, **options)(source)
    except RuntimeError:  # no folder to keep compiled code in: it is compiled once a process
        made = numba.njit(signatures, **options)(source)
    return made
