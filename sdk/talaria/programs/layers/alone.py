"""What a forward pass makes of its parameters before they meet a map: ``1 + self.gain``, ``self.scale.exp()``,
``self.places[:, :5]``, ``F.normalize(self.weight)``, ``self.up @ self.down``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module
from torch.nn import functional as F

from talaria.programs.layers import combined
from talaria.programs.layers.activation import FUNCTIONS, OF, Of
from talaria.programs.layers.base import Map, listed
from talaria.programs.layers.elementwise import EACH, between, negated, over, plus, times, to_the
from talaria.programs.layers.lengths import rooted, unit
from talaria.programs.layers.parameters import Weight, stored
from talaria.programs.layers.rows import Rows
from talaria.programs.layers.sequence import Dims
from talaria.programs.layers.shares import shared

_Target = Callable[..., Any] | str


def passed(layer: str, own: Module, weight: Weight) -> Weight | None:
    """What a linear layer or an activation makes of a parameter that it is given in place of a map; None for another
    layer. Raises as torch does."""
    if type(own) in OF:
        return weight.bent(OF[type(own)], own)
    if type(own) is not Linear:
        return None
    matrix = stored(layer, "weight", own).turned("permute", (1, 0))
    rows = weight.turned("reshape", (-1, weight.shape[-1]))
    found = combined.product(rows, matrix).turned("reshape", (*weight.shape[:-1], own.out_features))
    return found if own.bias is None else combined.of_two("Add", found, stored(layer, "bias", own))


def looked_up(layer: str, own: Embedding, places: torch.Tensor) -> Weight | None:
    """The rows of a table at whole numbers that are the same for each sample; None of a table with options."""
    plain = own.padding_idx is None and not (own.max_norm or own.scale_grad_by_freq or own.sparse)
    return stored(layer, "weight", own).turned("rows", Rows.of(places, own.num_embeddings)) if plain else None


def turned(target: _Target, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What stands for a call that reads parameters and numbers alone, or None for another call: a parameter, two of
    them, or of a comparison a mask, which what is not trained gives once and for all. Raises as torch does."""
    a, b = (*args, None)[:2]
    if isinstance(a, Weight):
        name = getattr(target, "__name__", str(target))
        numbers = not any(isinstance(one, Map) for one in args)
        if name in _COMPARED and numbers and (now := a.now) is not None:
            mask: torch.Tensor = getattr(now, name)(*args[1:], **named)
            return mask
        moved = _moved(name, a, args[1:], named) or _bent(target, a, args[1:], named)
        moved = moved or _totalled(name, a, args[1:], named)
        if moved is not None:
            return moved
    if target in _JOINS and isinstance(a, tuple | list) and all(isinstance(one, Weight) for one in a):
        return _JOINS[target](a, *args[1:], **named)
    if len(args) != 2 or named:
        return None
    if isinstance(a, Weight) and isinstance(b, Weight):
        of_two = _OF_TWO.get(target)
        return None if of_two is None else of_two(a, b)
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
        return weight if weight.dtype.is_floating_point and torch.float64 not in args else None
    if name == "getitem" and isinstance(args[0], torch.Tensor):
        return weight.turned("rows", Rows.of(args[0], weight.shape[0]))
    if name == "index_select":
        axis = range(like.dim())[args[0]]
        order = [axis, *(i for i in range(like.dim()) if i != axis)]
        rows = weight.turned("permute", tuple(order)).turned("rows", Rows.of(args[1], weight.shape[axis]))
        return rows.turned("permute", tuple(order.index(i) for i in range(like.dim())))
    if name == "getitem":
        return weight.turned("index", args[0])
    if name in ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"):
        return weight.turned("reshape", tuple(getattr(like, name)(*args, **named).shape))
    if name in ("permute", "transpose", "swapaxes", "t"):
        sizes = torch.empty(list(range(2, 2 + like.dim())), device="meta")  # each tells its place
        return weight.turned("permute", tuple(n - 2 for n in getattr(sizes, name)(*args, **named).shape))
    if name in ("expand", "repeat") and all(type(one) is int for one in listed(args)) and not named:
        if name == "repeat" and any(n != 1 != own for own, n in _ends(weight.shape, listed(args))):
            raise ValueError("repeat dimensions of size 1")
        return weight.turned("expand", tuple(getattr(like, name)(*args).shape))
    return None


