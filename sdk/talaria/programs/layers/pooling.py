"""Poolings. A maximum's gradient goes to the first position that has it, as in torch; a mean's to all alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np
from torch.nn import AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool2d, MaxPool2d, Module

from talaria.programs.graph import Draft
from talaria.programs.layers.base import Map, Pullback, Step, no_dilation, refused, spread
from talaria.programs.layers.windows import Tap, Windows, covering

_Matrix = np.ndarray[Any, np.dtype[np.float64]]


def max_pool(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The largest value under each window."""
    (x,) = given
    return _largest(step.draft, x, _windows(layer, cast(MaxPool2d, module), x))


def _largest(draft: Draft, x: Map, windows: Windows) -> tuple[Map, Pullback]:
    y = _pooled(draft, "MaxPool", x, windows)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        pieces, left = dict[Tap, str](), g
        *above, last = zip(windows.taps(), windows.under(draft, x.value, float("-inf")), strict=True)
        for tap, value in above:  # each has what those before it leave
            pieces[tap] = draft.op("Mul", left, draft.op("Cast", draft.op("Equal", value, y), to=1))
            left = draft.op("Sub", left, pieces[tap])
        pieces[last[0]] = left
        return [windows.fold(draft, x.value, pieces)]

    return Map(y, x.channels, windows.out), back


