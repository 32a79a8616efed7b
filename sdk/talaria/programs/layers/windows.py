"""Windows that slide over a map: the slices under each tap of a kernel, and their way back by phases.

A position p of the map lies in phase p mod stride. Where the taps meet it is known before any size is: no scattering is
needed, only slices, pads and one interleaving of the phases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from talaria.programs.graph import INT, Draft
from talaria.tensors import Array

Tap = tuple[int, ...]


def covering(n: int, many: int) -> Array:
    """The places, of ``n``, under each of ``many`` windows that cover them, as torch's adaptive pools lay these: int64
    (many, longest), where the last place of a shorter window stands several times."""
    cells = np.arange(many)
    first, last = cells * n // many, -(-(cells + 1) * n // many) - 1
    return np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])


@dataclass(frozen=True)
class Windows:
    """Windows over ``space``, all numbers per dimension."""

    space: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...] = ()
    """How far neighbouring taps stand apart; (): next to each other."""
    above: tuple[int, ...] = ()
    """Padding at the end, where it differs from that at the beginning: of pools that round up."""

    @property
    def end(self) -> tuple[int, ...]:
        """Padding at the end of each dimension."""
        return self.above or self.padding

    @property
    def apart_by(self) -> tuple[int, ...]:
        """The distance of neighbouring taps in each dimension."""
        return self.dilation or (1,) * len(self.space)

    @property
    def reach(self) -> tuple[int, ...]:
        """Positions from a window's first tap to its last."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.apart_by, strict=True))

    @property
    def out(self) -> tuple[int, ...]:
        """How many windows there are."""
        zipped = zip(self.space, self.reach, self.stride, self.padding, self.end, strict=True)
        return tuple((n + low + high - k) // s + 1 for n, k, s, low, high in zipped)

    @property
    def whole(self) -> bool:
        """Whether one window covers the whole map."""
        return self.kernel == self.space and not any(self.padding) and not any(self.end)

    @property
    def apart(self) -> bool:
        """Whether no two windows share a position."""
        return all(k <= s for k, s in zip(self.reach, self.stride, strict=True))

    def wide(self, places: int) -> bool:
        """Whether taps lie next to each other and so do windows, of which there are as many ``places`` or half of the
        map's at most."""
        near = {*self.stride, *self.apart_by} == {1} and prod(self.kernel) > 1
        return near and (prod(self.space) >= places or 2 * prod(self.out) <= prod(self.space))

    def taps(self) -> Iterator[Tap]:
        """All places in a kernel, in their order in memory."""
        return itertools.product(*map(range, self.kernel))

    def under(self, draft: Draft, value: str, fill: float = 0.0) -> list[str]:
        """What lies under each tap: (channels, batch, *out) each; ``fill`` stands beyond the edge."""
        *above, step = self.stride
        turns = step if self.kernel[-1] > 1 else 1
        wide = [n + low + high for n, low, high in zip(self.space, self.padding, self.end, strict=True)]
        more = -wide[-1] % turns
        value = pad(draft, value, self.padding, (*self.end[:-1], self.end[-1] + more), fill)
        each = (*wide[:-1], (wide[-1] + more) // turns)
        turned = _turned(draft, value, each, turns)
        starts = [tuple(k * d for k, d in zip(tap, self.apart_by, strict=True)) for tap in self.taps()]
        steps, shared = (*above, step // turns), prod(self.kernel[:-1]) > 1
        return [
            cut(draft, turned[last % turns], each, (*start, last // turns), self.out, steps, shared=shared)
            for *start, last in starts
        ]

    def rows(self, draft: Draft, value: str) -> str:
        """What lies under all taps, a row for each window: (batch x windows, taps x channels)."""
        zipped = zip(self.out, self.stride, self.kernel, self.apart_by, strict=True)
        places = [(s * np.arange(n), d * np.arange(k)) for n, s, k, d in zipped]
        return _rows(draft, value, self.space, self.padding, self.end, places)

    def phases(self) -> Iterator[Phase]:
        """The phases, the last dimension's first."""
        for start in itertools.product(*map(range, self.stride)):
            sizes = tuple(len(range(b, n, s)) for b, n, s in zip(start, self.space, self.stride, strict=True))
            edges = [b + p for b, p in zip(start, self.padding, strict=True)]
            per = [
                [(k, (e - k * d) // s) for k in range(n) if (e - k * d) % s == 0]
                for e, n, s, d in zip(edges, self.kernel, self.stride, self.apart_by, strict=True)
            ]
            taps = {tuple(k for k, _ in one): tuple(o for _, o in one) for one in itertools.product(*per)}
            yield Phase(sizes, taps if prod(sizes) else {})

    def back(self, draft: Draft, like: str, of: Callable[[Phase], str]) -> str:
        """The map (channels, batch, *space) whose phases ``of`` gives; zero where no tap meets one. ``like`` is any
        value with the map's channels and batch, read where no tap meets any of it."""
        longest = tuple(-(-n // s) for n, s in zip(self.space, self.stride, strict=True))
        none = (0,) * len(longest)
        # a shorter phase goes on beyond the map, so that all are of one size: what it has there is cut off below
        phases = [replace(phase, sizes=longest) for phase in self.phases()]
        met = [of(phase) if phase.taps else None for phase in phases]
        like = next(filter(None, met), like)
        pieces = [piece or zeros(draft, like, longest) for piece in met]
        made = list(longest)
        for axis in reversed(range(len(longest))):
            many = self.stride[axis]
            made[axis] *= many
            groups = [pieces[i : i + many] for i in range(0, len(pieces), many)]
            pieces = [_interleaved(draft, group, axis, made) for group in groups]
        return cut(draft, pieces[0], tuple(made), none, self.space, (1,) * len(longest))

    def fold(self, draft: Draft, like: str, pieces: Mapping[Tap, str]) -> str:
        """The sum, at each position, of what the taps over it brought: the inverse of :meth:`under`."""

        def summed(phase: Phase) -> str:
            return draft.total([phase.shifted(draft, pieces[tap], self.out, [tap])[0] for tap in phase.taps])

        return self.back(draft, like, summed)


@dataclass(frozen=True)
class Phase:
    """The positions of one phase: ``sizes``, and how far each tap that meets them is off its windows' places."""

    sizes: tuple[int, ...]
    taps: Mapping[Tap, tuple[int, ...]]

    def shifted(self, draft: Draft, value: str, out: tuple[int, ...], taps: Sequence[Tap]) -> list[str]:
        """``value``, one entry for each window, as the positions of this phase meet it under each of ``taps``."""
        offsets = [self.taps[tap] for tap in taps]
        low, high = self._edges(out, offsets)
        value = pad(draft, value, low, high)
        wide = tuple(n + a + b for n, a, b in zip(out, low, high, strict=True))
        step, shared = (1,) * len(out), len({one[:-1] for one in offsets}) > 1
        starts = [tuple(o + a for o, a in zip(offset, low, strict=True)) for offset in offsets]
        return [cut(draft, value, wide, start, self.sizes, step, shared=shared) for start in starts]

    def rows(self, draft: Draft, value: str, out: tuple[int, ...]) -> str:
        """What :meth:`shifted` gives for all taps, a row for each position: (batch x positions, taps x channels)."""
        offsets = list(self.taps.values())
        low, high = self._edges(out, offsets)
        each = [np.array(list(dict.fromkeys(one))) for one in zip(*offsets, strict=True)]
        places = [(np.arange(n), o + a) for n, o, a in zip(self.sizes, each, low, strict=True)]
        return _rows(draft, value, out, low, high, places)

    def _edges(self, out: tuple[int, ...], offsets: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """How far positions under taps with such ``offsets`` lie before and behind ``out`` windows."""
        each = list(zip(*offsets, strict=True))
        high = [max(0, max(one) + size - n) for one, size, n in zip(each, self.sizes, out, strict=True)]
        return [max(0, -min(one)) for one in each], high


def _rows(
    draft: Draft,
    value: str,
    space: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
    places: Sequence[tuple[Array, Array]],
) -> str:
    """The rows (batch x positions, taps x channels) of a map (channels, batch, *space) with zeros around it: ``places``
    are where windows begin and how far off taps lie, int, in each dimension.

    With channels last a tap is one copy of all its channels, and one operator looks up all taps (137 us for 5 x 5 over
    32 x 10 x 12 x 12, where slices below each other take 394)."""
    flat, wide = len(space) == 1, [n + a + b for n, a, b in zip(space, low, high, strict=True)]
    last = draft.transpose(value if flat else draft.reshape(value, 0, 0, -1), 1, 2, 0)
    if wide != list(space):
        last = last if flat else draft.reshape(last, 0, *space, -1)
        last = draft.op("Pad", last, draft.ints(0, *low, 0, 0, *high, 0), draft.constant(0.0))
        last = last if flat else draft.reshape(last, 0, prod(wide), -1)
    at = list[str]()
    for axis, pair in enumerate(places):
        for one, where in zip(pair, (axis, len(space) + axis), strict=True):
            shape = [1] * 2 * len(space)
            shape[where] = -1
            at.append(draft.constant(one.reshape(shape) * prod(wide[axis + 1 :]), INT))
    under = draft.op("Gather", last, draft.total(at), axis=1)
    return draft.op("Flatten", under, axis=1 + len(space))


def pad(draft: Draft, value: str, low: Sequence[int], high: Sequence[int], fill: float = 0.0) -> str:
    """``value`` with so much more at the beginning and end of each dimension of space."""
    if not any(low) and not any(high):
        return value
    return draft.op("Pad", value, draft.ints(0, 0, *low, 0, 0, *high), draft.constant(fill))


def cut(
    draft: Draft,
    value: str,
    wide: Sequence[int],
    start: Sequence[int],
    count: Sequence[int],
    step: Sequence[int],
    *,
    shared: bool = False,
) -> str:
    """From ``start`` on, ``count`` entries of each dimension of space, ``step`` apart.

    Where several cuts have the end of their rows ``shared``, rows are cut first, and once: what the others cut then
    lies together (351 us for the 25 taps of 5 x 5 over 32 x 10 x 12 x 12, 219).
    """
    many = len(wide)
    if shared and many > 1:
        none, ones = (0,) * (many - 1), (1,) * (many - 1)
        value = cut(draft, value, wide, (*none, start[-1]), (*wide[:-1], count[-1]), (*ones, step[-1]))
        wide, start, step = (*wide[:-1], count[-1]), (*start[:-1], 0), (*step[:-1], 1)
    axes = [i for i in range(many) if (count[i], step[i]) != (wide[i], 1)]
    if not axes:
        return value
    ends = [start[i] + step[i] * (count[i] - 1) + 1 for i in axes]
    where = draft.ints(*(start[i] for i in axes)), draft.ints(*ends), draft.ints(*(2 + i for i in axes))
    return draft.op("Slice", value, *where, draft.ints(*(step[i] for i in axes)))


def _turned(draft: Draft, value: str, each: Sequence[int], many: int) -> list[str]:
    """Every ``many``-th column of a map from the first one on, the second and so on, of ``each`` size; taps that lie
    apart cut rows of these, where single numbers take three times as long (148 us for 5 taps over 64 x 16 x 54, 68)."""
    if many == 1:
        return [value]
    last = 2 + len(each)
    split = draft.reshape(value, 0, 0, *each, many)
    turned = draft.transpose(split, last, *range(last))
    return [draft.op("Gather", turned, draft.constant(i, INT), axis=0) for i in range(many)]


def zeros(draft: Draft, like: str, space: Sequence[int]) -> str:
    """Zeros with the first two sizes of ``like``, and ``space``."""
    shape = draft.op("Concat", draft.op("Shape", like, start=0, end=2), draft.ints(*space), axis=0)
    return draft.op("Expand", draft.constant(0.0), shape)


def _interleaved(draft: Draft, pieces: Sequence[str], axis: int, space: Sequence[int]) -> str:
    if len(pieces) == 1:
        return pieces[0]
    apart = [draft.op("Unsqueeze", piece, draft.ints(3 + axis)) for piece in pieces]
    return draft.reshape(draft.op("Concat", *apart, axis=3 + axis), 0, 0, *space)
