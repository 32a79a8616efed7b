"""What a forward pass makes of its parameters before they meet a map: ``1 + self.gain``, ``self.scale.exp()``,
``self.places[:, :5]``, ``F.normalize(self.weight)``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from talaria.programs.layers.activation import FUNCTIONS, OF, Of
from talaria.programs.layers.elementwise import EACH, between, negated, over, plus, times, to_the
from talaria.programs.layers.lengths import unit
from talaria.programs.layers.parameters import Weight

_Target = Callable[..., Any] | str


def turned(target: _Target, args: Sequence[Any], named: Mapping[str, Any]) -> Weight | torch.Tensor | None:
    """A parameter after a call that reads it and numbers alone, or None for another call: of a comparison a mask, which
    what is not trained gives once and for all. Raises as torch does."""
    a, b = (*args, None)[:2]
    if isinstance(a, Weight):
        name = getattr(target, "__name__", str(target))
        if name in _COMPARED and not a.trains and a.as_it_is:
            mask: torch.Tensor = getattr(a.now, name)(*args[1:], **named)
            return mask
        found = _moved(name, a, args[1:], named) or _bent(target, a, args[1:], named)
        if found is not None:
            return found
    if len(args) != 2 or named:
        return None
    if isinstance(a, Weight) and isinstance(b, int | float):
        of = _BEFORE.get(target)
        return None if of is None else a.bent(of(b))
    if isinstance(b, Weight) and isinstance(a, int | float):
        if target in _DIFFERENCE:
            return b.bent(negated).bent(plus(a))
        of = over if target in _QUOTIENT else _BEFORE.get(target) if target in (*_SUM, *_PRODUCT) else None
        return None if of is None else b.bent(of(a))
    return None


def _moved(name: str, weight: Weight, args: Sequence[Any], named: Mapping[str, Any]) -> Weight | None:
    """The same values in another form."""
    like = torch.empty(weight.shape, device="meta")
    if name in ("to", "contiguous", "float", "type_as", "clone"):
        return weight if weight.tensor.is_floating_point() and torch.float64 not in args else None
    if name == "getitem":
        return weight.turned("index", args[0])
    if name in ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"):
        return weight.turned("reshape", tuple(getattr(like, name)(*args, **named).shape))
    if name in ("permute", "transpose", "swapaxes", "t"):
        order = torch.empty(list(range(2, 2 + like.dim())), device="meta")  # each size tells its place
        return weight.turned("permute", tuple(n - 2 for n in getattr(order, name)(*args, **named).shape))
    return None


def _bent(target: _Target, weight: Weight, args: Sequence[Any], named: Mapping[str, Any]) -> Weight | None:
    """Other values in the same form."""
    if target in EACH and not args and not named:
        return weight.bent(*EACH[target])
    if callable(target) and target in FUNCTIONS:
        kind = FUNCTIONS[target]
        return weight.bent(OF[kind], kind(*args, **named))
    if target in (torch.clamp, torch.clip, "clamp", "clip"):
        bounds = {**dict(zip(("min", "max"), args, strict=False)), **named}
        return weight.bent(between(bounds.get("min"), bounds.get("max")))
    if target is F.normalize:
        return _unit(weight, *args, **named)
    return None


def _unit(weight: Weight, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Weight:
    if p not in (1, 2):
        raise ValueError("programs know p=1 and p=2")
    return weight.bent(unit([range(len(weight.shape))[dim]], eps, p))


_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le", "bool")
_SUM = (operator.add, torch.add, "add")
_DIFFERENCE = (operator.sub, torch.sub, "sub")
_PRODUCT = (operator.mul, torch.mul, "mul")
_QUOTIENT = (operator.truediv, torch.div, "div")
_BEFORE: Mapping[_Target, Callable[[float], Of]] = {
    **dict.fromkeys(_SUM, plus),
    **dict.fromkeys(_DIFFERENCE, lambda number: plus(-number)),
    **dict.fromkeys(_PRODUCT, times),
    **dict.fromkeys(_QUOTIENT, lambda number: times(1 / number)),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), to_the),
}
"""By the function, of a parameter and the number behind it."""
