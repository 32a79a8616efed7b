"""Functions of each value that are no layers of torch: roots, powers, logarithms, sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import Module
from torch.nn import functional as F

from talaria.programs.graph import Draft
from talaria.programs.layers.activation import OF, Of, Slope


def negated(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    return draft.op("Neg", x), lambda g: draft.op("Neg", g)


def _exponential(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Exp", x)
    return y, lambda g: draft.op("Mul", g, y)


def _exponential_less_one(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Exp", x)
    return draft.op("Sub", y, draft.constant(1.0)), lambda g: draft.op("Mul", g, y)


def _error(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    def slope(g: str) -> str:
        bell = draft.op("Exp", draft.op("Neg", draft.op("Mul", x, x)))
        return draft.op("Mul", g, draft.op("Mul", bell, draft.constant(2 / math.sqrt(math.pi))))

    return draft.op("Erf", x), slope


def _logarithm(draft: Draft, x: str, module: Module, base: float = math.e, beyond: float = 0.0) -> tuple[str, Slope]:
    """Of x + ``beyond``."""
    x = draft.op("Add", x, draft.constant(beyond)) if beyond else x
    y, share = draft.op("Log", x), draft.constant(1 / math.log(base))
    if base == math.e:
        return y, lambda g: draft.op("Div", g, x)
    return draft.op("Mul", y, share), lambda g: draft.op("Div", draft.op("Mul", g, share), x)


def _sine(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    return draft.op("Sin", x), lambda g: draft.op("Mul", g, draft.op("Cos", x))


def _cosine(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    return draft.op("Cos", x), lambda g: draft.op("Neg", draft.op("Mul", g, draft.op("Sin", x)))


def _root(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Sqrt", x)
    return y, lambda g: draft.op("Div", draft.op("Mul", g, draft.constant(0.5)), y)


def _over_root(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Reciprocal", draft.op("Sqrt", x))

    def slope(g: str) -> str:
        cube = draft.op("Mul", y, draft.op("Mul", y, y))
        return draft.op("Mul", g, draft.op("Mul", cube, draft.constant(-0.5)))

    return y, slope


def over(number: float) -> Of:
    """``number`` divided by each value."""

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        y = draft.op("Reciprocal", x) if number == 1 else draft.op("Div", draft.constant(number), x)
        return y, lambda g: draft.op("Neg", draft.op("Mul", g, draft.op("Div", y, x)))

    return of


def _square(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    return draft.op("Mul", x, x), lambda g: draft.op("Mul", g, draft.op("Mul", x, draft.constant(2.0)))


def to_the(exponent: float) -> Of:
    """Each value to the power of ``exponent``, which is not 0."""
    known = {2: _square, 0.5: _root, -0.5: _over_root, -1: over(1.0)}
    if exponent in known:
        return known[exponent]

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        def slope(g: str) -> str:
            steep = draft.op("Pow", x, draft.constant(exponent - 1.0))
            return draft.op("Mul", g, draft.op("Mul", steep, draft.constant(exponent)))

        return draft.op("Pow", x, draft.constant(exponent)), slope

    return of


def size(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """How far each value is from 0, which itself learns nothing, as in torch."""
    below = draft.op("Less", x, draft.constant(0.0))
    return draft.op("Where", below, draft.op("Neg", x), x), lambda g: draft.op("Mul", g, draft.op("Sign", x))


def _side(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    return draft.op("Sign", x), _level(draft)


def _whole(kind: str) -> Of:
    """The nearest whole number, or the next one below or above, of which nothing is learned, as in torch."""
    return lambda draft, x, module: (draft.op(kind, x), _level(draft))


def _cut_off(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    far, _ = size(draft, x, module)
    return draft.op("Mul", draft.op("Sign", x), draft.op("Floor", far)), _level(draft)


def _level(draft: Draft) -> Slope:
    """The way back through steps, of which nothing is learned."""
    return lambda g: draft.op("Mul", g, draft.constant(0.0))


def between(low: float | None, high: float | None) -> Of:
    """No less than ``low`` and no more than ``high``; a value at a bound rests, as in torch."""

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        met = list[tuple[str, str, str]]()
        for bound, is_beyond, is_within in ((low, "Less", "Greater"), (high, "Greater", "Less")):
            if bound is not None:
                level = draft.constant(float(bound))
                met.append((is_within, x, level))
                x = draft.op("Where", draft.op(is_beyond, x, level), level, x)

        def slope(g: str) -> str:
            for is_within, value, level in reversed(met):
                g = draft.op("Where", draft.op(is_within, value, level), g, draft.constant(0.0))
            return g

        return x, slope

    return of


def plus(number: float) -> Of:
    """Each value and ``number``."""
    return lambda draft, x, module: (draft.op("Add", x, draft.constant(number)), lambda g: g)


def times(number: float) -> Of:
    """Each value ``number`` times."""

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        rate = draft.constant(number)
        return draft.op("Mul", x, rate), lambda g: draft.op("Mul", g, rate)

    return of


PLAIN: Mapping[Callable[..., object] | str, Of] = {
    **dict.fromkeys((operator.neg, torch.neg, "neg"), negated),
    **dict.fromkeys((torch.exp, "exp"), _exponential),
    **dict.fromkeys((torch.expm1, "expm1"), _exponential_less_one),
    **dict.fromkeys((torch.erf, "erf"), _error),
    **dict.fromkeys((torch.round, "round"), _whole("Round")),
    **dict.fromkeys((torch.floor, "floor"), _whole("Floor")),
    **dict.fromkeys((torch.ceil, "ceil"), _whole("Ceil")),
    **dict.fromkeys((torch.trunc, torch.fix, "trunc", "fix"), _cut_off),
    **dict.fromkeys((torch.log, "log"), _logarithm),
    **dict.fromkeys((torch.log2, "log2"), partial(_logarithm, base=2)),
    **dict.fromkeys((torch.log10, "log10"), partial(_logarithm, base=10)),
    **dict.fromkeys((torch.log1p, "log1p"), partial(_logarithm, beyond=1.0)),
    **dict.fromkeys((torch.sin, "sin"), _sine),
    **dict.fromkeys((torch.cos, "cos"), _cosine),
    **dict.fromkeys((torch.sqrt, "sqrt"), _root),
    **dict.fromkeys((torch.rsqrt, "rsqrt"), _over_root),
    **dict.fromkeys((torch.reciprocal, "reciprocal"), over(1.0)),
    **dict.fromkeys((torch.square, "square"), _square),
    **dict.fromkeys((operator.abs, torch.abs, "abs"), size),
    **dict.fromkeys((torch.sign, torch.sgn, "sign", "sgn"), _side),
}
"""Functions of each value alone, and methods."""
EACH: Mapping[Callable[..., object] | str, tuple[Of, Module]] = {
    **{function: (of, nn.Identity()) for function, of in PLAIN.items()},
    **dict.fromkeys((torch.relu, F.relu, "relu", "relu_"), (OF[nn.ReLU], nn.ReLU())),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), (OF[nn.Sigmoid], nn.Sigmoid())),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), (OF[nn.Tanh], nn.Tanh())),
    F.silu: (OF[nn.SiLU], nn.SiLU()),
}
"""All functions and methods that are told nothing but the value."""
