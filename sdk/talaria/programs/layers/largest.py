"""The largest and the smallest value along some dimensions behind the batch, as ``max``, ``amax``, ``min`` and ``amin``
give them."""

from __future__ import annotations

from collections.abc import Sequence

from talaria.programs.graph import Size
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


def largest(
    step: Step, layer: str, x: Map, dim: int | Sequence[int] = (), keepdim: bool = False
) -> tuple[Map, Pullback]:
    """The largest value along ``dim``. Places that have it share its gradient, as torch's ``amax`` has it."""
    wide, draft = sizes(x), step.draft
    gone = sorted({one % (1 + len(wide)) for one in ((dim,) if isinstance(dim, int) else dim)})
    if not gone or gone[0] == 0 or (len(gone) == len(wide) and not keepdim):
        raise refused(layer, f"takes the largest along {dim} of {wide}", "name dimensions behind the batch, leave one")
    rest: list[Size] = [1 if i in gone else n for i, n in enumerate(wide, 1) if keepdim or i not in gone]
    out, full = shaped(step, layer, rest), opened(step, x.value, x)
    y = draft.op("ReduceMax", full, draft.ints(*gone), keepdims=int(keepdim))

    def apart(value: str) -> str:
        for axis in () if keepdim else gone:
            value = draft.op("Unsqueeze", value, draft.ints(axis))
        return value

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        hit = draft.op("Cast", draft.op("Equal", full, apart(y)), to=1)
        share = draft.op("Div", apart(opened(step, g, out)), draft.sum(hit, *gone, keep=True))
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