def average_pool(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The mean under each window; what lies beyond the edge counts as zero, or not at all."""
    own, draft, (x,) = cast(AvgPool2d, module), step.draft, given
    windows = _windows(layer, own, x)
    if getattr(own, "divisor_override", None):
        raise refused(layer, f"has divisor_override={own.divisor_override}", "leave it out")
    y, pull = _average(draft, x, windows)
    counted = _counted(windows, own.count_include_pad, spread(own.padding, len(x.space)))
    if (counted == prod(windows.kernel)).all():
        return y, pull
    more = draft.constant(prod(windows.kernel) / counted[None, None])
    return y.like(draft.op("Mul", y.value, more)), lambda g, wanted: pull(draft.op("Mul", g, more), wanted)


def _counted(windows: Windows, edges: bool, padding: Sequence[int]) -> _Matrix:
    """How many positions count under each window: those of the map, and of its ``padding`` where ``edges`` do."""
    found = np.ones(())
    zipped = zip(windows.space, windows.kernel, windows.stride, padding, windows.out, strict=True)
    for n, k, s, p, many in zipped:
        starts, low, high = np.arange(many) * s - p, -p if edges else 0, n + p if edges else n
        found = found[..., None] * (np.minimum(starts + k, high) - np.maximum(starts, low))
    return found


def adaptive_average(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The mean under windows that cover the map evenly; where their sizes differ, a product with a matrix for each
    dimension."""
    draft, (x,) = step.draft, given
    wanted, windows = _adaptive(layer, module, x)
    if windows is not None:
        return _average(draft, x, windows)
    under = [np.eye(n)[covering(n, many)].max(1).T for n, many in zip(x.space, wanted, strict=True)]
    shares = [one / one.sum(0) for one in under]
    turned = [one.T for one in shares]
    return Map(_along_each(draft, x.value, shares), x.channels, wanted), lambda g, _: [_along_each(draft, g, turned)]


def _along_each(draft: Draft, value: str, matrices: Sequence[_Matrix]) -> str:
    """A map (channels, batch, *space) times a matrix (places, new places) along each dimension of its space."""
    *above, last = matrices
    value = draft.op("MatMul", value, draft.constant(last))
    for one in above:
        value = draft.op("MatMul", draft.constant(one.T), value)
    return value


def adaptive_max(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The largest value under windows that cover the map evenly; where their sizes differ, each is made as long as the
    longest, by its last place once more."""
    draft, (x,) = step.draft, given
    wanted, windows = _adaptive(layer, module, x)
    if cast(Any, module).return_indices:
        raise refused(layer, "returns indices", "leave return_indices out")
    if windows is not None:
        return _largest(draft, x, windows)
    value, spreads, kernel = x.value, list[_Matrix](), list[int]()
    for axis, (n, many) in enumerate(zip(x.space, wanted, strict=True), 2):
        places = covering(n, many)
        kernel.append(places.shape[1])
        value = draft.op("Gather", value, draft.ints(*places.reshape(-1).tolist()), axis=axis)
        spreads.append(np.eye(n)[places.reshape(-1)])
    wide, size = tuple(many * k for many, k in zip(wanted, kernel, strict=True)), tuple(kernel)
    y, pull = _largest(draft, Map(value, x.channels, wide), Windows(wide, size, size, (0,) * len(size)))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [None if slope is None else _along_each(draft, slope, spreads) for slope in pull(g, wanted)]

    return y, back


def _adaptive(layer: str, module: Module, x: Map) -> tuple[tuple[int, ...], Windows | None]:
    """The sizes that are asked for (None keeps one), and the windows, where they are all of one size."""
    _require_space(layer, module, x)
    asked = cast(Any, module).output_size
    each = asked if isinstance(asked, tuple | list) else (asked,) * len(x.space)
    wanted = tuple(n if one is None else int(one) for n, one in zip(x.space, each, strict=True))
    if any(n % one for n, one in zip(x.space, wanted, strict=True)):
        return wanted, None
    kernel = tuple(n // one for n, one in zip(x.space, wanted, strict=True))
    return wanted, Windows(x.space, kernel, kernel, (0,) * len(kernel))


def _average(draft: Draft, x: Map, windows: Windows) -> tuple[Map, Pullback]:
    y = draft.mean(x.value, *x.axes[1:], keep=True) if windows.whole else _pooled(draft, "AveragePool", x, windows)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        share = 1 / prod(windows.kernel)
        if windows.whole:  # a product with one row: Expand takes four times as long
            row = draft.constant([[share] * prod(x.space)])
            return [draft.reshape(draft.op("MatMul", draft.reshape(g, 0, -1, 1), row), 0, 0, *x.space)]
        each = draft.op("Mul", g, draft.number(share, 2 + len(x.space)))
        return [windows.fold(draft, x.value, dict.fromkeys(windows.taps(), each))]

    return Map(y, x.channels, windows.out), back


def _windows(layer: str, own: MaxPool2d | AvgPool2d, x: Map) -> Windows:
    no_dilation(layer, own)
    if getattr(own, "return_indices", False):
        raise refused(layer, "returns indices", "leave return_indices out")
    rank = _require_space(layer, own, x)
    kernel, stride, padding = (spread(one, rank) for one in (own.kernel_size, own.stride, own.padding))
    if not own.ceil_mode:
        return Windows(x.space, kernel, stride, padding)
    zipped = zip(x.space, kernel, stride, padding, strict=True)
    return Windows(x.space, kernel, stride, padding, above=tuple(_end(*each) for each in zipped))


def _require_space(layer: str, module: Module, x: Map) -> int:
    """How many dimensions a pool goes over: those of its map. torch takes a map that lacks one for a sample without a
    batch, whose channels are the samples."""
    rank = 1 + isinstance(module, MaxPool2d | AvgPool2d | AdaptiveAvgPool2d | AdaptiveMaxPool2d)
    if len(x.space) != rank:
        mend = "give maps a single channel, x.unsqueeze(1), and take it away afterwards, squeeze(1)"
        raise refused(layer, f"pools over {rank} behind the channels, where its maps have {len(x.space)}", mend)
    return rank


def _end(n: int, kernel: int, stride: int, padding: int) -> int:
    """What a pool that rounds up reads beyond the end: its last window begins on the map or before it."""
    many = -(-(n + 2 * padding - kernel) // stride) + 1
    many -= (many - 1) * stride >= n + padding
    return max(padding, (many - 1) * stride + kernel - n - padding)


def _pooled(draft: Draft, kind: str, x: Map, windows: Windows) -> str:
    more = {"count_include_pad": 1} if kind == "AveragePool" else {}
    kernel, stride, pads = windows.kernel, windows.stride, windows.padding + windows.end
    return draft.op(kind, x.value, kernel_shape=kernel, strides=stride, pads=pads, **more)
