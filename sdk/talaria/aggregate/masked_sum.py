"""The streaming weighted sum under channel masks: one update at a time, memory O(model).

Sums are float64, and are made tile by tile in the processor's cache, where all who wait are added. Clients with equal
masks are summed in compact form and scattered once; the weight that each coordinate received is kept only over the
dimensions that masks touch (a kernel's taps share one count).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from talaria.aggregate.loops import loops_for
from talaria.aggregate.row_sums import RowSums
from talaria.aggregate.validation import counters, is_finite, not_finite, positions
from talaria.model.masks import PREFIX, ChannelLayout, ChannelMask, outer
from talaria.tensors import Array, Tensors
from talaria.types import Update

_WAITING = 144 << 20
"""Bytes of compact tensors that may wait; five times the model's float32 bytes where those are fewer. While all fit, no
sum of the whole model is held: each tile is summed and divided in the cache."""

_FEW = 2 << 20
"""Bytes that always wait: to sum small tensors of a few clients at a time takes longer than to sum them."""

_TILE = 1 << 18
"""Values of a sum that are worked on at once for all that wait: 2 MiB, which stay in the cache."""


Place = tuple[Array | None, Array | None]
"""Kept rows and columns of a tensor: int64, ascending; None for all of them."""


@dataclass(frozen=True)
class View:
    """A tensor as (rows, columns, width): columns are the last dimension that a mask may touch, rows the dimensions
    before it, and ``width`` values (a kernel's taps) lie behind. Where that is the first of several dimensions, or
    there is none, rows are the entries of the first one, of one column."""

    rows: int
    columns: int
    width: int
    last: int
    """The last dimension that a mask may touch; -1 for none."""

    def place(self, shape: Sequence[int], where: Sequence[Array | None] | None) -> Place:
        """Where what is kept of a tensor of this shape lies."""
        if where is None:
            return None, None
        if self.last == 0 and len(shape) > 1:
            return where[0], None
        before = where[: self.last]
        if self.last == 1 or all(index is None for index in before):
            return (before[0] if self.last == 1 else None), where[self.last]
        return grid(shape[: self.last], before), where[self.last]


@dataclass
class _Waiting:
    """One client's tensors that are not added yet."""

    client: str
    number: int
    tensors: Tensors
    weight: float


@dataclass
class _Class:
    """The clients of one mask: who waits, and the weighted sums (compact, float64) of those who came before them."""

    mask: ChannelMask | None
    sums: Tensors = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)
    weight: float = 0.0
    clients: int = 0
    due: int = 0
    """Bytes that it would hold if its clients were summed at once."""

    bytes: int = 0
    """Those of the tensors that wait."""

    @property
    def nbytes(self) -> int:
        return _bytes(self.sums) + self.bytes


class _Part(NamedTuple):
    """One class's values of a tensor, and where they go."""

    rows: Array | None
    """The kept rows, counted from the first of their tile; None, as ``columns``, where all is kept."""
    columns: Array | None
    cuts: list[int]
    """Which of its own rows each tile begins with, and how many rows there are."""
    sums: Array | None
    """As each of those who wait: (rows, columns, width) as the class keeps them."""
    waiting: list[tuple[Array, float]]


@dataclass(frozen=True)
class Tile:
    """Some rows of a tensor as its :class:`View` has them; all float64."""

    rows: slice
    sums: Array
    """Weighted: (rows, columns, width)."""
    weight: Array
    """What each column of each row received: (rows, columns), 0 where nobody holds it; (1, 1) where no mask may touch
    the tensor."""
    holders: Array
    """How many clients hold it, like ``weight``; 0 where they are not counted."""


