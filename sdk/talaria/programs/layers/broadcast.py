"""Maps of different sizes together, and what a padding mask is used for: products, quotients and sums with sizes of 1
stretched as torch does, pieces of a dimension, and maps side by side.

What comes in and goes out is reckoned as torch has it, (batch, *sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from talaria.programs.graph import Draft, Size, added
from talaria.programs.layers.base import Map, Pullback, Step, chained, refused
from talaria.programs.layers.rows import chosen
from talaria.programs.layers.sequence import closed, filled, opened, picked, shaped, sizes, without


def both(step: Step, layer: str, kind: str, a: Map, b: Map) -> tuple[Map, Pullback]:
    """``kind`` (Add, Mul, Div, Max or Min) of two maps of as many dimensions, where a size of 1 stands for any."""
    draft, wide = step.draft, _joined(step, layer, kind, a, b)
    out = shaped(step, layer, wide)
    left, right = opened(step, a.value, a), opened(step, b.value, b)
    whole = draft.op(kind, left, right)

    def slopes(g: str) -> tuple[Callable[[], str], Callable[[], str]]:
        if kind == "Add":
            return (lambda: g), (lambda: g)
        if kind == "Mul":
            return (lambda: draft.op("Mul", g, right)), (lambda: draft.op("Mul", g, left))
        if kind in BEYOND:
            pairs = (left, right), (right, left)
            one, other = (partial(of_extreme, draft, kind, g, *pair) for pair in pairs)
            return one, other
        share: Callable[[], str] = lambda: draft.op("Div", g, right)  # noqa: E731
        return share, (lambda: draft.op("Neg", draft.op("Mul", share(), whole)))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        pairs = zip((a, b), slopes(opened(step, g, out)), wanted, strict=True)
        return [closed(step, _shrunk(step, slope(), x, wide), x) if want else None for x, slope, want in pairs]

    return filled(step, whole, out), back


BEYOND = {"Max": "Less", "Min": "Greater"}
"""By the operator that takes one of two values, what the other one is."""


def of_extreme(draft: Draft, kind: str, g: str, mine: str, other: str) -> str:
    """The slope of one of two values of which the larger or the smaller was taken; equal ones share it."""
    half = draft.op("Where", draft.op("Equal", mine, other), draft.op("Mul", g, draft.constant(0.5)), g)
    return draft.op("Where", draft.op(BEYOND[kind], mine, other), draft.constant(0.0), half)


def _joined(step: Step, layer: str, kind: str, a: Map, b: Map) -> list[Size]:
    does = {"Add": "adds", "Mul": "multiplies", "Div": "divides"}.get(kind, "compares")
    return together(step, layer, does, [sizes(a), sizes(b)])


def together(step: Step, layer: str, does: str, wide: Sequence[Sequence[Size]]) -> list[Size]:
    """The sizes behind the batch of maps that meet, where a size of 1 stands for any. Raises
    :class:`~talaria.errors.ModelError`, with what the layer ``does``, where they do not fit."""
    whole = list(wide[0])
    for other in wide[1:]:
        pairs = [(step.known(m), step.known(n)) for m, n in zip(whole, other, strict=False)]
        if len(whole) != len(other) or any(m != n and 1 not in (m, n) for m, n in pairs):
            what = f"{does} maps of {tuple(wide[0])} and {tuple(other)}"
            raise refused(layer, what, "bring both branches to one shape, or to sizes of 1")
        whole = [n if step.known(m) == 1 else m for m, n in zip(whole, other, strict=True)]
    return whole


def _shrunk(step: Step, slope: str, x: Map, wide: Sequence[Size]) -> str:
    """The slope of a map that was stretched to the sizes ``wide``."""
    pairs = enumerate(zip(map(step.known, sizes(x)), map(step.known, wide), strict=True), 1)
    over = [axis for axis, (own, size) in pairs if own == 1 and size != 1]
    return step.draft.sum(slope, *over, keep=True) if over else slope


def stretched(step: Step, layer: str, x: Map, wide: Sequence[Size], like: Map | None = None) -> tuple[Map, Pullback]:
    """x where sizes of 1 are stretched to those of ``wide``, behind the batch; ``like`` has them, where it is known."""
    draft, own = step.draft, [step.known(one) for one in sizes(x)]
    if len(own) != len(wide) or any(n not in (1, step.known(w)) for n, w in zip(own, wide, strict=True)):
        raise refused(layer, f"stretches {own} to {tuple(wide)}", "stretch sizes of 1")
    if like is None:  # what is not stretched stays as wide as a mask leaves it
        shape = draft.ints(1, *(step.known(w) if n == 1 else 1 for n, w in zip(own, wide, strict=True)))
        wide = [w if n == 1 else held for n, w, held in zip(own, wide, sizes(x), strict=True)]
    else:
        shape = draft.op("Shape", opened(step, like.value, like))
    out = shaped(step, layer, list(wide))
    y = filled(step, draft.op("Expand", opened(step, x.value, x), shape), out)
    return y, lambda g, wanted: [closed(step, _shrunk(step, opened(step, g, out), x, wide), x), None][: len(wanted)]


def unsqueezed(step: Step, layer: str, x: Map, dim: int) -> tuple[Map, Pullback]:
    """With one more dimension, of size 1, behind the batch."""
    wide = sizes(x)
    axis = dim % (2 + len(wide))
    if axis == 0:
        raise refused(layer, f"puts dimension {dim} before the batch", "keep the batch first")
    out = shaped(step, layer, [*wide[: axis - 1], 1, *wide[axis - 1 :]])
    draft = step.draft
    y = filled(step, draft.op("Unsqueeze", opened(step, x.value, x), draft.ints(axis)), out)
    return y, lambda g, wanted: [closed(step, without(step, opened(step, g, out), axis, wide), x)]


def cut(step: Step, layer: str, x: Map, axis: int, piece: slice) -> tuple[Map, Pullback]:
    """Some places of a dimension; of widths side by side that a mask may narrow, whole ones."""
    wide, draft = list(sizes(x)), step.draft
    size = step.held(wide[axis - 1])
    places = range(step.known(size))[piece]
    if not places:
        raise refused(layer, f"takes {piece} of {size}", "take places, of which there is one")
    if places.step != 1:
        return _apart(step, layer, x, axis, places)
    before, wide[axis - 1], behind = _cut(step, layer, size, places)
    out = shaped(step, layer, wide)
    start = step.extent(before)
    end = draft.ints(places.stop) if isinstance(size, int) else draft.op("Add", start, step.extent(wide[axis - 1]))
    at, by = draft.ints(axis), draft.ints(1)
    y = filled(step, draft.op("Slice", opened(step, x.value, x), start, end, at, by), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        edges = list[Size]()
        for edge in (before, behind):
            edges += [edge if place == axis else 0 for place in range(1 + len(wide))]
        if all(isinstance(one, int) for one in edges):
            pads = draft.ints(*(one for one in edges if isinstance(one, int)))
        else:
            pads = draft.op("Concat", *map(step.extent, edges), axis=0)
        return [closed(step, draft.op("Pad", opened(step, g, out), pads, draft.constant(0.0)), x)]

    return y, back


def _apart(step: Step, layer: str, x: Map, axis: int, places: range) -> tuple[Map, Pullback]:
    """Places of a dimension with others between them."""
    wide, draft = list(sizes(x)), step.draft
    size = step.held(wide[axis - 1])
    if not isinstance(size, int):
        raise refused(layer, f"takes some places of the width {size!r}, which a mask may narrow", "take neighbours")
    wide[axis - 1] = len(places)
    out = shaped(step, layer, wide)
    ends = (draft.ints(n) for n in (places.start, places[-1] + 1, axis, places.step))
    y = filled(step, draft.op("Slice", opened(step, x.value, x), *ends), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        order = [i for i in range(1 + len(wide)) if i != axis] + [axis]
        low, high = [0] * (2 + len(wide)), [0] * (2 + len(wide))
        each = draft.op("Unsqueeze", draft.transpose(opened(step, g, out), *order), draft.ints(len(order)))
        high[-1] = places.step - 1
        each = draft.op("Pad", each, draft.ints(*low, *high), draft.constant(0.0))
        each = draft.reshape(each, *(0,) * len(wide), -1)
        over = size - places.start - len(places) * places.step
        if over < 0:
            each = draft.op("Slice", each, *(draft.ints(n) for n in (0, size - places.start, len(wide), 1)))
        low, high = [0] * len(order), [0] * len(order)
        low[-1], high[-1] = places.start, max(over, 0)
        each = draft.op("Pad", each, draft.ints(*low, *high), draft.constant(0.0)) if low[-1] or high[-1] else each
        return [closed(step, draft.transpose(each, *(order.index(i) for i in range(len(order)))), x)]

    return y, back


def flipped(step: Step, layer: str, x: Map, *given: Any, dims: Sequence[int] = ()) -> tuple[Map, Pullback]:
    """Some dimensions behind the batch from their last place to their first."""
    wide, draft = sizes(x), step.draft
    flat = dims or (given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given)
    axes = [one % (1 + len(wide)) for one in flat]
    held = [step.held(wide[axis - 1]) for axis in axes]
    if 0 in axes or not all(isinstance(one, int) for one in held):
        raise refused(layer, f"flips {flat} of {wide}", "flip dimensions behind the batch, of which no mask takes any")
    out = shaped(step, layer, wide)

    def turned(value: str) -> str:
        for axis, size in zip(axes, map(step.known, held), strict=True):
            value = draft.op("Slice", value, *(draft.ints(n) for n in (-1, -size - 1, axis, -1)))
        return value

    y = filled(step, turned(opened(step, x.value, x)), out)
    return y, lambda g, wanted: [closed(step, turned(opened(step, g, out)), x)]


def rolled(
    step: Step, layer: str, x: Map, shifts: int | Sequence[int], dims: int | Sequence[int]
) -> tuple[Map, Pullback]:
    """Some dimensions behind the batch turned by so many places, of which those at the end come first."""
    pairs = zip(*([one] if isinstance(one, int) else one for one in (shifts, dims)), strict=True)
    ways = list[Pullback]()
    for by, dim in pairs:
        x, way = _rolled(step, layer, x, by, dim % (1 + len(sizes(x))))
        ways.append(way)
    return x, chained(*ways)


def _rolled(step: Step, layer: str, x: Map, by: int, axis: int) -> tuple[Map, Pullback]:
    size = 0 if axis == 0 else step.known(sizes(x)[axis - 1])
    if size == 0:
        raise refused(layer, "turns the batch", "turn dimensions behind it")
    at = -by % size
    if at == 0:
        return x, lambda g, wanted: [g]
    (end, of_end), (start, of_start) = (cut(step, layer, x, axis, one) for one in (slice(at, size), slice(0, at)))
    y, back = beside(step, layer, [end, start], axis)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slopes = zip((of_end, of_start), back(g, [True, True]), strict=True)
        return [step.draft.total(one for way, slope in slopes if slope is not None for one in way(slope, [True]))]

    return y, turned


def _cut(step: Step, layer: str, size: Size, places: range) -> tuple[Size, Size, Size]:
    """What lies before these places of a size, at them, and behind them."""
    if isinstance(size, int):
        return places.start, len(places), size - places.stop
    parts, end = size.split("+"), 0
    found: tuple[list[Size], list[Size], list[Size]] = [], [], []
    edges = {0, *accumulate(step.known(one) for one in parts)}
    if not {places.start, places.stop} <= edges or any("*" in one for one in parts):
        raise refused(layer, f"takes a piece of the width {size!r}, which a mask may narrow", "take the whole")
    for one in parts:
        end += step.known(one)
        found[(end > places.start) + (end > places.stop)].append(one)
    before, at, behind = (added(part) if part else 0 for part in found)
    return before, at, behind


def indexed(step: Step, layer: str, x: Map, index: tuple[object, ...]) -> tuple[Map, Pullback]:
    """``x[index]`` of places, neighbouring places and new dimensions; the batch stays whole and first."""
    wide = 1 + len(sizes(x))
    taken = sum(one is not None and one is not Ellipsis for one in index)
    if index.count(Ellipsis) > 1 or taken > wide or not index or index[0] is None:
        raise refused(layer, f"takes {index!r}"[:120], "keep the batch first, as in x[:, 2:5]")
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = [*index[:at], *[slice(None)] * (wide - taken), *index[at + 1 :]]
    if full[0] != slice(None):
        raise refused(layer, f"takes {index!r}"[:120], "keep the whole batch, as in x[:, 2:5]")
    ways = list[Pullback]()
    axis = 0
    for one in full:
        if one is None:
            x, way = unsqueezed(step, layer, x, axis)
        elif isinstance(one, Tensor):
            x, way = chosen(step, layer, x, axis, one)
        elif isinstance(one, bool) or not isinstance(one, int | slice):
            raise refused(layer, f"takes {index!r}"[:120], "take numbers and pieces, as in x[:, -1, 2:5]")
        elif isinstance(one, int):
            x, way = picked(step, layer, x, axis, one)
        elif one != slice(None):
            x, way = cut(step, layer, x, axis, one)
        axis += not isinstance(one, int)
        if not isinstance(one, slice) or one != slice(None):
            ways.append(way)

    return x, chained(*ways) if ways else lambda g, wanted: [g]


def stacked(step: Step, layer: str, given: Sequence[Map], dim: int) -> tuple[Map, Pullback]:
    """Maps of one shape along a new dimension behind the batch, as torch.stack has them."""
    axis = dim % (2 + len(sizes(given[0])))
    if axis == 0:
        raise refused(layer, "puts maps one behind the other before the batch", "use torch.stack(maps, dim=1)")
    apart = [unsqueezed(step, layer, x, axis) for x in given]
    y, back = beside(step, layer, [one for one, _ in apart], axis)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slopes = zip(back(g, wanted), apart, strict=True)
        return [None if slope is None else way(slope, [True])[0] for slope, (_, way) in slopes]

    return y, turned


def beside(step: Step, layer: str, given: Sequence[Map], dim: int) -> tuple[Map, Pullback]:
    """Maps side by side along a dimension behind the batch, as torch.cat has them."""
    draft, wide = step.draft, [list(sizes(x)) for x in given]
    axis = dim % (1 + len(wide[0]))
    rest = [[*own[: axis - 1], *own[axis:]] for own in wide]
    if axis == 0:
        raise refused(layer, "puts samples behind samples", "call the layers with each map in turn, and keep the batch")
    if len({tuple(map(step.known, own)) for own in rest}) > 1:
        raise refused(layer, f"puts maps of {[*map(tuple, wide)]} side by side", "let them differ in one size only")
    same = [next((one for one in labels if isinstance(one, str)), labels[0]) for labels in zip(*rest, strict=True)]
    out = shaped(step, layer, [*same[: axis - 1], added([own[axis - 1] for own in wide]), *same[axis - 1 :]])
    each = [opened(step, x.value, x) for x in given]
    y = filled(step, draft.op("Concat", *each, axis=axis), out)

    widths = [own[axis - 1] for own in wide]

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope, found, start, end = opened(step, g, out), list[str | None](), draft.ints(0), ""
        for place, (x, value, want) in enumerate(zip(given, each, wanted, strict=True)):
            before = added(widths[: place + 1])
            if isinstance(before, int):
                end = draft.ints(before)
            else:
                end = draft.op("Add", start, draft.op("Shape", value, start=axis, end=axis + 1))
            piece = draft.op("Slice", slope, start, end, draft.ints(axis), draft.ints(1)) if want else None
            found.append(None if piece is None else closed(step, piece, x))
            start = end
        return found

    return y, back
