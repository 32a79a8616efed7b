"""How long vectors are along dimensions behind the batch (the 2-norm), and the same vectors of length 1, as heads that
compare directions read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.nn import Module

from talaria.programs.graph import Draft
from talaria.programs.layers.activation import Of, Slope
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import Dims, along, apart, closed, filled, opened

_LEAST = float(np.finfo(np.float32).tiny)


def norm(
    step: Step,
    layer: str,
    x: Map,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: object = None,
    out: None = None,
) -> tuple[Map, Pullback]:
    """The root of the sum of squares along ``dim``; of nothing but zeros it learns nothing, as in torch."""
    if p not in (2, None, "fro") or dtype is not None:
        raise refused(layer, f"takes the norm of p={p!r}", "use p=2, or write sums of x.abs()")
    draft, (gone, rest) = step.draft, along(step, layer, x, dim, keepdim)
    full = opened(step, x.value, x)
    y, rate = root(draft, draft.sum(draft.op("Mul", full, full), *gone, keep=keepdim))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.op("Mul", opened(step, g, rest), rate)
        return [closed(step, draft.op("Mul", full, apart(draft, slope, gone, keepdim)), x)]

    return filled(step, y, rest), back


def linalg_norm(
    step: Step, layer: str, x: Map, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: object = None
) -> tuple[Map, Pullback]:
    """The same by the name that torch.linalg gives it; of matrices only the one that is a root of squares."""
    if ord == 2 and not isinstance(dim, int) and len(dim or (0, 0)) > 1:
        raise refused(layer, "takes the largest singular value", "leave ord out")
    return norm(step, layer, x, ord, dim, keepdim, dtype)


def vector_norm(
    step: Step, layer: str, x: Map, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: object = None
) -> tuple[Map, Pullback]:
    """The same over any dimensions."""
    return norm(step, layer, x, ord, dim, keepdim, dtype)


def normalize(
    step: Step, layer: str, x: Map, p: Any = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None
) -> tuple[Map, Pullback]:
    """x over its length along ``dim``, or over ``eps`` where it is shorter."""
    if p != 2:
        raise refused(layer, f"normalizes by p={p!r}", "use p=2, or divide by sums of x.abs()")
    axes, _ = along(step, layer, x, dim, True)
    y, slope = unit(axes, eps)(step.draft, opened(step, x.value, x), Module())
    return filled(step, y, x), lambda g, wanted: [closed(step, slope(opened(step, g, x)), x)]


def unit(axes: Sequence[int], eps: float) -> Of:
    """Each value over the length of what stands along ``axes``."""

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        least = draft.constant(max(eps * eps, _LEAST))
        square = draft.sum(draft.op("Mul", x, x), *axes, keep=True)
        length = draft.op("Sqrt", draft.op("Max", square, least))
        y = draft.op("Div", x, length)

        def slope(g: str) -> str:
            met = draft.sum(draft.op("Mul", g, y), *axes, keep=True)
            met = draft.op("Where", draft.op("Greater", square, least), met, draft.constant(0.0))
            return draft.op("Div", draft.op("Sub", g, draft.op("Mul", y, met)), length)

        return y, slope

    return of


def root(draft: Draft, square: str) -> tuple[str, str]:
    """The root of what is not below zero, and 1 over it; of zero both are 0, so that no slope is beyond all bounds."""
    zero = draft.constant(0.0)
    above = draft.op("Greater", square, zero)
    found = draft.op("Sqrt", draft.op("Where", above, square, draft.constant(1.0)))
    return draft.op("Where", above, found, zero), draft.op("Where", above, draft.op("Reciprocal", found), zero)
