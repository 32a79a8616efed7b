"""How far values spread around their mean along dimensions behind the batch: variance and standard deviation, as
networks pool speech by statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.lengths import root
from talaria.programs.layers.sequence import Dims, along, apart, averaged, closed, filled, opened, sizes


def _spread(
    step: Step,
    layer: str,
    x: Map,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
    rooted: bool,
) -> tuple[Map, Pullback]:
    """The mean square of what is off the mean, over one value less than there are, or ``correction`` less; its root if
    it is ``rooted``, which learns nothing of values that are all the same, as in torch."""
    draft, (gone, out) = step.draft, along(step, layer, x, dim, keepdim)
    many = prod(step.known(sizes(x)[axis - 1]) for axis in gone)
    count = many - (int(unbiased) if correction is None else correction)
    if count < 1:
        raise refused(layer, f"takes the deviation of {many} values", "take it of more, or with unbiased=False")
    full, share = opened(step, x.value, x), draft.constant(1 / count)
    if rooted:  # begun at one of the values: the mean of equal ones may round, which the root would make much of
        full = draft.op("Sub", full, draft.op("ReduceMax", full, draft.ints(*gone), keepdims=1))
    off = draft.op("Sub", full, draft.mean(full, *gone, keep=True))
    y = draft.op("Mul", draft.sum(draft.op("Mul", off, off), *gone, keep=keepdim), share)
    y, rate = root(draft, y) if rooted else (y, draft.constant(2.0))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.op("Mul", draft.op("Mul", opened(step, g, out), rate), share)
        return [closed(step, draft.op("Mul", off, apart(draft, slope, gone, keepdim)), x)]

    return filled(step, y, out), back


def _mean(
    step: Step,
    layer: str,
    x: Map,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> tuple[Map, Pullback]:
    """The mean, asked for as a deviation is."""
    gone, _ = along(step, layer, x, dim, keepdim)
    return averaged(step, layer, x, gone, keepdim)


variance, deviation = partial(_spread, rooted=False), partial(_spread, rooted=True)
PAIRS = {"var_mean": (variance, _mean), "std_mean": (deviation, _mean)}
"""By the name of a function that gives two values: the calls of both."""
