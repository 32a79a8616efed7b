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
    """A map where ``mask`` is or is not, and a number elsewhere."""
    one, number = (x, y) if isinstance(x, Map) else (y, x)
    if not isinstance(one, Map) or not isinstance(mask, Map | Weight) or not isinstance(number, int | float):
        raise refused(layer, "chooses among two maps or none", "choose between a map and a number, or add products")
    gone = hidden(step, layer, sizes(one), mask)
    filled_in, back = _chosen(step, one, step.draft.op("Not", gone) if one is x else gone, number)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        (slope, *_) = back(g, wanted)
        return [None, slope] if isinstance(mask, Map) else [slope]

    return filled_in, turned


def _chosen(step: Step, x: Map, gone: str, value: float) -> tuple[Map, Pullback]:
    draft = step.draft
    y = filled(step, draft.op("Where", gone, draft.constant(float(value)), opened(step, x.value, x)), x)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = closed(step, draft.op("Where", gone, draft.constant(0.0), opened(step, g, x)), x)
        return [slope, None][: len(wanted)]

    return y, back
