"""The largest and the smallest value along some dimensions behind the batch, as ``max``, ``amax``, ``min`` and ``amin``
give them."""

from __future__ import annotations

from collections.abc import Sequence

from talaria.programs.layers.base import Map, Pullback, Step
from talaria.programs.layers.sequence import along, apart, closed, filled, opened


def largest(
    step: Step, layer: str, x: Map, dim: int | Sequence[int] = (), keepdim: bool = False
) -> tuple[Map, Pullback]:
    """The largest value along ``dim``. Places that have it share its gradient, as torch's ``amax`` has it."""
    draft, (gone, out) = step.draft, along(step, layer, x, dim, keepdim, "takes the largest along")
    full = opened(step, x.value, x)
    y = draft.op("ReduceMax", full, draft.ints(*gone), keepdims=int(keepdim))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        hit = draft.op("Cast", draft.op("Equal", full, apart(draft, y, gone, keepdim)), to=1)
        share = draft.op("Div", apart(draft, opened(step, g, out), gone, keepdim), draft.sum(hit, *gone, keep=True))
        return [closed(step, draft.op("Mul", hit, share), x)]

    return filled(step, y, out), back


def smallest(
    step: Step, layer: str, x: Map, dim: int | Sequence[int] = (), keepdim: bool = False
) -> tuple[Map, Pullback]:
    """The smallest value along ``dim``, likewise."""
    draft = step.draft
    most, back = largest(step, layer, x.like(draft.op("Neg", x.value)), dim, keepdim)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        (slope,) = back(draft.op("Neg", g), wanted)
        return [None if slope is None else draft.op("Neg", slope)]

    return most.like(draft.op("Neg", most.value)), turned
