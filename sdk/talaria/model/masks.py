"""Moving tensors between global coordinates and a device's compact ones, and masks between their forms.

A compact tensor is the outer-product gather of the dense one over its dimensions; the inverse writes the kept
positions back and touches nothing else, so scatter of gather is the identity on the kept set, bitwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from talaria.bitmaps import bits_of, indices_of
from talaria.errors import ModelError, WireError
from talaria.tensors import Array, Tensors, only, under

Axis = tuple[tuple[str, int], ...]
"""One dimension of a tensor as segments ``(group, repeat)``: each channel of the group spans ``repeat``
neighbouring positions (a flattened map) and segments follow one another (a concatenation). ``()`` is a
dimension that no mask touches."""


@dataclass(frozen=True)
class ChannelLayout:
    """Which channel group rules each dimension of each tensor of the *unpruned* model.

    ``sizes[group]`` is the group's channel count; ``axes[key][d]`` is dimension ``d`` of tensor ``key``.
    Tensors without an entry are never masked.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, tuple[Axis, ...]]

    def full(self) -> ChannelMask:
        """The mask that keeps every channel."""
        return ChannelMask(self, {g: tuple(range(n)) for g, n in self.sizes.items()})

    @cached_property
    def spans(self) -> dict[str, int]:
        """Neighbouring positions that one channel of each group has at least, wherever it stands: 1, but of a head of
        attention all that it is wide."""
        found: dict[str, int] = {}
        for group, repeat in (segment for axes in self.axes.values() for axis in axes for segment in axis):
            found[group] = min(repeat, found.get(group, repeat))
        return found

    def fits(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether it is of a model whose tensors have these dense ``shapes``."""
        return all(
            key in shapes
            and len(axes) == len(shapes[key])
            and all(g in self.sizes and repeat >= 1 for axis in axes for g, repeat in axis)
            and all(ruled in (None, n) for ruled, n in zip(dense_shape(self, key), shapes[key], strict=True))
            for key, axes in self.axes.items()
        )

    def block(self, group: str, positions: int) -> int:
        """Channels of ``group`` that fill a block of so many ``positions``: one head that is as wide, or wider."""
        return -(-positions // self.spans.get(group, 1))


@dataclass(frozen=True)
class ChannelMask:
    """The kept channels of each group, as ascending indices into the unpruned model (global coordinates)."""

    layout: ChannelLayout = field(repr=False)
    kept: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if set(self.kept) != set(self.layout.sizes):
            odd = sorted(set(self.kept) ^ set(self.layout.sizes))
            raise ModelError(f"mask: groups {odd} do not match the model's; rebuild the mask from this model's layout")
        for group, kept in self.kept.items():
            size = self.layout.sizes[group]
            ascending = all(a < b for a, b in pairwise(kept))
            if not kept or not ascending or kept[0] < 0 or kept[-1] >= size:
                raise ModelError(
                    f"mask: group {group!r} must keep ascending channels within 0..{size - 1} and at least one, "
                    f"got {list(kept)[:8]}{'...' if len(kept) > 8 else ''}"
                )

    @cached_property
    def indices(self) -> dict[str, tuple[Array | None, ...]]:
        """Per masked tensor and dimension, the kept positions (int64, ascending), or None for all of them."""
        return {key: tuple(self._positions(axis) for axis in axes) for key, axes in self.layout.axes.items()}

    def _positions(self, axis: Axis) -> Array | None:
        if all(len(self.kept[g]) == self.layout.sizes[g] for g, _ in axis):
            return None
        out, offset = [], 0
        for group, repeat in axis:
            base = np.array(self.kept[group], np.int64) * repeat + offset
            out.append((base[:, None] + np.arange(repeat)).reshape(-1))
            offset += self.layout.sizes[group] * repeat
        return np.concatenate(out)

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of the kept channels: equal masks, equal digests."""
        text = ";".join(f"{g}:{','.join(map(str, k))}" for g, k in sorted(self.kept.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_full(self) -> bool:
        return all(len(k) == self.layout.sizes[g] for g, k in self.kept.items())

    def within(self, other: ChannelMask) -> bool:
        """True where everything kept here is kept there."""
        return all(set(k) <= set(other.kept[g]) for g, k in self.kept.items())


def key_of(mask: ChannelMask | None) -> str:
    """What equal masks have alike: their digest; empty for all channels."""
    return "" if mask is None or mask.is_full else mask.digest


PREFIX = "mask/"
"""Where a device keeps its present mask among its private tensors."""


def gather(tensors: Tensors, mask: ChannelMask) -> Tensors:
    """The compact tensors of dense ``tensors``; those that no mask touches are passed through unchanged.

    Raises :class:`~talaria.errors.ModelError` where a tensor does not have the unpruned model's shape.
    """
    return {key: _gather(key, value, mask) for key, value in tensors.items()}


def gathered(tensors: Tensors, names: Iterable[str], mask: ChannelMask | None) -> Tensors:
    """The named ones of dense ``tensors`` as a device with ``mask`` holds them."""
    part = only(tensors, names)
    return part if mask is None else gather(part, mask)


def scatter(compact: Tensors, mask: ChannelMask, into: Tensors) -> Tensors:
    """Dense tensors: a copy of ``into`` whose kept positions hold the values of ``compact``.

    Entries of ``into`` that ``compact`` lacks are passed through. Raises :class:`~talaria.errors.ModelError`
    for a name that ``into`` lacks and for a shape that does not fit the mask.
    """
    stray = sorted(set(compact) - set(into))
    if stray:
        raise ModelError(f"mask: tensors {stray[:4]} have no dense counterpart; scatter into the whole state")
    out = dict(into)
    for key, value in compact.items():
        place = _positions(key, into[key], mask)
        want = tuple(n if i is None else len(i) for n, i in zip(into[key].shape, place, strict=True))
        if value.shape != want:
            raise ModelError(f"mask: tensor {key!r} has shape {value.shape}, this mask keeps {want}")
        if all(i is None for i in place):
            out[key] = np.array(value, order="C")
        else:
            dense = np.array(into[key], order="C")
            dense[outer(place, dense.shape)] = value
            out[key] = dense
    return out


def shrink(compact: Tensors, old: ChannelMask, new: ChannelMask) -> Tensors:
    """Compact tensors of mask ``old`` cut to the smaller mask ``new``.

    Equal to gathering the dense tensors by ``new`` at once. Raises :class:`~talaria.errors.ModelError` where
    ``new`` keeps a channel that ``old`` has dropped: its value is gone.
    """
    if not new.within(old):
        grown = sorted(g for g in new.kept if not set(new.kept[g]) <= set(old.kept[g]))
        raise ModelError(f"mask: groups {grown[:4]} would grow back; a mask can only shrink")
    out = {}
    for key, value in compact.items():
        after = new.indices.get(key)
        if after is None:
            out[key] = value
            continue
        before = old.indices[key]
        for dim, (have, want) in enumerate(zip(before, after, strict=True)):
            if want is not None:
                value = value.take(want if have is None else np.searchsorted(have, want), dim)  # noqa: PLW2901
        out[key] = value
    return out


def apply_dense(tensors: Tensors, mask: ChannelMask) -> Tensors:
    """The masked dense twin: the same shapes, exactly 0 wherever a dimension's channel is not kept.

    Weights, biases, BatchNorm's affine and statistics alike: with the rows alone zeroed, BatchNorm would still
    emit ``beta - gamma * mean / std``.
    """
    zeros = {key: np.zeros_like(value) for key, value in tensors.items()}
    return scatter(gather(tensors, mask), mask, zeros)


def pack(mask: ChannelMask) -> bytes:
    """One bitmap per group in order of name, each ceil(channels / 8) bytes, lowest channel in the lowest bit."""
    return b"".join(bits_of(mask.kept[group], size) for group, size in sorted(mask.layout.sizes.items()))


def unpack(layout: ChannelLayout, data: bytes) -> ChannelMask:
    """The mask that :func:`pack` wrote. Raises :class:`~talaria.errors.ModelError` for bytes that are no mask of this
    layout."""
    sizes = sorted(layout.sizes.items())
    want = sum(-(-size // 8) for _, size in sizes)
    if len(data) != want:
        raise ModelError(f"mask: {len(data)} bytes; this model's channels need {want}")
    kept, at = {}, 0
    for group, size in sizes:
        width = -(-size // 8)
        try:
            kept[group] = tuple(sorted(indices_of(data[at : at + width], size)))
        except WireError as why:
            raise ModelError(f"mask: group {group!r}: {why}") from None
        at += width
    return ChannelMask(layout, kept)


def as_tensors(mask: ChannelMask) -> Tensors:
    """``mask/<group>``: uint8 (channels,), 1 where kept."""
    return {PREFIX + group: _bits(mask, group) for group in mask.layout.sizes}


def from_tensors(layout: ChannelLayout, tensors: Tensors) -> ChannelMask:
    """The mask among ``tensors`` (other names are ignored).

    Raises :class:`~talaria.errors.ModelError` where a group is missing, unknown, misshapen or not of 0 and 1.
    """
    found = under(tensors, PREFIX)
    odd = sorted(set(found) ^ set(layout.sizes))
    if odd:
        raise ModelError(f"mask: groups {odd[:4]} do not match this model's; the state belongs to another model")
    kept = {}
    for group, size in layout.sizes.items():
        bits = found[group]
        if bits.dtype != np.uint8 or bits.shape != (size,) or int(bits.max()) > 1:
            raise ModelError(f"mask: {PREFIX}{group} must be uint8 ({size},) of 0 and 1, got {bits.dtype} {bits.shape}")
        kept[group] = tuple(np.flatnonzero(bits).tolist())
    return ChannelMask(layout, kept)


def _bits(mask: ChannelMask, group: str) -> Array:
    bits = np.zeros(mask.layout.sizes[group], np.uint8)
    bits[list(mask.kept[group])] = 1
    return bits


def _positions(key: str, dense: Array, mask: ChannelMask) -> Sequence[Array | None]:
    place = mask.indices.get(key)
    if place is None:
        return (None,) * dense.ndim
    want, got = dense_shape(mask.layout, key), dense.shape
    if len(want) != len(got) or any(w not in (None, n) for w, n in zip(want, got, strict=True)):
        raise ModelError(f"mask: tensor {key!r} has shape {got}, the unpruned model's is {want}; scatter it first")
    return place


def dense_shape(layout: ChannelLayout, key: str) -> tuple[int | None, ...]:
    """The unpruned model's extent in each masked dimension of ``key``; None where no mask rules it."""
    return tuple(sum(layout.sizes[g] * r for g, r in axis) if axis else None for axis in layout.axes[key])


def compact_shape(name: str, shape: Sequence[int], mask: ChannelMask | None) -> tuple[int, ...]:
    """The shape that a dense tensor of ``shape`` has under ``mask``. Raises :class:`~talaria.errors.ModelError` where
    the mask's layout gives it another number of dimensions."""
    axes = None if mask is None else mask.layout.axes.get(name)
    if mask is None or axes is None:
        return tuple(shape)
    if len(axes) != len(shape):
        raise ModelError(f"layout gives {len(axes)} dimensions for {name!r}, which has {len(shape)}")
    return tuple(
        sum(len(mask.kept[g]) * repeat for g, repeat in axis) if axis else size
        for axis, size in zip(axes, shape, strict=True)
    )


def outer(where: Sequence[Array | None], shape: Sequence[int]) -> tuple[Array, ...]:
    """An index for the outer product of the kept positions of a tensor of ``shape``; None keeps a whole dimension."""
    return np.ix_(*(np.arange(size) if p is None else p for p, size in zip(where, shape, strict=True)))


def _gather(key: str, value: Array, mask: ChannelMask) -> Array:
    for dim, index in enumerate(_positions(key, value, mask)):
        if index is not None:
            value = value.take(index, dim)
    return value