def _ends(shape: Sequence[int], times: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Each size, from the last one on, with how often it is repeated."""
    return list(zip(shape[::-1], times[::-1], strict=False))


def _totalled(name: str, weight: Weight, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What a function makes of all values along some dimensions; of a deviation and a mean both."""
    how = _ALONG.get(name)
    return None if how is None else how(weight, *args, **named)


def _total(kind: str, weight: Weight, dim: Dims = None, keepdim: bool = False) -> Weight:
    return weight.turned(kind, (_axes(weight, dim), keepdim))


def _axes(weight: Weight, dim: Dims) -> tuple[int, ...]:
    every = range(len(weight.shape))
    return tuple(every) if dim is None else tuple(every[one] for one in ((dim,) if isinstance(dim, int) else dim))


def _variance(
    weight: Weight, dim: Dims = None, unbiased: bool = True, keepdim: bool = False, *, correction: int | None = None
) -> Weight:
    axes = _axes(weight, dim)
    count = prod(weight.shape[axis] for axis in axes) - (int(unbiased) if correction is None else correction)
    off = combined.subtracted(weight, _total("mean", weight, axes, True))
    return _total("sum", off.bent(to_the(2)), axes, keepdim).bent(times(1 / count))


def _deviation(weight: Weight, *args: Any, **named: Any) -> Weight:
    return _variance(weight, *args, **named).bent(rooted)


def _with_mean(spread: Callable[..., Weight], weight: Weight, dim: Dims = None, *args: Any, **named: Any) -> Any:
    keep = named.get("keepdim", args[1:] == (True,))
    return spread(weight, dim, *args, **named), _total("mean", weight, dim, keep)


def _norm(weight: Weight, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Weight:
    if p not in (2, None, "fro"):
        raise ValueError("programs know p=2 alone")
    return _total("sum", weight.bent(to_the(2)), dim, keepdim).bent(rooted)


def _bent(target: _Target, weight: Weight, args: Sequence[Any], named: Mapping[str, Any]) -> Weight | None:
    """Other values in the same form."""
    if target in EACH and not args and not any(named.values()):
        return weight.bent(*EACH[target])
    if callable(target) and target in FUNCTIONS:
        kind = FUNCTIONS[target]
        return weight.bent(OF[kind], kind(*args, **named))
    if target in (torch.clamp, torch.clip, "clamp", "clip"):
        bounds = {**dict(zip(("min", "max"), args, strict=False)), **named}
        return weight.bent(between(bounds.get("min"), bounds.get("max")))
    if target in _SHARES:
        return _shared(_SHARES[target], weight, *args, **named)
    if target is F.normalize:
        return _unit(weight, *args, **named)
    return None


def _shared(kind: str, weight: Weight, dim: int, _stacklevel: int = 3, dtype: None = None) -> Weight:
    return weight.bent(shared(kind, range(len(weight.shape))[dim]))


def _unit(weight: Weight, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Weight:
    if p not in (1, 2):
        raise ValueError("programs know p=1 and p=2")
    return weight.bent(unit([range(len(weight.shape))[dim]], eps, p))


_SHARES: Mapping[_Target, str] = {
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), "Softmax"),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, "log_softmax"), "LogSoftmax"),
}
_ALONG: Mapping[str, Callable[..., Any]] = {
    "sum": partial(_total, "sum"),
    "mean": partial(_total, "mean"),
    "var": _variance,
    "std": _deviation,
    "var_mean": partial(_with_mean, _variance),
    "std_mean": partial(_with_mean, _deviation),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _norm),
}
"""By the name of a function or method."""
_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le", "bool")
_SUM = (operator.add, torch.add, "add")
_DIFFERENCE = (operator.sub, torch.sub, "sub")
_PRODUCT = (operator.mul, torch.mul, "mul")
_QUOTIENT = (operator.truediv, torch.div, "div")
_OF_TWO: Mapping[_Target, Callable[[Weight, Weight], Weight]] = {
    **dict.fromkeys(_SUM, partial(combined.of_two, "Add")),
    **dict.fromkeys(_DIFFERENCE, combined.subtracted),
    **dict.fromkeys(_PRODUCT, partial(combined.of_two, "Mul")),
    **dict.fromkeys(_QUOTIENT, combined.divided),
    **dict.fromkeys((operator.matmul, torch.matmul, "matmul", torch.mm, "mm", torch.bmm, "bmm"), combined.product),
    **dict.fromkeys((torch.outer, "outer"), combined.outer),
    **dict.fromkeys((torch.maximum, "maximum", torch.max, "max"), partial(combined.of_two, "Max")),
    **dict.fromkeys((torch.minimum, "minimum", torch.min, "min"), partial(combined.of_two, "Min")),
}
_JOINS: Mapping[_Target, Callable[..., Weight]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), combined.beside),
    torch.stack: combined.stacked,
}
_BEFORE: Mapping[_Target, Callable[[float], Of]] = {
    **dict.fromkeys(_SUM, plus),
    **dict.fromkeys(_DIFFERENCE, lambda number: plus(-number)),
    **dict.fromkeys(_PRODUCT, times),
    **dict.fromkeys(_QUOTIENT, lambda number: times(1 / number)),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), to_the),
}
"""By the function, of a parameter and the number behind it."""
