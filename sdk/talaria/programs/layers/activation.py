"""Activations, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import Module
from torch.nn import functional as F

from talaria.programs.graph import EDGE, STEEP, Draft
from talaria.programs.layers.base import Map, Pullback, Rule, Step

_STRAIGHT = 20.0
"""A threshold of Softplus, which is torch's own, beyond which float32 does not tell its curve from a straight line."""
_FAR = 2.0**20
"""How far from 0 a bound may be of which a step is taken by a product."""
Slope = Callable[[str], str]
"""``gradient of the output -> gradient of the input``."""
Of = Callable[[Draft, str, Module], tuple[str, Slope]]
"""``draft, value, module -> what a function makes of each number, and the way back``."""


def rule_of(of: Of) -> Rule:
    """The rule of a function of each value."""

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        (x,) = given
        draft, small = step.draft, bool(x.space) and set(x.space) == {1}

        def flat(value: str) -> str:
            """Without sizes of 1 at the end: see :meth:`~talaria.programs.graph.Draft.number`."""
            return draft.reshape(value, 0, -1) if small else value

        def map(value: str) -> str:
            return draft.reshape(value, 0, 0, *x.space) if small else value

        y, slope = of(draft, flat(x.value), module)
        return x.like(map(y)), lambda g, wanted: [map(slope(flat(g)))]

    return rule


def _above(draft: Draft, x: str, bound: float = 0.0) -> str:
    """1 where ``x`` is above ``bound``, else 0, in one pass: Greater and a cast take one and a half times as long, Sign
    four times, and Where ten times as long as the product of a slope with this."""
    if bound == 0:
        return draft.op("HardSigmoid", x, alpha=STEEP, beta=0.0)
    return draft.op("HardSigmoid", x, alpha=EDGE, beta=-EDGE * float(np.float32(bound)))


def _below(draft: Draft, x: str, bound: float) -> str:
    """1 where ``x`` is below ``bound``, else 0."""
    return draft.op("HardSigmoid", x, alpha=-EDGE, beta=EDGE * float(np.float32(bound)))


def _between(draft: Draft, value: str, x: str, low: float, high: float) -> str:
    """``value`` where ``x`` is above ``low`` and below ``high``, else 0. Bounds are at most 2^20 away from 0."""
    return draft.op("Mul", draft.op("Mul", value, _above(draft, x, low)), _below(draft, x, high))


def _relu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Relu", x)
    return y, lambda g: draft.op("Mul", g, _above(draft, y))


