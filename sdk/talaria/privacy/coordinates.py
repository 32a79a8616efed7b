"""The coordinates of an update as rows: a row is what every mask keeps or drops as one.

A tensor's dimensions up to the last that a mask rules span its rows; what lies behind (a kernel's taps) is a row's
width. A tensor that no mask rules is one row. A compact update, flattened tensor after tensor, is its kept rows one
after another, in the order of all rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from talaria.aggregate.validation import is_reserved, is_statistic, trained
from talaria.errors import AggregationError
from talaria.model.masks import ChannelLayout, ChannelMask, compact_shape
from talaria.privacy import class_sums
from talaria.tensors import Array, Tensors
from talaria.wire.tensor_codecs import TensorSpec

Places = Array | tuple[slice, ...] | None
"""Where values stand among others, in order: at these indices (int64), in these runs, or everywhere."""
_LONG = 1024
"""Values of a run on average, from which on runs are faster than indices: 1 us a run against 1 ns a value."""


@dataclass(frozen=True)
class Coordinates:
    """The trained tensors of an unpruned model, by name and shape, and the channel groups that rule them."""

    shapes: Mapping[str, tuple[int, ...]]
    layout: ChannelLayout | None = field(default=None, repr=False)

    @staticmethod
    def of(shared: Tensors, layout: ChannelLayout | None) -> Coordinates:
        """Those of the floating-point tensors of ``shared`` that updates carry, and of class statistics as sums."""
        named = {name: tuple(shared[name].shape) for name in trained(shared)}
        return Coordinates(named | class_sums.shapes({n: tuple(v.shape) for n, v in shared.items()}), layout)

    @staticmethod
    def of_schema(schema: Mapping[str, TensorSpec], layout: ChannelLayout | None) -> Coordinates:
        """As :meth:`of`, of shapes and dtypes alone."""
        named = {name: one.shape for name, one in schema.items() if one.dtype.kind == "f" and not is_reserved(name)}
        return Coordinates(named | class_sums.shapes({n: one.shape for n, one in schema.items()}), layout)

    @cached_property
    def digest(self) -> bytes:
        """sha256 of names, shapes and groups: devices with equal ones mean the same coordinates."""
        groups = {} if self.layout is None else dict(sorted(self.layout.sizes.items()))
        axes = {} if self.layout is None else {n: self.layout.axes.get(n) for n in self.shapes}
        text = json.dumps([list(self.shapes.items()), groups, list(axes.items())], default=list)
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """By tensor: how many rows, and how wide."""
        out = {}
        for name, shape in self.shapes.items():
            axes = () if self.layout is None else self.layout.axes.get(name, ())
            last = max((d for d, axis in enumerate(axes) if axis), default=-1)
            out[name] = (prod(shape[: last + 1]), prod(shape[last + 1 :]))
        return out

    @cached_property
    def widths(self) -> Array:
        """int64 (rows,): how many values each row has."""
        return np.repeat([w for _, w in self._rows.values()], [n for n, _ in self._rows.values()]).astype(np.int64)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """By tensor: where its values stand among all."""
        ends = np.cumsum([n * w for n, w in self._rows.values()]).tolist()
        starts = [0, *ends[:-1]]
        return {name: slice(start, end) for name, start, end in zip(self._rows, starts, ends, strict=True)}

    def rows(self, mask: ChannelMask | None) -> Array:
        """bool (rows,): those that a device with ``mask`` keeps; all without one."""
        parts = []
        for name, shape in self.shapes.items():
            count, _ = self._rows[name]
            where = None if mask is None else mask.indices.get(name)
            line = np.ones((), bool)
            if where is None or all(index is None for index in where):
                parts.append(np.ones(count, bool))
                continue
            for size, index in zip(shape, where, strict=True):
                if line.size >= count:
                    break
                here = np.ones(size, bool)
                if index is not None:
                    here[:] = False
                    here[index] = True
                line = line[..., None] & here
            parts.append(line.reshape(-1))
        return np.concatenate(parts)

    def values(self, rows: Array) -> Array:
        """bool: the values of the marked ``rows`` among all values."""
        return np.repeat(rows, self.widths)

    def within(self, rows: Array, part: Array) -> Array | None:
        """int64: where the values of the rows ``part`` stand among those of ``rows``, of which they are some; None for
        all of them."""
        chosen = part[rows]
        return None if chosen.all() else np.flatnonzero(np.repeat(chosen, self.widths[rows]))

    def places(self, rows: Array, part: Array) -> Places:
        """As :meth:`within`, but where rows stand together in long runs, these: half the time to add to them."""
        chosen = part[rows]
        if chosen.all():
            return None
        ends = np.cumsum(self.widths[rows])
        turns = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # first rows of runs, and those after
        if not len(turns) or self.count(part) < _LONG * len(turns) // 2:
            return np.flatnonzero(np.repeat(chosen, self.widths[rows]))
        bounds = np.concatenate([[0], ends])[turns].tolist()
        return tuple(slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True))

    def count(self, rows: Array) -> int:
        """How many values the marked ``rows`` have."""
        return int(self.widths[rows].sum())

    def flat(self, tensors: Tensors, mask: ChannelMask | None) -> list[tuple[str, Array]]:
        """The compact tensors of an update in the order of the rows, each flattened.

        Raises :class:`AggregationError` where one is missing or misshapen.
        """
        out = []
        for name, shape in self.shapes.items():
            want = compact_shape(name, shape, mask)
            if name not in tensors or tensors[name].shape != want:
                got = tensors[name].shape if name in tensors else "nothing"
                raise AggregationError(f"secure: tensor {name!r} is {got}, expected {want} under the device's mask")
            out.append((name, tensors[name].reshape(-1)))
        return out

    def bounds(self, bound: float, statistics: float) -> dict[str, float]:
        """By tensor, how large a value may be: ``statistics`` for BatchNorm's running ones and class statistics, 1 for
        shares of samples."""
        by_name = dict.fromkeys(class_sums.SHARES, 1.0)
        wide = {name for name in self.shapes if is_statistic(name) or name.startswith(class_sums.PREFIX)}
        return {name: by_name.get(name, statistics if name in wide else bound) for name in self.shapes}
