"""The streaming weighted sum under channel masks: one update at a time, memory O(model).

Sums are float64. Clients with equal masks are summed in compact form and scattered once; the weight that each
coordinate received is kept only over the dimensions that masks touch (a kernel's taps share one count).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from talaria.aggregate.validation import counters, positions
from talaria.model.masks import PREFIX, ChannelLayout, ChannelMask
from talaria.tensors import Tensors
from talaria.types import Update

_PENDING = 8
"""Masks whose compact sums wait at once. They are then scattered tensor by tensor, while its dense sum is in cache."""


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
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

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
            held.sums = {k: self._scaled(held.sums[k], held.scale).clone() for k in self.names}
            held.scale = 1.0
        held.weight += weight
        held.clients += 1
        for k in self.names:
            held.sums[k] += self._scaled(update.tensors[k], weight)

    def sums(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
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
                self._sums[name] = torch.full(shape, -0.0, dtype=torch.float64)
                self._weights[name] = torch.zeros((1,) * len(shape), dtype=torch.float64)
                self._holders[name] = torch.zeros((1,) * len(shape), dtype=torch.float64)
            for held in waiting:
                value = held.sums[name] if held.clients > 1 else self._scaled(held.sums[name], held.scale)
                where = positions(name, held.mask)
                if where is None:
                    self._sums[name] += value
                    self._weights[name] += held.weight
                    self._holders[name] += held.clients * self.count
                    continue
                scatter_add(self._sums[name], where, value)
                kept = indicator(shape, where)
                self._weights[name] = _plus(self._weights[name], kept, held.weight)
                if self.count:
                    self._holders[name] = _plus(self._holders[name], kept, held.clients)

    def _scaled(self, value: Tensor, weight: float) -> Tensor:
        """``weight * value`` in float64, valid until the next call: fresh memory each time would cost more."""
        if self._scratch.numel() < value.numel():
            self._scratch = torch.empty(value.numel(), dtype=torch.float64)
        return self._scratch[: value.numel()].view(value.shape).copy_(value.detach()).mul_(weight)


def _plus(count: Tensor, kept: Tensor, weight: float) -> Tensor:
    """``count + weight * kept``, in place where ``count`` is large enough already."""
    wide = torch.Size(max(a, b) for a, b in zip(count.shape, kept.shape, strict=True))
    return (count if count.shape == wide else count.expand(wide).clone()).add_(kept, alpha=weight)


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
class Kept:
    """How many of the clients seen so far keep each channel."""

    layout: ChannelLayout | None = None
    clients: int = 0
    counts: dict[str, Tensor] = field(default_factory=dict)
    """int64 (channels,) per group: the clients with a mask that keep the channel."""
    masked: int = 0

    def add(self, mask: ChannelMask | None) -> None:
        """Count one client; without a mask it keeps everything."""
        self.clients += 1
        if mask is None:
            return
        self.layout, self.masked = mask.layout, self.masked + 1
        for group, channels in mask.kept.items():
            counts = self.counts.setdefault(group, torch.zeros(mask.layout.sizes[group], dtype=torch.int64))
            counts[list(channels)] += 1

    def bitmaps(self, shared: Tensors, need: int) -> Tensors:
        """``mask/<group>``: uint8, 1 for a channel that at least ``need`` clients kept; a group may have none."""
        if self.layout is None:
            return {k: torch.full_like(v, self.clients >= need) for k, v in shared.items() if k.startswith(PREFIX)}
        whole = self.clients - self.masked
        return {PREFIX + group: (counts + whole >= need).to(torch.uint8) for group, counts in self.counts.items()}


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
    """``dense[outer product of where] += value``, in place; ``dense`` must be contiguous."""
    last = max(d for d, index in enumerate(where) if index is not None)
    rows = torch.zeros((), dtype=torch.int64)
    for size, index in zip(dense.shape[: last + 1], where, strict=False):
        rows = rows[..., None] * size + (torch.arange(size) if index is None else index)
    # Whole rows behind the last masked dimension (a kernel's taps) are added at once.
    width = dense.shape[last + 1 :].numel()
    dense.view(-1, width).index_add_(0, rows.flatten(), value.reshape(-1, width))


def restore(new: Tensor, old: Tensor, where: Tensor) -> None:
    """``new[where] = old[where]`` in place, for a bool ``where`` that broadcasts to them; both contiguous."""
    last = max((d for d, size in enumerate(where.shape) if size > 1), default=-1)
    width = new.shape[last + 1 :].numel()
    rows = where.expand((*new.shape[: last + 1], *where.shape[last + 1 :])).reshape(-1).nonzero()[:, 0]
    new.view(-1, width)[rows] = old.reshape(-1, width)[rows]