def _hardtanh(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """ReLU6 is one of them."""
    own = cast(nn.Hardtanh, module)
    bounds = float(own.min_val), float(own.max_val)
    low, high = map(draft.constant, bounds)

    def slope(g: str) -> str:
        if max(map(abs, bounds)) <= _FAR:
            return _between(draft, g, x, *bounds)
        inside = draft.op("And", draft.op("Greater", x, low), draft.op("Less", x, high))
        return draft.op("Where", inside, g, draft.constant(0.0))

    return draft.op("Clip", x, low, high), slope


def _leaky_relu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    steep = float(cast(nn.LeakyReLU, module).negative_slope)
    rate = draft.constant(steep)
    if 0 <= steep <= 1:
        y = draft.op("Max", x, draft.op("Mul", x, rate))
        return y, lambda g: draft.op("Mul", g, draft.op("Max", _above(draft, x), rate))
    up = draft.op("Greater", x, draft.constant(0.0))
    return (
        draft.op("Where", up, x, draft.op("Mul", x, rate)),
        lambda g: draft.op("Where", up, g, draft.op("Mul", g, rate)),
    )


def _elu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    low, rate = draft.constant(0.0), draft.constant(float(cast(nn.ELU, module).alpha))
    up = draft.op("Greater", x, low)
    below = draft.op("Exp", draft.op("Clip", x, draft.constant(float("-inf")), low))
    y = draft.op("Where", up, x, draft.op("Mul", draft.op("Sub", below, draft.constant(1.0)), rate))
    return y, lambda g: draft.op("Where", up, g, draft.op("Mul", g, draft.op("Mul", below, rate)))


def _softplus(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """Beyond torch's own threshold the curve is straight to less than a rounding; a lower one is seen."""
    own = cast(nn.Softplus, module)
    beta, threshold = float(own.beta), float(own.threshold)
    steep = x if beta == 1 else draft.op("Mul", x, draft.constant(beta))
    y = draft.op("Softplus", steep)
    y = y if beta == 1 else draft.op("Mul", y, draft.constant(1 / beta))
    if threshold >= _STRAIGHT:
        return y, lambda g: draft.op("Mul", g, draft.op("Sigmoid", steep))
    up = draft.op("Greater", steep, draft.constant(threshold))
    return (
        draft.op("Where", up, x, y),
        lambda g: draft.op("Where", up, g, draft.op("Mul", g, draft.op("Sigmoid", steep))),
    )


def _sigmoid(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Sigmoid", x)
    return y, lambda g: draft.op("Mul", g, draft.op("Mul", y, draft.op("Sub", draft.constant(1.0), y)))


def _tanh(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    y = draft.op("Tanh", x)
    return y, lambda g: draft.op("Mul", g, draft.op("Sub", draft.constant(1.0), draft.op("Mul", y, y)))


def _silu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    s = draft.op("Sigmoid", x)
    y = draft.op("Mul", x, s)

    def slope(g: str) -> str:
        rest = draft.op("Mul", y, draft.op("Sub", draft.constant(1.0), s))
        return draft.op("Mul", g, draft.op("Add", s, rest))

    return y, slope


def _mish(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    s = draft.op("Tanh", draft.op("Softplus", x))

    def slope(g: str) -> str:
        bent = draft.op("Mul", draft.op("Sub", draft.constant(1.0), draft.op("Mul", s, s)), draft.op("Sigmoid", x))
        return draft.op("Mul", g, draft.op("Add", s, draft.op("Mul", x, bent)))

    return draft.op("Mul", x, s), slope


def _selu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """Klambauer et al. 2017, whose two numbers these are."""
    scale = draft.constant(1.0507009873554805)
    y, slope = _elu(draft, x, nn.ELU(1.6732632423543772))
    return draft.op("Mul", y, scale), lambda g: slope(draft.op("Mul", g, scale))


def _gelu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    if cast(nn.GELU, module).approximate == "tanh":
        return _gelu_by_tanh(draft, x)
    part = draft.op("Mul", x, draft.constant(math.sqrt(0.5)))
    below = draft.op("HardSigmoid", draft.op("Erf", part), alpha=0.5, beta=0.5)  # a half and half of it, in one pass

    def slope(g: str) -> str:
        top = draft.constant(-math.log(2 * math.pi) / 2)
        density = draft.op("Exp", draft.op("Sub", top, draft.op("Mul", part, part)))
        return draft.op("Mul", g, draft.op("Add", below, draft.op("Mul", x, density)))

    return draft.op("Mul", x, below), slope


def _gelu_by_tanh(draft: Draft, x: str) -> tuple[str, Slope]:
    rate, cubic, one, half = math.sqrt(2 / math.pi), 0.044715, draft.constant(1.0), draft.constant(0.5)
    square = draft.op("Mul", x, x)
    inner = draft.op("Add", one, draft.op("Mul", square, draft.constant(cubic)))
    t = draft.op("Tanh", draft.op("Mul", draft.op("Mul", x, draft.constant(rate)), inner))
    below = draft.op("HardSigmoid", t, alpha=0.5, beta=0.5)

    def slope(g: str) -> str:
        steep = draft.op("Add", draft.constant(rate), draft.op("Mul", square, draft.constant(3 * rate * cubic)))
        bent = draft.op("Mul", draft.op("Sub", one, draft.op("Mul", t, t)), steep)
        return draft.op("Mul", g, draft.op("Add", below, draft.op("Mul", draft.op("Mul", half, x), bent)))

    return draft.op("Mul", x, below), slope


def _hardsigmoid(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    sixth = draft.constant(1 / 6)

    def slope(g: str) -> str:
        return _between(draft, draft.op("Mul", g, sixth), x, -3.0, 3.0)

    return draft.op("HardSigmoid", x, alpha=1 / 6, beta=0.5), slope


def _hardswish(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    share = draft.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)

    def slope(g: str) -> str:
        third = _between(draft, draft.op("Mul", x, draft.constant(1 / 6)), x, -3.0, 3.0)
        return draft.op("Mul", g, draft.op("Add", share, third))

    return draft.op("Mul", x, share), slope


def _softsign(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    below = draft.op("Where", draft.op("Less", x, draft.constant(0.0)), draft.op("Neg", x), x)
    share = draft.op("Reciprocal", draft.op("Add", below, draft.constant(1.0)))
    return draft.op("Mul", x, share), lambda g: draft.op("Mul", g, draft.op("Mul", share, share))


def _logsigmoid(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    turned = draft.op("Neg", x)
    y = draft.op("Neg", draft.op("Softplus", turned))
    return y, lambda g: draft.op("Mul", g, draft.op("Sigmoid", turned))


def _tanhshrink(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    t = draft.op("Tanh", x)
    return draft.op("Sub", x, t), lambda g: draft.op("Mul", g, draft.op("Mul", t, t))


def _celu(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    low, rate = draft.constant(0.0), float(cast(nn.CELU, module).alpha)
    up = draft.op("Greater", x, low)
    below = draft.op("Exp", draft.op("Mul", draft.op("Where", up, low, x), draft.constant(1 / rate)))
    y = draft.op("Mul", draft.op("Sub", below, draft.constant(1.0)), draft.constant(rate))
    return draft.op("Where", up, x, y), lambda g: draft.op("Where", up, g, draft.op("Mul", g, below))


def _shrink(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    """What is farther from 0 than a bound; the soft one is nearer by it."""
    bound = float(cast(nn.Softshrink, module).lambd)
    high, low, none = draft.constant(bound), draft.constant(-bound), draft.constant(0.0)
    above, under = draft.op("Greater", x, high), draft.op("Less", x, low)
    soft = type(module) is nn.Softshrink
    up, down = (draft.op("Sub", x, high), draft.op("Sub", x, low)) if soft else (x, x)
    y = draft.op("Where", above, up, draft.op("Where", under, down, none))
    return y, lambda g: draft.op("Where", above, g, draft.op("Where", under, g, none))


def _threshold(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
    own = cast(nn.Threshold, module)
    over = draft.op("Greater", x, draft.constant(float(own.threshold)))
    y = draft.op("Where", over, x, draft.constant(float(own.value)))
    return y, lambda g: draft.op("Where", over, g, draft.constant(0.0))


OF: dict[type[Module], Of] = {
    nn.ReLU: _relu,
    nn.ReLU6: _hardtanh,
    nn.Hardtanh: _hardtanh,
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.Softplus: _softplus,
    nn.Sigmoid: _sigmoid,
    nn.Tanh: _tanh,
    nn.SiLU: _silu,
    nn.GELU: _gelu,
    nn.Hardsigmoid: _hardsigmoid,
    nn.Hardswish: _hardswish,
    nn.Mish: _mish,
    nn.SELU: _selu,
    nn.CELU: _celu,
    nn.Softsign: _softsign,
    nn.LogSigmoid: _logsigmoid,
    nn.Tanhshrink: _tanhshrink,
    **dict.fromkeys((nn.Softshrink, nn.Hardshrink), _shrink),
    nn.Threshold: _threshold,
}
RULES: dict[type[Module], Rule] = {kind: rule_of(of) for kind, of in OF.items()}
FUNCTIONS: dict[Callable[..., object], type[Module]] = {
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.selu: nn.SELU,
    F.relu6: nn.ReLU6,
    F.hardtanh: nn.Hardtanh,
    F.softplus: nn.Softplus,
    F.mish: nn.Mish,
    F.gelu: nn.GELU,
    F.hardsigmoid: nn.Hardsigmoid,
    F.hardswish: nn.Hardswish,
    **dict.fromkeys((F.celu, torch.celu), nn.CELU),
    F.softsign: nn.Softsign,
    F.logsigmoid: nn.LogSigmoid,
    F.tanhshrink: nn.Tanhshrink,
    F.softshrink: nn.Softshrink,
    F.hardshrink: nn.Hardshrink,
    F.threshold: nn.Threshold,
}
"""Functions that take what the module of their kind is made with."""