@dataclass
class Fold:
    """Weighted sums of the named tensors of ``shared``; feed it with :meth:`add`, then read each tensor once.

    It is a local variable of one ``apply``, and not an aggregator: it does keep state. It holds one model of float64
    sums and at most 144 MiB of updates that wait (five times the model's float32 bytes where those are fewer, but 2
    MiB), or one client's; while all wait, no sums. NaN and infinity are looked for in the sums, where they cannot hide
    (by the caller in those of :meth:`tiles`), and in the updates only where a sum has one.
    """

    shared: Tensors
    names: tuple[str, ...]
    count: bool = True
    """Whether holders are counted beside their weight."""
    total: float = 0.0
    clients: int = 0
    loops: RowSums = field(init=False)
    """The inner loops that suit the size of the model."""
    _size: int = 0
    _layout: ChannelLayout | None = None
    _scratch: Array = field(default_factory=lambda: np.empty(0))
    _compact: Array = field(default_factory=lambda: np.empty(0))
    _sums: Tensors = field(default_factory=dict)
    _weights: Tensors = field(default_factory=dict)
    _holders: Tensors = field(default_factory=dict)
    _pending: dict[str, _Class] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._size = sum(self.shared[k].size for k in self.names)
        self.loops = loops_for(self._size)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, update: Update, weight: float) -> None:
        """Add ``weight`` times the update to the sums; all of it is checked, but that its values are finite.

        Raises :class:`~talaria.errors.AggregationError` where one of those who wait sent NaN or infinity.
        """
        self.total += weight
        self.clients += 1
        if update.mask is not None:
            self._layout = update.mask.layout
        mask = None if update.mask is None or update.mask.is_full else update.mask
        own = {k: update.tensors[k] for k in self.names}
        size, most = _bytes(own), min(_WAITING, 5 * 4 * self._size)
        key = "" if mask is None else mask.digest
        held = self._pending.get(key)
        if held is None:
            # What waits decides the order of additions, and so the bits: it is counted as if classes held sums alone.
            if self._pending and sum(c.due for c in self._pending.values()) + size > most:
                self._scatter_all()
            held = self._pending[key] = _Class(mask, due=size)
        elif held.clients == 1:
            held.due = 8 * sum(v.size for v in own.values())
        held.waiting.append(_Waiting(update.client, self.clients, own, weight))
        held.weight += weight
        held.clients += 1
        held.bytes += size
        if held.clients > 1 and sum(c.nbytes for c in self._pending.values()) > max(most, _FEW):
            self._settle(held)

    def view(self, name: str) -> View:
        """The tensor as rows of columns."""
        shape = self.shared[name].shape or (1,)
        axes = () if self._layout is None else self._layout.axes.get(name, ())
        last = max((d for d, axis in enumerate(axes) if axis), default=-1)
        if last < 0 or (last == 0 and len(shape) > 1):
            return View(shape[0], 1, prod(shape[1:]), last)
        return View(prod(shape[:last]), shape[last], prod(shape[last + 1 :]), last)

    def tiles(self, name: str) -> Iterator[Tile]:
        """One tensor, tile by tile: the caller's until the next one, who looks whether the sums are finite and calls
        :meth:`blame` where they are not. Nothing of the tensor is kept here afterwards."""
        yield from self._tiles(name, self._sums.pop(name, None))
        for held in self._pending.values():
            held.sums.pop(name, None)
            for one in held.waiting:
                one.tensors.pop(name)

    def blame(self, name: str) -> None:
        """Refuse the first of those who wait that sent NaN or infinity in this tensor.

        Raises :class:`~talaria.errors.AggregationError`; nothing where all sent finite values.
        """
        self._blame(name, self._pending.values())

    def _scatter_all(self) -> None:
        """Add all that waits to sums of the whole model."""
        for name in self.names:
            view, held = self.view(name), self._sums.get(name)
            sums = np.empty((view.rows, view.columns, view.width)) if held is None else held
            weight = np.empty((view.rows, view.columns) if view.last >= 0 else (1, 1))
            holders = np.empty(weight.shape if self.count else (1, 1))
            for tile in self._tiles(name, held):
                if not is_finite(tile.sums):
                    self.blame(name)
                if held is None:
                    sums[tile.rows] = tile.sums
                of_rows(weight, tile.rows)[...] = tile.weight
                of_rows(holders, tile.rows)[...] = tile.holders
            self._sums[name], self._weights[name], self._holders[name] = sums, weight, holders
        self._pending = {}

    def _settle(self, held: _Class) -> None:
        """Add those of one class who wait to its sums."""
        for name in self.names:
            shape, size = held.waiting[0].tensors[name].shape, held.waiting[0].tensors[name].size
            sums = held.sums[name].reshape(-1) if name in held.sums else np.full(size, -0.0)
            flat = [(one.tensors[name].reshape(-1), one.weight) for one in held.waiting]
            for start in range(0, size, _TILE):
                part = slice(start, start + _TILE)
                for values, weight in flat:
                    self.loops.add(sums[part], values[part], weight)
                if not is_finite(sums[part]):
                    self._blame(name, [held])
            held.sums[name] = sums.reshape(shape)
        held.waiting, held.bytes = [], 0

    def _tiles(self, name: str, held: Array | None) -> Iterator[Tile]:
        """Tile by tile what waits of one tensor, added to what is ``held``, in place; else in memory that is reused."""
        view, classes = self.view(name), list(self._pending.values())
        length = view.columns * view.width
        step = max(1, _TILE // max(1, length))
        starts = [*range(0, view.rows, step), view.rows]
        whole = np.arange(view.rows) % step, np.arange(view.columns)
        places = [view.place(self.shared[name].shape, positions(name, one.mask)) for one in classes]
        parts = [self._part(name, view, *one, starts, whole) for one in zip(classes, places, strict=True)]
        kept = indicators(view, places)
        weights, clients = [one.weight for one in classes], [float(one.clients) for one in classes]
        if held is None:
            self._scratch = self._room(self._scratch, min(step, view.rows) * length)
        for number, part in enumerate(slice(start, end) for start, end in pairwise(starts)):
            if held is None:
                count = part.stop - part.start  # not -1, which a tensor without values leaves open
                sums = self._scratch[: count * length].reshape(count, view.columns, view.width)
                sums.fill(-0.0)  # the neutral element of addition: it keeps the sign of a lone zero
            else:
                sums = held[part]
            for one in parts:
                self._add_part(sums, number, one)
            weight = self._spread(kept, part, weights, self._weights.get(name))
            holders = self._spread(kept, part, clients, self._holders.get(name)) if self.count else np.zeros((1, 1))
            yield Tile(part, sums, weight, holders)

    def _spread(self, kept: tuple[Array, Array], part: slice, amounts: Sequence[float], held: Array | None) -> Array:
        """What each column of some rows receives where each class brings its amount, added to what is ``held``."""
        lines, columns = of_rows(kept[0], part), kept[1]
        found = np.empty((len(lines), columns.shape[1]))
        self.loops.weigh(lines * amounts, columns, found)
        if held is not None:
            found += of_rows(held, part)
        return found

    def _part(
        self, name: str, view: View, held: _Class, place: Place, starts: list[int], whole: tuple[Array, Array]
    ) -> _Part:
        rows, columns = place
        cuts, lone = starts, len(starts) == 2
        if rows is not None:
            cuts = [0, len(rows)] if lone else rows.searchsorted(starts).tolist()
            rows = rows if lone else whole[0][rows]
        if rows is not None or columns is not None:
            rows, columns = whole[0] if rows is None else rows, whole[1] if columns is None else columns
        shape = (cuts[-1], view.columns if columns is None else len(columns), view.width)
        waiting = [(one.tensors[name].reshape(shape), one.weight) for one in held.waiting]
        sums = held.sums[name].reshape(shape) if held.sums else None
        return _Part(rows, columns, cuts, sums, waiting)

    def _add_part(self, tile: Array, number: int, one: _Part) -> None:
        """Add the class's values that lie in this tile."""
        where = slice(one.cuts[number], one.cuts[number + 1])
        values, weight = self._together(one, where)
        if one.rows is None or one.columns is None:
            self.loops.add(tile.reshape(-1), values.reshape(-1), weight)
        else:
            self.loops.add_grid(tile, one.rows[where], one.columns, values, weight)

    def _together(self, one: _Part, where: slice) -> tuple[Array, float]:
        """Some values of a class and what they weigh: a lone client's own, or the sums."""
        if one.sums is None and len(one.waiting) == 1:
            values, weight = one.waiting[0]
            return values[where], weight
        if not one.waiting and one.sums is not None:
            return one.sums[where], 1.0
        of = one.waiting[0][0][where]
        self._compact = self._room(self._compact, of.size)
        compact = self._compact[: of.size]
        compact[...] = -0.0 if one.sums is None else one.sums[where].reshape(-1)
        for values, weight in one.waiting:
            self.loops.add(compact, values[where].reshape(-1), weight)
        return compact.reshape(of.shape), 1.0

    def _room(self, have: Array, size: int) -> Array:
        return have if len(have) >= size else np.empty(max(size, min(_TILE, self._size)))

    def _blame(self, name: str, classes: Iterable[_Class]) -> None:
        """Refuse NaN and infinity of those who wait: no later addition makes the sum of one finite again."""
        for one in sorted((w for held in classes for w in held.waiting), key=lambda one: one.number):
            if not is_finite(one.tensors[name]):
                raise not_finite(one.client, name)


def indicators(view: View, places: Sequence[Place]) -> tuple[Array, Array]:
    """Which rows and columns are kept at each place: float64 (rows, n) and float32 (n, columns) of zeros and ones;
    (1, n) and (n, 1) of ones where no mask may touch the tensor."""
    if view.last < 0:
        return np.ones((1, len(places))), np.ones((len(places), 1), np.float32)
    lines, kept = np.zeros((view.rows, len(places))), np.zeros((len(places), view.columns), np.float32)
    for n, (rows, columns) in enumerate(places):
        lines[slice(None) if rows is None else rows, n] = 1.0
        kept[n, slice(None) if columns is None else columns] = 1.0
    return lines, kept


def of_rows(value: Array, part: slice) -> Array:
    """``part`` of the rows, unless the value's one row is for all."""
    return value if len(value) == 1 else value[part]


def _bytes(tensors: Tensors) -> int:
    return sum(v.nbytes for v in tensors.values())


@dataclass
class Counters:
    """The integer tensors of ``shared``: the largest value seen wins, the server's own included."""

    shared: Tensors
    values: Tensors = field(default_factory=dict)

    def add(self, update: Update) -> None:
        for name in counters(self.shared):
            if name not in update.tensors:
                continue
            now = self.values.setdefault(name, np.array(self.shared[name], order="C"))
            sent = update.tensors[name].astype(now.dtype, copy=False)
            grid = outer(positions(name, update.mask) or (None,) * now.ndim, now.shape)
            if update.kind == "delta":
                with np.errstate(over="ignore"):
                    sent = np.asarray(self.shared[name][grid] + sent)
            now[grid] = np.maximum(now[grid], sent)


@dataclass
class Kept:
    """How many of the clients seen so far keep each channel."""

    layout: ChannelLayout | None = None
    clients: int = 0
    counts: dict[str, Array] = field(default_factory=dict)
    """int64 (channels,) per group: the clients with a mask that keep the channel."""
    masked: int = 0

    def add(self, mask: ChannelMask | None) -> None:
        """Count one client; without a mask it keeps everything."""
        self.clients += 1
        if mask is None:
            return
        self.layout, self.masked = mask.layout, self.masked + 1
        for group, channels in mask.kept.items():
            counts = self.counts.setdefault(group, np.zeros(mask.layout.sizes[group], np.int64))
            counts[list(channels)] += 1

    def bitmaps(self, shared: Tensors, need: int) -> Tensors:
        """``mask/<group>``: uint8, 1 for a channel that at least ``need`` clients kept; a group may have none."""
        if self.layout is None:
            return {k: np.full_like(v, self.clients >= need) for k, v in shared.items() if k.startswith(PREFIX)}
        whole = self.clients - self.masked
        return {PREFIX + group: (counts + whole >= need).astype(np.uint8) for group, counts in self.counts.items()}


def indicator(shape: Sequence[int], where: Sequence[Array | None]) -> Array:
    """1.0 where the outer product of ``where`` keeps, else 0.0; of size 1 along dimensions that are kept whole."""
    kept = np.ones((1,) * len(shape))
    for d, index in enumerate(where):
        if index is not None:
            line = np.zeros(shape[d])
            line[index] = 1.0
            kept = kept * line.reshape([-1 if e == d else 1 for e in range(len(shape))])
    return kept


def rows(shape: Sequence[int], where: Sequence[Array | None]) -> tuple[Array, int]:
    """``(rows, width)`` of the outer product of ``where`` in an array of ``shape`` seen as (-1, width): whole rows
    behind the last masked dimension (a kernel's taps) move at once. int64, ascending."""
    last = max(d for d, index in enumerate(where) if index is not None)
    return grid(shape[: last + 1], where[: last + 1]), prod(shape[last + 1 :])


def grid(shape: Sequence[int], where: Sequence[Array | None]) -> Array:
    """The outer product of ``where`` in a flattened array of ``shape``: int64, ascending."""
    found = np.zeros((), np.int64)
    for size, index in zip(shape, where, strict=True):
        found = found[..., None] * size + (np.arange(size) if index is None else index)
    return found.reshape(-1)
