"""Masks, which say where something is so, and values that one takes away or chooses: comparisons, ``masked_fill`` and
``torch.where``. A mask is of the sample, or the same for each."""

from __future__ import annotations

from collections.abc import Sequence

from talaria.programs.graph import Size
from talaria.programs.layers.base import Map, Pullback, Step, no_way_back, refused
from talaria.programs.layers.broadcast import stretched, together
from talaria.programs.layers.parameters import Weight, each, require_met
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes

Either = Map | Weight | int | float


def inverted(step: Step, layer: str, mask: Map) -> tuple[Map, Pullback]:
    """What a mask leaves: a mask is 1 or 0 here."""
    rest = step.draft.op("Sub", step.draft.number(1.0, 2 + len(mask.space)), mask.value)
    return mask.like(rest), lambda g, wanted: [None]


def compared(step: Step, layer: str, kind: str, a: Either, b: Either, other_way: bool = False) -> tuple[Map, Pullback]:
    """1 where two maps, or a map and a number or what is the same for each sample, are so at a place (``kind`` Equal,
    Greater or Less), and 0 elsewhere, or the ``other_way`` round; sizes of 1 stand for any."""
    draft, maps = step.draft, [one for one in (a, b) if isinstance(one, Map)]
    if not maps or any(isinstance(one, bool) or not isinstance(one, Either) for one in (a, b)):
        raise refused(layer, "compares what is no number", "compare maps with numbers, parameters or maps")
    wide = together(step, layer, "compares", [sizes(one) for one in maps])
    for one in (a, b):
        wide = _beside(step, wide, one.shape) if isinstance(one, Weight) else wide
    if len(maps) == 1 and [*map(step.known, sizes(maps[0]))] != [*map(step.known, wide)]:
        a, b = (_laid_out(step, layer, one, wide)[0] for one in (a, b))
    out = shaped(step, layer, wide)
    whole = all(draft.whole(one.value) if isinstance(one, Map) else type(one) is int for one in (a, b))

    def value(one: Either) -> str:
        if whole and isinstance(one, int):
            return draft.constant(one, "int64")
        found = _met(step, layer, one, sizes(out), "compares")
        return draft.op("Cast", found, to=1) if isinstance(one, Map) and draft.whole(one.value) and not whole else found

    found = draft.op(kind, value(a), value(b))
    found = draft.op("Not", found) if other_way else found
    return filled(step, draft.op("Cast", found, to=1), out), lambda g, wanted: [None] * len(maps)


def hidden(step: Step, layer: str, wide: Sequence[Size], mask: Map | Weight) -> str:
    """Where a ``mask`` is, as it meets a value of the sizes ``wide`` behind the batch; the mask may have sizes of 1
    where these are others."""
    draft, own = step.draft, [step.known(one) for one in wide]
    if isinstance(mask, Weight):
        require_met(layer, mask, own, "hides by")
    elif len(sizes(mask)) != len(own) or any(
        step.known(n) not in (1, m) for n, m in zip(sizes(mask), own, strict=True)
    ):
        what = f"meets {own} with a mask of {sizes(mask)}"
        raise refused(layer, what, "make the mask of as many dimensions: x[:, None]")
    value = mask.value(step) if isinstance(mask, Weight) else opened(step, mask.value, mask)
    return draft.op("Greater", value, draft.constant(0.5))


def masked_fill(step: Step, layer: str, x: Map, mask: Map | Weight, value: float) -> tuple[Map, Pullback]:
    """x, with ``value`` where ``mask`` is."""
    if not isinstance(x, Map) or not isinstance(mask, Map | Weight) or not isinstance(value, int | float):
        raise refused(layer, "fills otherwise than a map by a mask with a number", "give a map, its mask and a number")
    return _chosen(step, x, hidden(step, layer, sizes(x), mask), value)


def where(step: Step, layer: str, mask: Map | Weight, x: Either, y: Either) -> tuple[Map, Pullback]:
    """One of two values where ``mask`` is and the other elsewhere: maps, numbers, and what is the same for each sample;
    sizes of 1 stand for any."""
    draft, given = step.draft, [one for one in (mask, x, y) if isinstance(one, Map)]
    numbered = all(isinstance(one, Either) for one in (x, y)) and isinstance(mask, Map | Weight)
    if not numbered or not any(isinstance(one, Map) for one in (x, y)):
        raise refused(
            layer, "chooses otherwise than of a map and another value", "give a mask, a map and another value"
        )
    wide = together(step, layer, "chooses among", [sizes(one) for one in given])
    (a, of_a), (b, of_b) = (_laid_out(step, layer, one, wide) for one in (x, y))
    out, here = shaped(step, layer, wide), hidden(step, layer, wide, mask)
    values = [_met(step, layer, one, wide, "chooses") for one in (a, b)]

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope, none, found = opened(step, g, out), draft.constant(0.0), list[str | None]([None] * isinstance(mask, Map))
        slopes = draft.op("Where", here, slope, none), draft.op("Where", here, none, slope)
        for own, one, way in zip(slopes, (a, b), (of_a, of_b), strict=True):
            if isinstance(one, Map) and way is not None:
                found += way(closed(step, own, one), [True])[:1]
            elif isinstance(one, Weight):
                one.train(step, each(step, own, one.shape, len(wide)))
        return found

    return filled(step, draft.op("Where", here, *values), out), no_way_back if step.looks else back


def _met(step: Step, layer: str, one: Either, wide: Sequence[Size], does: str) -> str:
    """A value beside maps of the sizes ``wide`` behind the batch, as the layer ``does`` something with both."""
    if isinstance(one, Map):
        return opened(step, one.value, one)
    if isinstance(one, Weight):
        require_met(layer, one, [step.known(size) for size in wide], does)
        return one.value(step)
    return step.draft.constant(float(one))


def _beside(step: Step, wide: Sequence[Size], shape: Sequence[int]) -> list[Size]:
    """The sizes ``wide`` behind the batch, of which those of 1 are stretched to a tensor of this ``shape``."""
    behind = (*(1,) * (len(wide) - len(shape)), *shape)[-len(wide) :] if wide else ()
    return [n if step.known(own) == 1 else own for own, n in zip(wide, behind, strict=True)]


def _laid_out(step: Step, layer: str, one: Either, wide: Sequence[Size]) -> tuple[Either, Pullback | None]:
    """A value, a map of the sizes ``wide`` behind the batch, and a map's way back."""
    if not isinstance(one, Map):
        return one, None
    same = [step.known(size) for size in sizes(one)] == [step.known(size) for size in wide]
    return (one, lambda g, wanted: [g]) if same else stretched(step, layer, one, wide)


def _chosen(step: Step, x: Map, gone: str, value: float) -> tuple[Map, Pullback]:
    draft = step.draft
    y = filled(step, draft.op("Where", gone, draft.constant(float(value)), opened(step, x.value, x)), x)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = closed(step, draft.op("Where", gone, draft.constant(0.0), opened(step, g, x)), x)
        return [slope, None][: len(wanted)]

    return y, back
