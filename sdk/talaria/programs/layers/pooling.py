"""Poolings. A maximum's gradient goes to the first position that has it, as in torch; a mean's to all alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

from torch.nn import AvgPool2d, MaxPool2d, Module

from talaria.programs.graph import Draft
from talaria.programs.layers.base import Map, Pullback, Step, no_dilation, refused, spread
from talaria.programs.layers.windows import Tap, Windows


def max_pool(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The largest value under each window."""
    own, draft, (x,) = cast(MaxPool2d, module), step.draft, given
    windows = _windows(layer, own, x)
    y = _pooled(draft, "MaxPool", x, windows)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        left, pieces = "", dict[Tap, str]()
        for tap, value in zip(windows.taps(), windows.under(draft, x.value, float("-inf")), strict=True):
            hit = draft.op("Equal", value, y)
            pieces[tap] = draft.op("Where", draft.op("And", hit, left) if left else hit, g, draft.constant(0.0))
            other = draft.op("Not", hit)
            left = draft.op("And", left, other) if left else other
        return [windows.fold(draft, x.value, pieces)]

    return Map(y, x.channels, windows.out), back


def average_pool(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The mean under each window; what lies beyond the edge counts as zero."""
    own, draft, (x,) = cast(AvgPool2d, module), step.draft, given
    windows = _windows(layer, own, x)
    if any(windows.padding) and (not own.count_include_pad or getattr(own, "divisor_override", None)):
        raise refused(layer, "counts its padding in another way", "use count_include_pad=True")
    if getattr(own, "divisor_override", None):
        raise refused(layer, f"has divisor_override={own.divisor_override}", "leave it out")
    return _average(draft, x, windows)


def global_average(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The mean over the whole map, as the adaptive pooling to one entry."""
    (x,) = given
    wanted = spread(cast(Any, module).output_size, len(x.space))
    if set(wanted) != {1}:
        raise refused(layer, f"pools to {wanted}", "pool to 1, or use AvgPool with a fixed kernel")
    rank = len(x.space)
    return _average(step.draft, x, Windows(x.space, x.space, x.space, (0,) * rank))


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
    rank = len(x.space)
    kernel, stride, padding = (spread(one, rank) for one in (own.kernel_size, own.stride, own.padding))
    return Windows(x.space, kernel, stride, padding)


def _pooled(draft: Draft, kind: str, x: Map, windows: Windows) -> str:
    more = {"count_include_pad": 1} if kind == "AveragePool" else {}
    kernel, stride, pads = windows.kernel, windows.stride, windows.padding * 2
    return draft.op(kind, x.value, kernel_shape=kernel, strides=stride, pads=pads, **more)
