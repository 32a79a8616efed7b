"""Places of a dimension that each sample names itself, as the last state of a sequence by its length: each is compared
with all places, so that what it leaves learns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


def gather(step: Step, layer: str, input: Map, dim: int, index: Map) -> tuple[Map, Pullback]:
    """torch.gather along a dimension behind the batch; ``index`` has the sizes of ``input`` in all others."""
    draft, own = step.draft, [step.known(one) for one in sizes(input)]
    axis, wide = dim % (1 + len(own)), list(sizes(index))
    asked = [step.known(one) for one in wide]
    if axis == 0 or asked[: axis - 1] + asked[axis:] != own[: axis - 1] + own[axis:]:
        raise refused(layer, f"gathers {asked} of {own} along {dim}", "give an index of the other sizes: expand it")
    out = shaped(step, layer, [*sizes(input)[: axis - 1], wide[axis - 1], *sizes(input)[axis:]])
    full = draft.op("Unsqueeze", opened(step, input.value, input), draft.ints(axis))
    hit = _hit(step, index, axis + 1, own[axis - 1], len(own) + 2)
    y = draft.sum(draft.op("Mul", hit, full), axis + 1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.op("Unsqueeze", opened(step, g, out), draft.ints(axis + 1))
        return [closed(step, draft.sum(draft.op("Mul", hit, slope), axis), input), None]

    return filled(step, y, out), back


def of_each(step: Step, layer: str, x: Map, at: Map) -> tuple[Map, Pullback]:
    """``x[torch.arange(len(x)), at]``: one place behind the batch for each sample, of which ``at`` is one number."""
    draft, wide = step.draft, sizes(x)
    if not at.single or not wide:
        raise refused(layer, f"takes places {sizes(at)} of {wide}", "name one place of each sample")
    out = shaped(step, layer, wide[1:])
    hit = _hit(step, at, 1, step.known(wide[0]), 1 + len(wide))
    y = draft.sum(draft.op("Mul", hit, opened(step, x.value, x)), 1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.op("Unsqueeze", opened(step, g, out), draft.ints(1))
        return [closed(step, draft.op("Mul", hit, slope), x)]

    return filled(step, y, out), back


def _hit(step: Step, at: Map, axis: int, many: int, rank: int) -> str:
    """1 at each place that is named and 0 elsewhere, along one more dimension; numbers below 0 count from the end."""
    draft = step.draft
    named = opened(step, at.value, at)
    named = draft.op("Cast", named, to=1) if draft.whole(at.value) else named
    for place in range(axis, max(axis + 1, rank - len(sizes(at)))):
        named = draft.op("Unsqueeze", named, draft.ints(place))
    below = draft.op("Less", named, draft.constant(0.0))
    named = draft.op("Where", below, draft.op("Add", named, draft.constant(float(many))), named)
    places = np.arange(many, dtype=np.float32).reshape([-1 if i == axis else 1 for i in range(rank)])
    return draft.op("Cast", draft.op("Equal", named, draft.constant(places)), to=1)
