"""The streaming weighted sum under channel masks: one update at a time, memory O(model).

Sums are float64. Clients with equal masks are summed in compact form and scattered once; the weight that each
coordinate received is kept only over the dimensions that masks touch (a kernel's taps share one count).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from talaria.aggregate.validation import counters, positions
from talaria.model.masks import PREFIX, ChannelLayout, ChannelMask, outer
from talaria.tensors import Array, Tensors
from talaria.types import Update

_PENDING = 8
"""Masks whose compact sums wait at once. They are then scattered tensor by tensor, while its dense sum is in cache."""

_BLOCK = 1 << 15
"""Values worked on at once: float64 copies of so many stay in the cache."""


@dataclass
class _Pending:
    mask: ChannelMask | None
    sums: Tensors
    scale: float
    """What ``sums`` still have to be multiplied by: the weight of a lone client, whose tensors these are."""
    weight: float
    clients: int


@dataclass
class Fold:
    """Weighted sums of the named tensors of ``shared``; feed it with :meth:`add`, then read it.

    It is a local variable of one ``apply``, and not an aggregator: it does keep state.
    """

    shared: Tensors
    names: tuple[str, ...]
    count: bool = True
    """Whether holders are counted beside their weight."""
    total: float = 0.0
    clients: int = 0
    _sums: Tensors = field(default_factory=dict)
    _weights: Tensors = field(default_factory=dict)
    _holders: Tensors = field(default_factory=dict)
    _pending: dict[str, _Pending] = field(default_factory=dict)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, update: Update, weight: float) -> None:
        """Add ``weight`` times the (checked) update to the sums."""
        self.total += weight
        self.clients += 1
        mask = None if update.mask is None or update.mask.is_full else update.mask
        key = "" if mask is None else mask.digest
        held = self._pending.get(key)
        if held is None:
            if len(self._pending) >= _PENDING:
                self._scatter()
            self._pending[key] = _Pending(mask, update.tensors, weight, weight, 1)
            return
        if held.clients == 1:
            held.sums = {k: _scaled(held.sums[k], held.scale) for k in self.names}
            held.scale = 1.0
        held.weight += weight
        held.clients += 1
        for k in self.names:
            _add(held.sums[k], update.tensors[k], weight)

    @np.errstate(over="ignore", invalid="ignore")
    def sums(self, name: str) -> tuple[Array, Array, Array]:
        """``(sum, weight, holders)`` of one tensor: float64 of its shape, and two that broadcast to it.

        Where nobody holds a coordinate its weight and holders are 0. Without ``count`` holders stay 0.
        """
        self._scatter()
        return self._sums[name], self._weights[name], self._holders[name]

    def _scatter(self) -> None:
        waiting, self._pending = list(self._pending.values()), {}
        for name in self.names if waiting else ():
            shape = self.shared[name].shape
            if name not in self._sums:
                # Minus zero is the neutral element of addition: it keeps the sign of a lone zero.
                self._sums[name] = np.full(shape, -0.0)
                self._weights[name] = np.zeros((1,) * len(shape))
                self._holders[name] = np.zeros((1,) * len(shape))
            for held in waiting:
                where = positions(name, held.mask)
                if where is None:
                    _add(self._sums[name], held.sums[name], held.scale)
                    self._weights[name] += held.weight
                    self._holders[name] += held.clients * self.count
                    continue
                scatter_add(self._sums[name], where, held.sums[name], held.scale)
                kept = indicator(shape, where)
                self._weights[name] = _plus(self._weights[name], kept, held.weight)
                if self.count:
                    self._holders[name] = _plus(self._holders[name], kept, held.clients)


def _scaled(value: Array, weight: float) -> Array:
    """``weight * value``, a new float64 array."""
    return np.multiply(value, weight, out=np.empty(value.shape), dtype=np.float64)


def _add(total: Array, value: Array, weight: float) -> None:
    """``total += weight * value``, in place and in float64; ``total`` must be contiguous."""
    sums, values = total.reshape(-1), value.reshape(-1)
    scratch = np.empty(min(len(sums), _BLOCK))
    for part in _blocks(len(sums), _BLOCK):
        here = sums[part]
        here += np.multiply(values[part], weight, out=scratch[: len(here)], dtype=np.float64)


def _blocks(size: int, block: int) -> Iterator[slice]:
    return (slice(start, start + block) for start in range(0, size, block))


def _plus(count: Array, kept: Array, weight: float) -> Array:
    """``count + weight * kept``, in place where ``count`` is large enough already."""
    wide = np.broadcast_shapes(count.shape, kept.shape)
    out = count if count.shape == wide else np.array(np.broadcast_to(count, wide), order="C")
    out += weight * kept
    return out


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
    found = np.zeros((), np.int64)
    for size, index in zip(shape[: last + 1], where, strict=False):
        found = found[..., None] * size + (np.arange(size) if index is None else index)
    return found.reshape(-1), prod(shape[last + 1 :])


def scatter_add(dense: Array, where: Sequence[Array | None], value: Array, weight: float = 1.0) -> None:
    """``dense[outer product of where] += weight * value`` in float64, in place; ``dense`` must be contiguous."""
    index, width = rows(dense.shape, where)
    into, values = dense.reshape(-1, width), value.reshape(-1, width)
    for part in _blocks(len(index), max(1, _BLOCK // max(1, width))):
        # No row comes twice, so that reading, adding and writing back is an addition in place.
        here = into.take(index[part], 0)
        here += np.multiply(values[part], weight, dtype=np.float64)
        into[index[part]] = here


def restore(new: Array, old: Array, where: Array) -> None:
    """``new[where] = old[where]`` in place, for a bool ``where`` that broadcasts to them; ``new`` is contiguous."""
    last = max((d for d, size in enumerate(where.shape) if size > 1), default=-1)
    width = prod(new.shape[last + 1 :])
    wide = np.broadcast_to(where, (*new.shape[: last + 1], *where.shape[last + 1 :]))
    index = np.flatnonzero(wide)
    new.reshape(-1, width)[index] = old.reshape(-1, width)[index]
