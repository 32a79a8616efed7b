"""PReLU: a slope below zero that is learned, one for all channels or one for each (He et al. 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.nn import Module, PReLU

from talaria.programs.graph import Size
from talaria.programs.layers.base import Map, Pullback, Step, refused


def prelu(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x, or x times the slope where it is below zero."""
    own, draft, (x,) = cast(PReLU, module), step.draft, given
    one, rank = own.num_parameters == 1, 2 + len(x.space)
    if not one and x.lead:
        raise refused(layer, "has a slope for each of the moments of a sequence", "use PReLU()")
    wide: tuple[Size, ...] = (1,) if one else (x.channels,)
    slope = step.weight(layer, "weight", own.weight, wide)
    assert slope is not None
    if not one and x.space:
        slope = draft.reshape(slope, -1, *(1,) * (len(x.space) + (not step.looks)))
    zero = draft.constant(0.0)
    up = draft.op("Greater", x.value, zero)
    y = draft.op("Where", up, x.value, draft.op("Mul", x.value, slope))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        def gradient() -> str:
            each = draft.op("Mul", g, draft.op("Where", up, zero, x.value))
            return draft.reshape(draft.sum(each, *(range(rank) if one else x.axes)), -1)

        step.trained(own, layer, "weight", gradient)
        return [draft.op("Where", up, g, draft.op("Mul", g, slope)) if wanted[0] else None]

    return x.like(y), back
