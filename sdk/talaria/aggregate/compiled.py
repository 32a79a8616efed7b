"""The loops of :mod:`talaria.aggregate.row_sums` compiled by numba (``talaria[fast]``): same steps, same bits.

No sum is reordered and no product joined with a sum (numba does either only where ``fastmath`` is asked for). Other
types than float32 and float64 go the way of numpy. The interpreter is left free meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from talaria.aggregate.row_sums import Plain
from talaria.tensors import Array

numba: Any = import_module("numba")  # untyped here, so that types are checked alike where it is not installed
ir: Any = import_module("llvmlite.ir")
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

    def weigh(self, lines: Array, kept: Array, out: Array) -> None:
        _loops()["weigh"](out, lines, kept)

    def mean_rows(self, total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> bool:
        if old.dtype not in _KNOWN:
            return super().mean_rows(total, weight, old, stays, delta, out)
        return bool(_loops()["mean_rows"](total, weight, old, stays, delta, out))


def _add(total: Array, values: Array, weight: float) -> None:
    for n in range(total.size):
        total[n] += weight * np.float64(values[n])


def _several(count: int) -> Any:
    """``total[at + t] += weight * values[of + t]`` for ``count`` neighbours at once, in numba code: float64, float32 or
    float64. The compiler does not, since for all that it knows the two overlap."""

    def add(_: object, total: Any, at: Any, values: Any, of: Any, weight: Any) -> tuple[Any, Any]:
        here, narrow = ir.VectorType(ir.DoubleType(), count), values.dtype == numba.float32
        sent, size = (ir.VectorType(ir.FloatType(), count), 4) if narrow else (here, 8)

        def build(context: Any, builder: Any, signature: Any, given: Sequence[Any]) -> Any:
            into, source = (context.make_array(signature.args[n])(context, builder, given[n]).data for n in (0, 2))
            into = builder.bitcast(builder.gep(into, [given[1]]), here.as_pointer())
            source = builder.bitcast(builder.gep(source, [given[3]]), sent.as_pointer())
            value = builder.load(source, align=size)
            weights = ir.Constant(here, ir.Undefined)
            for n in range(count):
                weights = builder.insert_element(weights, given[4], ir.Constant(ir.IntType(32), n))
            product = builder.fmul(weights, builder.fpext(value, here) if narrow else value)
            builder.store(builder.fadd(builder.load(into, align=8), product), into, align=8)
            return context.get_dummy_value()

        return numba.void(total, numba.uint64, values, numba.uint64, numba.float64), build

    return numba.extending.intrinsic(add)


_eight, _four, _two = _several(8), _several(4), _several(2)


def _add_grid(total: Array, first: Array, second: Array, values: Array, weight: float) -> None:
    count = second.size
    if count == 0:
        return
    # Places have no sign, so that none is asked whether it counts from the end.
    into, sent, width = total.reshape(-1), values.reshape(-1), np.uint64(values.shape[2])
    line = np.uint64(total.shape[1]) * width
    if second[-1] - second[0] == count - 1:  # neighbours, as under nested masks: a row is one run of values
        for n in range(first.size):
            run, part = into[np.uint64(first[n]) * line + np.uint64(second[0]) * width :], sent[n * count * width :]
            for t in range(count * width):
                run[t] += weight * np.float64(part[t])
        return
    for n in range(first.size):
        row, of = np.uint64(first[n]) * line, np.uint64(n * count) * width
        if width == 1:  # a linear layer's rows
            for m in range(count):
                into[row + np.uint64(second[m])] += weight * np.float64(sent[of + np.uint64(m)])
            continue
        for m in range(count):
            to, end = row + np.uint64(second[m]) * width, of + width
            while of + np.uint64(8) <= end:
                _eight(into, to, sent, of, weight)
                to += np.uint64(8)
                of += np.uint64(8)
            if width & np.uint64(4):
                _four(into, to, sent, of, weight)
                to += np.uint64(4)
                of += np.uint64(4)
            if width & np.uint64(2):
                _two(into, to, sent, of, weight)
                to += np.uint64(2)
                of += np.uint64(2)
            if width & np.uint64(1):
                into[to] += weight * np.float64(sent[of])
                of += np.uint64(1)


def _weigh(total: Array, lines: Array, kept: Array) -> None:
    for row in range(total.shape[0]):
        into = total[row]
        into[:] = 0.0
        for n in range(lines.shape[1]):
            weight, columns = lines[row, n], kept[n]
            if weight != 0.0:
                for column in range(into.size):
                    into[column] += weight * np.float64(columns[column])


def _mean_rows(total: Array, weight: Array, old: Array, stays: Array, delta: bool, out: Array) -> bool:
    sums, before, new, lost = total.reshape(-1), old.reshape(-1), out.reshape(-1), False
    if total.shape[1] == 1:  # a linear layer: chosen after the division, several values are divided at once
        for n in range(weight.size):
            mean = sums[n] / weight[n] + (np.float64(before[n]) if delta else -0.0)
            new[n] = np.float64(before[n]) if stays[n] else mean
            lost |= stays[n] and not np.isfinite(sums[n])
    else:
        for n in range(weight.size):
            if stays[n]:
                for t in range(total.shape[1]):
                    out[n, t] = old[n, t]
                    lost |= not np.isfinite(total[n, t])
            elif delta:
                for t in range(total.shape[1]):
                    out[n, t] = total[n, t] / weight[n] + np.float64(old[n, t])
            else:
                for t in range(total.shape[1]):
                    out[n, t] = total[n, t] / weight[n]
    for n in range(new.size):
        lost |= not np.isfinite(new[n])
    return not lost


@cache
def _loops() -> dict[str, Callable[..., Any]]:
    """The four functions for float32 and float64 values that may be read-only."""

    def read(dtype: Any, dims: int) -> Any:
        return numba.types.Array(dtype, dims, "C", readonly=True)

    wide, index, number = numba.float64, numba.int64, numba.float64
    signatures = {
        "add": lambda f: numba.void(wide[::1], read(f, 1), number),
        "add_grid": lambda f: numba.void(wide[:, :, ::1], read(index, 1), read(index, 1), read(f, 3), number),
        "weigh": lambda f: numba.void(wide[:, ::1], read(wide, 2), read(numba.float32, 2)),
        "mean_rows": lambda f: numba.boolean(
            wide[:, ::1], read(wide, 1), read(f, 2), read(numba.boolean, 1), numba.boolean, f[:, ::1]
        ),
    }
    sources: dict[str, Callable[..., Any]] = {
        "add": _add,
        "add_grid": _add_grid,
        "weigh": _weigh,
        "mean_rows": _mean_rows,
    }
    types = {"weigh": (wide,)}
    both = (numba.float32, numba.float64)
    return {k: _compiled([signatures[k](f) for f in types.get(k, both)], source) for k, source in sources.items()}


def _compiled(signatures: list[Any], source: Callable[..., Any]) -> Callable[..., Any]:
    options = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., Any] = numba.njit(signatures, cache=True, **options)(source)
    except RuntimeError:  # no folder to keep compiled code in: it is compiled once a process
        made = numba.njit(signatures, **options)(source)
    return made
