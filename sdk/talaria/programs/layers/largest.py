"""The largest and the smallest value along some dimensions behind the batch, as ``max``, ``amax``, ``min`` and ``amin``
give them, the smooth one of ``logsumexp``, and the larger and smaller one of two maps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from talaria.programs.layers.base import Map, Pullback, Step
from talaria.programs.layers.broadcast import both
from talaria.programs.layers.parameters import Weight, beside_weight, fixed
from talaria.programs.layers.sequence import Dims, along, apart, closed, filled, opened

Either = Map | Weight | float


def largest(step: Step, layer: str, x: Map, dim: Dims = (), keepdim: bool = False) -> tuple[Map, Pullback]:
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


def logsumexp(step: Step, layer: str, x: Map, dim: Dims = None, keepdim: bool = False) -> tuple[Map, Pullback]:
    """The logarithm of the sum of exponentials along ``dim``."""
    draft, (gone, out) = step.draft, along(step, layer, x, dim, keepdim)
    full = opened(step, x.value, x)
    most = draft.op("ReduceMax", full, draft.ints(*gone), keepdims=1)
    total = draft.sum(draft.op("Exp", draft.op("Sub", full, most)), *gone, keep=True)
    whole = draft.op("Add", most, draft.op("Log", total))
    y = whole if keepdim else draft.sum(whole, *gone)  # over sizes of 1

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        share = draft.op("Exp", draft.op("Sub", full, whole))
        return [closed(step, draft.op("Mul", share, apart(draft, opened(step, g, out), gone, keepdim)), x)]

    return filled(step, y, out), back


def larger(step: Step, layer: str, input: Either, other: Either) -> tuple[Map, Pullback]:
    """The larger one of two values at each place. Equal ones share the gradient, as torch's ``maximum`` has it."""
    return _of_two(step, layer, "Max", input, other)


def smaller(step: Step, layer: str, input: Either, other: Either) -> tuple[Map, Pullback]:
    """The smaller one, likewise."""
    return _of_two(step, layer, "Min", input, other)


def _of_two(step: Step, layer: str, kind: str, *given: Either) -> tuple[Map, Pullback]:
    a, b = (fixed(Tensor([one])) if isinstance(one, int | float) else one for one in given)
    if isinstance(a, Map) and isinstance(b, Map):
        return both(step, layer, kind, a, b)
    return beside_weight(step, layer, kind, a, b)
