"""The streaming weighted sum under channel masks: one update at a time, memory O(model).

Sums are float64. Clients with equal masks are summed in compact form and scattered once; the weight that each
coordinate received is kept only over the dimensions that masks touch (a kernel's taps share one count).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from talaria.aggregate.checks import counters, positions
from talaria.types import ChannelLayout, ChannelMask, Tensors, Update

_PENDING = 4
"""Masks whose compact sums are held back at once; one more sends the oldest to the dense sum."""


@dataclass
class _Pending:
    mask: ChannelMask | None
    sums: Tensors
    weight: float
    clients: int


@dataclass
class Fold:
    """Weighted sums of the named tensors of ``shared``; feed it with :meth:`add`, then read it.

    It is a local variable of one ``apply``, and not an aggregator: it does keep state.
    """

    shared: Tensors
    names: tuple[str, ...]
    total: float = 0.0
    clients: int = 0
    _sums: Tensors = field(default_factory=dict)
    _weights: Tensors = field(default_factory=dict)
    _holders: Tensors = field(default_factory=dict)
    _pending: "OrderedDict[str, _Pending]" = field(default_factory=OrderedDict)

    def add(self, update: Update, weight: float) -> None:
        """Add ``weight`` times the (checked) update to the sums."""
        self.total += weight
        self.clients += 1
        mask = None if update.mask is None or update.mask.is_full else update.mask
        key = "" if mask is None else mask.digest
        held = self._pending.get(key)
        if held is None:
            if len(self._pending) >= _PENDING:
                self._scatter(self._pending.popitem(last=False)[1])
            sums = {k: update.tensors[k].detach().to(torch.float64).mul(weight) for k in self.names}
            self._pending[key] = _Pending(mask, sums, weight, 1)
            return
        self._pending.move_to_end(key)
        held.weight += weight
        held.clients += 1
        for k in self.names:
            held.sums[k].add_(update.tensors[k].detach().to(torch.float64), alpha=weight)

    def sums(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """``(sum, weight, holders)`` of one tensor: float64 of its shape, and two that broadcast to it.

        Where nobody holds a coordinate its weight and holders are 0.
        """
        while self._pending:
            self._scatter(self._pending.popitem(last=False)[1])
        return self._sums[name], self._weights[name], self._holders[name]

    def _scatter(self, held: _Pending) -> None:
        for name in self.names:
            value = held.sums[name]
            shape = self.shared[name].shape
            where = positions(name, held.mask)
            if name not in self._sums:
                # Minus zero is the neutral element of addition: it keeps the sign of a lone zero.
                self._sums[name] = torch.full(shape, -0.0, dtype=torch.float64)
                self._weights[name] = torch.zeros((1,) * len(shape), dtype=torch.float64)
                self._holders[name] = torch.zeros((1,) * len(shape), dtype=torch.float64)
            if where is None:
                self._sums[name] += value
                self._weights[name] += held.weight
                self._holders[name] += held.clients
                continue
            scatter_add(self._sums[name], where, value)
            kept = indicator(shape, where)
            self._weights[name] = self._weights[name] + kept * held.weight
            self._holders[name] = self._holders[name] + kept * held.clients


@dataclass
class Counters:
    """The integer tensors of ``shared``: the largest value seen wins, the server's own included."""

    shared: Tensors
    values: Tensors = field(default_factory=dict)

    def add(self, update: Update) -> None:
        for name in counters(self.shared):
            if name not in update.tensors:
                continue
            now = self.values.setdefault(name, self.shared[name].detach().clone())
            sent = update.tensors[name].detach().to(now.dtype)
            grid = outer(positions(name, update.mask), now.shape)
            now[grid] = torch.maximum(now[grid], self.shared[name][grid] + sent if update.kind == "delta" else sent)


@dataclass
class Common:
    """The channels that all masks seen so far keep."""

    layout: ChannelLayout | None = None
    kept: dict[str, set[int]] = field(default_factory=dict)

    def add(self, mask: ChannelMask | None) -> None:
        """Narrow by one client; without a mask it keeps everything."""
        if mask is None:
            return
        self.layout = mask.layout
        for group, channels in mask.kept.items():
            self.kept[group] = self.kept[group] & set(channels) if group in self.kept else set(channels)

    def bitmaps(self, shared: Tensors) -> Tensors:
        """``mask/<group>``: uint8, 1 for a channel that all kept; a group may have none."""
        if self.layout is None:
            return {k: torch.ones_like(v) for k, v in shared.items() if k.startswith("mask/")}
        out = {}
        for group, size in self.layout.sizes.items():
            bitmap = torch.zeros(size, dtype=torch.uint8)
            bitmap[sorted(self.kept[group])] = 1
            out[f"mask/{group}"] = bitmap
        return out


def outer(where: tuple[Tensor | None, ...] | None, shape: torch.Size) -> tuple[Tensor, ...]:
    """An index for the outer product of the kept positions of a tensor of ``shape``."""
    if where is None:
        where = (None,) * len(shape)
    lines = (torch.arange(size) if p is None else p for p, size in zip(where, shape, strict=True))
    return tuple(line.view([-1 if e == d else 1 for e in range(len(shape))]) for d, line in enumerate(lines))


def indicator(shape: torch.Size, where: tuple[Tensor | None, ...]) -> Tensor:
    """1.0 where the outer product of ``where`` keeps, else 0.0; of size 1 along dimensions that are kept whole."""
    kept = torch.ones((1,) * len(shape), dtype=torch.float64)
    for d, index in enumerate(where):
        if index is not None:
            line = torch.zeros(shape[d], dtype=torch.float64)
            line[index] = 1.0
            kept = kept * line.view([-1 if e == d else 1 for e in range(len(shape))])
    return kept


def scatter_add(dense: Tensor, where: tuple[Tensor | None, ...], value: Tensor) -> None:
    """``dense[outer product of where] += value``, in place."""
    masked = [d for d, index in enumerate(where) if index is not None]
    for d in reversed(masked[1:]):
        value = spread(value, d, where[d], dense.shape[d])
    first = where[masked[0]]
    assert first is not None
    dense.index_add_(masked[0], first, value)


def spread(value: Tensor, dim: int, index: Tensor | None, size: int) -> Tensor:
    """``value`` put at ``index`` of a dimension of ``size``; minus zero elsewhere."""
    assert index is not None
    # A take through one padded channel reads and writes once; index_copy_ would write the zeros first.
    pad = torch.full((*value.shape[:dim], 1, *value.shape[dim + 1 :]), -0.0, dtype=value.dtype)
    source = torch.full((size,), value.shape[dim], dtype=torch.int64)
    source[index] = torch.arange(len(index))
    return torch.cat((value, pad), dim).index_select(dim, source)
