"""Values that a mask takes away: ``masked_fill`` and ``torch.where`` beside a number."""

from __future__ import annotations

from collections.abc import Sequence

from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, filled, opened, sizes


def inverted(step: Step, layer: str, mask: Map) -> tuple[Map, Pullback]:
    """What a mask leaves: a mask is 1 or 0 here."""
    rest = step.draft.op("Sub", step.draft.number(1.0, 2 + len(mask.space)), mask.value)
    return mask.like(rest), lambda g, wanted: [None]


def masked_fill(step: Step, layer: str, x: Map, mask: Map, value: float) -> tuple[Map, Pullback]:
    """x, with ``value`` where ``mask`` is; the mask may have sizes of 1 where x has others."""
    draft, own, theirs = step.draft, sizes(x), sizes(mask) if isinstance(mask, Map) else ()
    pairs = list(zip(map(step.known, own), map(step.known, theirs), strict=False))
    if len(own) != len(theirs) or any(n not in (1, m) for m, n in pairs) or not isinstance(value, int | float):
        raise refused(
            layer, f"fills {own} where a mask of {theirs} is", "make the mask of as many dimensions: x[:, None]"
        )
    gone = draft.op("Greater", opened(step, mask.value, mask), draft.constant(0.5))
    y = filled(step, draft.op("Where", gone, draft.constant(float(value)), opened(step, x.value, x)), x)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [closed(step, draft.op("Where", gone, draft.constant(0.0), opened(step, g, x)), x), None]

    return y, back


def where(step: Step, layer: str, mask: Map, x: Map | float, y: Map | float) -> tuple[Map, Pullback]:
    """A map where ``mask`` is or is not, and a number elsewhere."""
    if isinstance(x, Map) == isinstance(y, Map):
        raise refused(layer, "chooses among two maps or none", "choose between a map and a number, or add products")
    if isinstance(x, Map):
        mask, _ = inverted(step, layer, mask)
        filled_in, back = masked_fill(step, layer, x, mask, y)  # type: ignore[arg-type]
    else:
        filled_in, back = masked_fill(step, layer, y, mask, x)  # type: ignore[arg-type]

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        one, _ = back(g, wanted)
        return [None, one]

    return filled_in, turned
