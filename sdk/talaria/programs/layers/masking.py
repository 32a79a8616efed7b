"""Values that a mask takes away: ``masked_fill`` and ``torch.where`` beside a number. The mask is of the sample, or the
same for each."""

from __future__ import annotations

from collections.abc import Sequence

from talaria.programs.graph import Size
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.parameters import Weight, require_met
from talaria.programs.layers.sequence import closed, filled, opened, sizes


def inverted(step: Step, layer: str, mask: Map) -> tuple[Map, Pullback]:
    """What a mask leaves: a mask is 1 or 0 here."""
    rest = step.draft.op("Sub", step.draft.number(1.0, 2 + len(mask.space)), mask.value)
    return mask.like(rest), lambda g, wanted: [None]


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


def where(step: Step, layer: str, mask: Map | Weight, x: Map | float, y: Map | float) -> tuple[Map, Pullback]:
    """A map where ``mask`` is or is not, and another one of its sizes or a number elsewhere."""
    draft, given = step.draft, [one for one in (x, y) if isinstance(one, Map)]
    fits = len({tuple(step.known(one) for one in sizes(each)) for each in given}) == 1
    if not fits or not all(isinstance(one, Map | int | float) for one in (x, y)) or not isinstance(mask, Map | Weight):
        raise refused(
            layer, "chooses otherwise than among maps of one shape", "give a mask, a map, and one or a number"
        )
    like = given[0]
    here = hidden(step, layer, sizes(like), mask)
    values = [opened(step, one.value, one) if isinstance(one, Map) else draft.constant(float(one)) for one in (x, y)]
    none = draft.constant(0.0)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = opened(step, g, like)
        slopes = draft.op("Where", here, slope, none), draft.op("Where", here, none, slope)
        found = [closed(step, own, one) for own, one in zip(slopes, (x, y), strict=True) if isinstance(one, Map)]
        return [None, *found] if isinstance(mask, Map) else found

    return filled(step, draft.op("Where", here, *values), like), back


def _chosen(step: Step, x: Map, gone: str, value: float) -> tuple[Map, Pullback]:
    draft = step.draft
    y = filled(step, draft.op("Where", gone, draft.constant(float(value)), opened(step, x.value, x)), x)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = closed(step, draft.op("Where", gone, draft.constant(0.0), opened(step, g, x)), x)
        return [slope, None][: len(wanted)]

    return y, back
