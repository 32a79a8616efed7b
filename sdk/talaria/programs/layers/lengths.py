"""How long vectors are along dimensions behind the batch (the 2-norm, the 1-norm, the largest size), the same vectors
of length 1, and how alike the directions of two are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
from torch.nn import Identity, Module

from talaria.programs.graph import Draft
from talaria.programs.layers.activation import Of, Slope, rule_of
from talaria.programs.layers.base import Map, Pullback, Step, chained, refused
from talaria.programs.layers.broadcast import both
from talaria.programs.layers.elementwise import size
from talaria.programs.layers.largest import largest
from talaria.programs.layers.parameters import Weight, beside_weight
from talaria.programs.layers.sequence import Dims, along, apart, averaged, closed, filled, opened, sizes

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
    """The root of the sum of squares along ``dim``; of nothing but zeros it learns nothing, as in torch. With p=1 the
    sum of sizes, with p=inf the largest."""
    if p in (1, inf) and dtype is None:
        far, way = rule_of(size)(step, layer, Identity(), [x])
        of = partial(averaged, whole=True) if p == 1 else largest
        longest, rest_of_way = of(step, layer, far, dim, keepdim)
        return longest, chained(way, rest_of_way)
    if p not in (2, None, "fro") or dtype is not None:
        raise refused(layer, f"takes the norm of p={p!r}", "use p=1, 2 or inf, or write sums of powers of x.abs()")
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
    if isinstance(ord, int | float) and not isinstance(dim, int) and len(dim or (0, 0)) > 1:
        raise refused(layer, f"takes ord={ord} of matrices", "leave ord out, or use torch.linalg.vector_norm")
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
    if p not in (1, 2):
        raise refused(layer, f"normalizes by p={p!r}", "use p=1 or 2, or divide by x.norm")
    axes, _ = along(step, layer, x, dim, True)
    y, slope = unit(axes, eps, p)(step.draft, opened(step, x.value, x), Module())
    return filled(step, y, x), lambda g, wanted: [closed(step, slope(opened(step, g, x)), x)]


def cosine_similarity(
    step: Step, layer: str, x1: Map | Weight, x2: Map | Weight, dim: int = 1, eps: float = 1e-8
) -> tuple[Map, Pullback]:
    """The product of two maps' directions along ``dim``, of which one may be a parameter."""
    x = x1 if isinstance(x1, Map) else x2
    if not isinstance(x, Map):
        raise refused(layer, "compares parameters alone", "let each meet a map")
    wide = sizes(x)
    behind = dim % (1 + len(wide)) - len(wide) - 1  # counted from the end, where both have it
    if len({_size_at(step, one, behind) for one in (x1, x2)}) > 1:
        raise refused(layer, "compares vectors of two lengths", "give both one size along dim")
    (a, of_a), (b, of_b) = (_direction(step, layer, one, behind, eps) for one in (x1, x2))
    if isinstance(a, Map) and isinstance(b, Map):
        met, apart_again = both(step, layer, "Mul", a, b)
    else:
        met, apart_again = beside_weight(step, layer, "Mul", a, b)
    y, back = averaged(step, layer, met, behind, whole=True)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        (slope,) = back(g, [True])
        assert slope is not None
        slopes = zip(apart_again(slope, wanted), (way for way in (of_a, of_b) if way is not None), strict=True)
        return [None if one is None else way(one, [True])[0] for one, way in slopes]

    return y, turned


def _size_at(step: Step, one: Map | Weight, behind: int) -> int:
    shape = one.shape if isinstance(one, Weight) else [step.known(size) for size in sizes(one)]
    return shape[behind] if -behind <= len(shape) else 0


def _direction(
    step: Step, layer: str, one: Map | Weight, behind: int, eps: float
) -> tuple[Map | Weight, Pullback | None]:
    """Vectors of length 1, and the way back from a map of them."""
    if isinstance(one, Map):
        return normalize(step, layer, one, 2, behind, eps)
    return one.bent(unit([len(one.shape) + behind], eps)), None


def unit(axes: Sequence[int], eps: float, p: float = 2) -> Of:
    """Each value over the length of what stands along ``axes``; ``p`` is 1 or 2."""
    if p == 1:
        return partial(_share, axes, eps)

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


def _share(axes: Sequence[int], eps: float, draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """Each value over the sum of all sizes along ``axes``."""
    least, (far, _) = draft.constant(max(eps, _LEAST)), size(draft, x, module)
    total = draft.sum(far, *axes, keep=True)
    length = draft.op("Max", total, least)
    y = draft.op("Div", x, length)

    def slope(g: str) -> str:
        met = draft.sum(draft.op("Mul", g, y), *axes, keep=True)
        met = draft.op("Where", draft.op("Greater", total, least), met, draft.constant(0.0))
        return draft.op("Div", draft.op("Sub", g, draft.op("Mul", draft.op("Sign", x), met)), length)

    return y, slope


def rooted(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """:func:`root` as a function of each value."""
    y, rate = root(draft, x)
    return y, lambda g: draft.op("Mul", g, draft.op("Mul", rate, draft.constant(0.5)))


def root(draft: Draft, square: str) -> tuple[str, str]:
    """The root of what is not below zero, and 1 over it; of zero both are 0, so that no slope is beyond all bounds."""
    zero = draft.constant(0.0)
    above = draft.op("Greater", square, zero)
    found = draft.op("Sqrt", draft.op("Where", above, square, draft.constant(1.0)))
    return draft.op("Where", above, found, zero), draft.op("Where", above, draft.op("Reciprocal", found), zero)
