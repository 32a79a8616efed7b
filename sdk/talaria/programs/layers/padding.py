"""Edges around a map: a number, its values mirrored, repeated or from the other end; below zero, edges are cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.nn import Module

from talaria.programs.graph import Size, added
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes

MODES: Mapping[type[Module], str] = {
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d), "constant"),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d), "reflect"),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d), "replicate"),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d), "circular"),
}
"""The layers that pad, and how they do."""

_Back = Callable[[str], str]
"""``slope of what came out -> slope of what came in``."""


def of_module(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """As the layer says."""
    own, (x,) = cast(Any, module), given
    return padded(step, layer, x, own.padding, MODES[type(module)], getattr(own, "value", 0.0))


def padded(
    step: Step, layer: str, x: Map, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> tuple[Map, Pullback]:
    """x with ``pad`` more at the beginning and end of its last dimension, of the one before it, and so on."""
    fill = 0.0 if value is None else value
    if mode not in {*MODES.values()} or not isinstance(fill, int | float):
        raise refused(layer, f"pads by mode={mode!r} with {fill!r}", "pad with a number, or a mode of torch's")
    if step.draft.whole(x.value):
        raise refused(layer, "pads whole numbers", "pad what is looked up of them")
    wide, edges = list(sizes(x)), _edges(layer, x, pad)
    for axis, (low, high) in edges.items():
        wide[axis - 1] = _wider(step, layer, wide[axis - 1], low, high, mode)
    if not x.space:  # rows are padded as torch has them
        out, order = shaped(step, layer, wide), list(range(1 + len(wide)))
        y, back = _around(step, opened(step, x.value, x), sizes(x), order, edges, mode, fill)
        return filled(step, y, out), lambda g, wanted: [closed(step, back(opened(step, g, out)), x)]
    order = list(range(1 + len(wide))) if step.looks else [1, 0, *range(2, 1 + len(wide))]
    y, back = _around(step, x.value, sizes(x), order, edges, mode, fill)
    return Map(y, wide[0], tuple(one for one in wide[1:] if isinstance(one, int))), lambda g, wanted: [back(g)]


def _edges(layer: str, x: Map, pad: Sequence[int]) -> dict[int, tuple[int, int]]:
    """What is put before and behind each dimension of (batch, *sizes), where it is anything."""
    rank = len(sizes(x))
    whole = isinstance(pad, tuple | list) and all(type(one) is int for one in pad)
    if not whole or len(pad) % 2 or len(pad) > 2 * rank:
        raise refused(
            layer, f"pads {sizes(x)} by {pad!r}"[:120], "give two numbers for a dimension, none for the batch"
        )
    pairs = enumerate(zip(pad[::2], pad[1::2], strict=True))
    return {rank - place: pair for place, pair in pairs if pair != (0, 0)}


def _wider(step: Step, layer: str, size: Size, low: int, high: int, mode: str) -> Size:
    known = step.known(size)
    most = {"reflect": known - 1, "circular": known}.get(mode, max(low, high))
    least = -known if mode == "constant" else 0
    if known + low + high < 1 or min(low, high) < least or max(low, high) > most:
        raise refused(layer, f"pads {known} places by {(low, high)} (mode={mode!r})", "pad by fewer, and leave a place")
    if isinstance(size, int):
        return size + low + high
    if min(low, high) < 0 or mode != "constant":
        raise refused(
            layer, f"pads the width {size!r}, which a mask may narrow", "put a number beside it, and cut nothing"
        )
    return added([one for one in (low, size, high) if one])


def _around(
    step: Step,
    value: str,
    wide: Sequence[Size],
    order: Sequence[int],
    edges: Mapping[int, tuple[int, int]],
    mode: str,
    fill: float,
) -> tuple[str, _Back]:
    """``value`` with its edges, and the way back; dimension n of (batch, *wide) stands at ``order[n]`` in it."""
    ways = list[_Back]()
    for axis, (low, high) in edges.items():
        size = wide[axis - 1]
        if mode == "constant":
            value, way = _constant(step, value, size, order, axis, (low, high), fill)
        else:
            value, way = _of_its_own(step, value, step.known(size), order, axis, (low, high), mode)
        ways.append(way)

    def back(g: str) -> str:
        for way in reversed(ways):
            g = way(g)
        return g

    return value, back


def _constant(
    step: Step, value: str, size: Size, order: Sequence[int], axis: int, pad: tuple[int, int], fill: float
) -> tuple[str, _Back]:
    draft, at, (low, high) = step.draft, order[axis], pad
    more, less = (max(low, 0), max(high, 0)), (max(-low, 0), max(-high, 0))
    wide = None if isinstance(size, int) else draft.op("Shape", value, start=at, end=at + 1)

    def cut(value: str, start: int) -> str:
        first = draft.ints(start)
        end = draft.op("Add", first, wide) if wide else draft.ints(start + step.known(size) - sum(less))
        return draft.op("Slice", value, first, end, draft.ints(at), draft.ints(1))

    value = cut(value, less[0]) if any(less) else value
    value = _put(step, value, order, at, more, fill)

    def back(g: str) -> str:
        return _put(step, cut(g, more[0]) if any(more) else g, order, at, less, 0.0)

    return value, back


def _of_its_own(
    step: Step, value: str, size: int, order: Sequence[int], axis: int, pad: tuple[int, int], mode: str
) -> tuple[str, _Back]:
    """By values that there are: those next to the edge mirrored, the last one again, or those from the other end."""
    draft, at, (low, high) = step.draft, order[axis], pad

    def piece(value: str, start: int, end: int, by: int = 1) -> str:
        return draft.op("Slice", value, *(draft.ints(n) for n in (start, end, at, by)))

    def mirrored(value: str, many: int) -> str:
        return piece(value, many - 1, -many - 1, -1)

    first, last = {
        "reflect": ((1, 1 + low), (size - 1 - high, size - 1)),
        "replicate": ((0, 1), (size - 1, size)),
        "circular": ((size - low, size), (0, high)),
    }[mode]

    def edge(places: tuple[int, int], many: int) -> list[str]:
        own = piece(value, *places)
        return [mirrored(own, many)] if mode == "reflect" else [own] * (many if mode == "replicate" else 1)

    pieces = [*(edge(first, low) if low else []), value, *(edge(last, high) if high else [])]
    y = draft.op("Concat", *pieces, axis=at)

    def back(g: str) -> str:
        slopes = [piece(g, low, low + size)]
        for many, start, places in ((low, 0, first), (high, low + size, last)):
            if many:
                own = piece(g, start, start + many)
                if mode == "reflect":
                    own = mirrored(own, many)
                elif mode == "replicate":
                    own = draft.sum(own, at, keep=True)
                slopes.append(_put(step, own, order, at, (places[0], size - places[1]), 0.0))
        return draft.total(slopes)

    return y, back


def _put(step: Step, value: str, order: Sequence[int], at: int, pad: tuple[int, int], fill: float) -> str:
    if not any(pad):
        return value
    low, high = [0] * len(order), [0] * len(order)
    low[at], high[at] = pad
    return step.draft.op("Pad", value, step.draft.ints(*low, *high), step.draft.constant(fill))
