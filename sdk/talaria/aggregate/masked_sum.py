"""The streaming weighted sum under channel masks: one update at a time, memory O(model).

Sums are float64. Clients with equal masks are summed in compact form and scattered once; the weight that each
coordinate received is kept only over the dimensions that masks touch (a kernel's taps share one count), and comes from
one product of matrices for all the clients that wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from talaria.aggregate.row_sums import RowSums, engine
from talaria.aggregate.validation import counters, positions
from talaria.model.masks import PREFIX, ChannelLayout, ChannelMask, outer
from talaria.tensors import Array, Tensors
from talaria.types import Update

_WAITING = 144 << 20
"""Bytes of compact tensors that may wait; five times the model's float32 bytes where those are fewer. While all fit, no
sum of the whole model is held: each tile is summed and divided in the cache."""

_TILE = 1 << 18
"""Values of a sum that are worked on at once for all that wait: 2 MiB, which stay in the cache."""

Where = tuple[Array | None, ...] | None


@dataclass
class _Pending:
    mask: ChannelMask | None
    sums: Tensors
    scale: float
    """What ``sums`` still have to be multiplied by: the weight of a lone client, whose tensors these are."""
    weight: float
    clients: int

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in self.sums.values())


@dataclass
class Fold:
    """Weighted sums of the named tensors of ``shared``; feed it with :meth:`add`, then read each tensor once.

    It is a local variable of one ``apply``, and not an aggregator: it does keep state. It holds one model of float64
    sums and at most 144 MiB of updates that wait (five times the model's float32 bytes where those are fewer), or one
    client's; while all wait, no sums.
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
    _scratch: Array = field(default_factory=lambda: np.empty(0))
    _sums: Tensors = field(default_factory=dict)
    _weights: Tensors = field(default_factory=dict)
    _holders: Tensors = field(default_factory=dict)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _waiting: int = 0

    def __post_init__(self) -> None:
        self._size = sum(self.shared[k].size for k in self.names)
        self.loops = engine(self._size)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, update: Update, weight: float) -> None:
        """Add ``weight`` times the (checked) update to the sums."""
        self.total += weight
        self.clients += 1
        mask = None if update.mask is None or update.mask.is_full else update.mask
        key = "" if mask is None else mask.digest
        held = self._pending.get(key)
        if held is None:
            held = _Pending(mask, {k: update.tensors[k] for k in self.names}, weight, weight, 1)
            if self._pending and self._waiting + held.nbytes > min(_WAITING, 5 * 4 * self._size):
                self._scatter_all()
            self._pending[key] = held
            self._waiting += held.nbytes
            return
        if held.clients == 1:
            self._waiting -= held.nbytes
            held.sums = {k: _scaled(v, held.scale) for k, v in held.sums.items()}
            held.scale = 1.0
            self._waiting += held.nbytes
        held.weight += weight
        held.clients += 1
        for k in self.names:
            self.loops.add(held.sums[k].reshape(-1), update.tensors[k].reshape(-1), weight)

    def weights(self, name: str) -> tuple[Array, Array]:
        """``(weight, holders)`` that each coordinate received: float64 that broadcast to the tensor, 0 where nobody
        holds it. Without ``count`` holders stay 0."""
        shape, waiting = self.shared[name].shape, list(self._pending.values())
        wheres = [positions(name, held.mask) for held in waiting]
        found = spread(shape, wheres, [held.weight for held in waiting])
        weight = found + self._weights[name] if name in self._weights else found
        if not self.count:
            return weight, np.zeros((1,) * len(shape))
        found = spread(shape, wheres, [float(held.clients) for held in waiting])
        return weight, found + self._holders[name] if name in self._holders else found

    @np.errstate(over="ignore", invalid="ignore")
    def tiles(self, name: str) -> Iterator[tuple[slice, Array]]:
        """The sums of one tensor (a scalar as of one value) in slices of its first dimension: float64, the caller's
        until the next one. Nothing of the tensor is kept here afterwards."""
        yield from self._tiles(name, self._sums.pop(name, None))
        for held in self._pending.values():
            held.sums.pop(name)

    @np.errstate(over="ignore", invalid="ignore")
    def _scatter_all(self) -> None:
        for name in self.names:
            self._weights[name], self._holders[name] = self.weights(name)
            held = self._sums.get(name)
            sums = np.empty(self.shared[name].shape or (1,)) if held is None else held
            for part, tile in self._tiles(name, held):
                if held is None:
                    sums[part] = tile
            self._sums[name] = sums
        self._pending, self._waiting = {}, 0

    def _tiles(self, name: str, held: Array | None) -> Iterator[tuple[slice, Array]]:
        """Tile by tile what waits of one tensor, added to what is ``held``, in place; else in memory that is reused."""
        shape = self.shared[name].shape or (1,)
        clients = [
            (positions(name, c.mask), c.sums[name].reshape(c.sums[name].shape or (1,)), c.scale)
            for c in self._pending.values()
        ]
        step = max(1, _TILE // max(1, prod(shape[1:])))
        size = prod((min(step, shape[0]), *shape[1:]))
        if held is None and len(self._scratch) < size:
            self._scratch = np.empty(max(size, min(_TILE, self._size)))
        for start in range(0, shape[0], step):
            part = slice(start, min(start + step, shape[0]))
            if held is None:
                tile = self._scratch[: (part.stop - start) * prod(shape[1:])].reshape(-1, *shape[1:])
                tile.fill(-0.0)  # the neutral element of addition: it keeps the sign of a lone zero
            else:
                tile = held[part]
            for where, values, scale in clients:
                self._add_tile(tile, part, where, values, scale)
            yield part, tile

    def _add_tile(self, tile: Array, part: slice, where: Where, values: Array, scale: float) -> None:
        """Add the client's values that lie in ``tile``, which is ``part`` of the first dimension."""
        if where is None:
            self.loops.add(tile.reshape(-1), values[part].reshape(-1), scale)
            return
        first, start, end = where[0], part.start, part.stop
        if first is not None:
            a, b = first.searchsorted((start, end))
            first, start, end = first[a:b] - start, int(a), int(b)
        last = max(d for d, index in enumerate(where) if index is not None)
        local = (first, *where[1:])
        before, found = grid(tile.shape[:last], local[:last]), local[last]
        behind = np.arange(tile.shape[last]) if found is None else found
        width = prod(tile.shape[last + 1 :])
        into = tile.reshape(-1, tile.shape[last], width)
        self.loops.add_grid(into, before, behind, values[start:end].reshape(len(before), len(behind), width), scale)


def spread(shape: Sequence[int], wheres: Sequence[Where], weights: Sequence[float]) -> Array:
    """The weight that each coordinate of ``shape`` receives: float64, of size 1 along dimensions that nobody masks."""
    masked = sorted({d for where in wheres if where is not None for d, i in enumerate(where) if i is not None})
    if not masked:
        return np.full((1,) * len(shape), sum(weights))
    lines = [np.ones((len(wheres), shape[d])) for d in masked]
    for line, d in zip(lines, masked, strict=True):
        for kept, where in zip(line, wheres, strict=True):
            if where is not None and (index := where[d]) is not None:
                kept[:] = 0.0
                kept[index] = 1.0
    lines[0] *= np.array(weights)[:, None]
    if len(masked) == 1:
        found = lines[0].sum(0)
    elif len(masked) == 2:
        found = lines[0].T @ lines[1]
    else:
        found = sum((_outer([line[i] for line in lines]) for i in range(len(wheres))), np.zeros(()))
    return np.asarray(found.reshape([size if d in masked else 1 for d, size in enumerate(shape)]))


def _scaled(value: Array, weight: float) -> Array:
    """``weight * value``, a new contiguous float64 array."""
    out = np.array(value, np.float64, order="C")
    out *= weight
    return out


def _outer(lines: Sequence[Array]) -> Array:
    found = np.ones(())
    for line in lines:
        found = found[..., None] * line
    return found


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


def restore(new: Array, old: Array, where: Array) -> None:
    """``new[where] = old[where]`` in place, for a bool ``where`` that broadcasts to them; ``new`` is contiguous."""
    last = max((d for d, size in enumerate(where.shape) if size > 1), default=-1)
    width = prod(new.shape[last + 1 :])
    wide = np.broadcast_to(where, (*new.shape[: last + 1], *where.shape[last + 1 :]))
    index = np.flatnonzero(wide)
    new.reshape(-1, width)[index] = old.reshape(-1, width)[index]
