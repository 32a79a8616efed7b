"""Sums, differences, products, quotients and powers of maps, numbers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Identity, Module

from talaria.programs.layers import plumbing
from talaria.programs.layers.activation import Of, rule_of
from talaria.programs.layers.base import Map, Pullback, Step, chained, refused
from talaria.programs.layers.broadcast import both
from talaria.programs.layers.elementwise import between, negated, over, to_the
from talaria.programs.layers.parameters import Weight, beside_weight, joined


def add(step: Step, layer: str, a: Any, b: Any) -> tuple[Map, Pullback]:
    """a + b, of which one is a map and the other a number or a parameter."""
    if isinstance(a, Weight) or isinstance(b, Weight):
        return beside_weight(step, layer, "Add", a, b)
    x, number = (b, a) if isinstance(b, Map) else (a, b)
    y = step.draft.op("Add", x.value, step.draft.number(float(number), 2 + len(x.space)))
    return x.like(y), lambda g, wanted: [g]


def subtract(step: Step, layer: str, a: Any, b: Any) -> tuple[Map, Pullback]:
    """a - b."""
    draft = step.draft
    if isinstance(a, Map) and isinstance(b, Map):
        y, back = plumbing.add(step, layer, Module(), [a, b.like(draft.op("Neg", b.value))])

        def apart(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
            one, other = back(g, wanted)
            return [one, None if other is None else draft.op("Neg", other)]

        return y, apart
    if isinstance(b, Weight):
        return add(step, layer, a, b.bent(negated))
    if isinstance(a, Map):
        return add(step, layer, a, -float(b))
    if isinstance(a, Weight):
        return _behind(step, layer, negated, b, lambda x: add(step, layer, x, a))
    rest = draft.op("Sub", draft.number(float(a), 2 + len(b.space)), b.value)
    return b.like(rest), lambda g, wanted: [draft.op("Neg", g)]


def multiply(step: Step, layer: str, a: Any, b: Any) -> tuple[Map, Pullback]:
    """a b, of which one is a map and the other a number or a parameter."""
    if isinstance(a, Weight) or isinstance(b, Weight):
        return beside_weight(step, layer, "Mul", a, b)
    x, number = (b, a) if isinstance(b, Map) else (a, b)
    scale = step.draft.number(float(number), 2 + len(x.space))
    return x.like(step.draft.op("Mul", x.value, scale)), lambda g, wanted: [step.draft.op("Mul", g, scale)]


def divide(step: Step, layer: str, a: Any, b: Any) -> tuple[Map, Pullback]:
    """a / b."""
    if isinstance(a, Map) and isinstance(b, Map):
        return both(step, layer, "Div", a, b)
    if isinstance(b, Weight):
        return multiply(step, layer, a, b.bent(over(1.0)))
    if isinstance(a, Map):
        return multiply(step, layer, a, 1 / float(b))
    if isinstance(a, Weight):
        return _behind(step, layer, over(1.0), b, lambda x: multiply(step, layer, x, a))
    return rule_of(over(float(a)))(step, layer, Identity(), [b])


def raised(step: Step, layer: str, x: Any, exponent: Any) -> tuple[Map, Pullback]:
    """x to a power that is a number or a parameter."""
    if isinstance(x, Map) and isinstance(exponent, Weight):
        return joined(step, layer, "Pow", x, exponent)
    if isinstance(exponent, Map):
        raise refused(layer, "takes a map as an exponent", "write 2 ** x as torch.exp(x * math.log(2))")
    if not isinstance(x, Map) or isinstance(exponent, bool) or not isinstance(exponent, int | float) or exponent == 0:
        raise refused(layer, f"takes the power {exponent!r}"[:80], "take a map to the power of a number other than 0")
    return rule_of(to_the(float(exponent)))(step, layer, Identity(), [x])


def clamp(step: Step, layer: str, x: Map, min: Any = None, max: Any = None) -> tuple[Map, Pullback]:
    """x between two numbers, or beyond one."""
    return rule_of(between(min, max))(step, layer, Identity(), [x])


def clamp_min(step: Step, layer: str, x: Map, min: float) -> tuple[Map, Pullback]:
    """No less than a number."""
    return clamp(step, layer, x, min)


def clamp_max(step: Step, layer: str, x: Map, max: float) -> tuple[Map, Pullback]:
    """No more than a number."""
    return clamp(step, layer, x, None, max)


def _behind(
    step: Step, layer: str, of: Of, x: Map, then: Callable[[Map], tuple[Map, Pullback]]
) -> tuple[Map, Pullback]:
    """What ``then`` makes of ``of`` of a map."""
    bent, first = rule_of(of)(step, layer, Identity(), [x])
    y, second = then(bent)
    return y, chained(first, second)
