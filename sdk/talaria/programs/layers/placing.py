"""``x[index] = value`` and its like as functions that a pass is followed through: what is changed in place is a new
value of its pieces side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from talaria.programs.layers.base import refused


def placed(x: Any, index: Any, value: Any) -> Any:
    """``x`` with ``value``, a tensor or a number, where ``index`` is: places, neighbouring places, or a mask."""
    if _masks(index):
        return _masked(x, index, value)
    rank = len(x.shape)
    full = _whole(index, rank)
    axis = next((i for i, one in enumerate(full) if not all_of(one)), None)
    if axis is None:
        return as_large(value, x)
    one, wide, before = full[axis], x.shape[axis], (slice(None),) * axis
    places = range(wide)[one if isinstance(one, slice) else slice(one, one + 1 or None)] if _knows(one, wide) else None
    if not places or places.step != 1:
        raise refused("setitem", f"puts values at {index!r}"[:120], "name neighbouring places behind the batch")
    piece = x[(*before, one)]
    rest = full[axis + 1 :]
    behind = (*before, slice(None), *rest) if isinstance(one, slice) else (*before, *rest)
    new = placed(piece, behind, value)
    new = new if isinstance(one, slice) else new.unsqueeze(axis)
    ends = ((slice(0, places.start), places.start > 0), (slice(places.stop, wide), places.stop < wide))
    left, right = ([x[(*before, end)]] if there else [] for end, there in ends)
    return torch.cat([*left, new, *right], axis) if left or right else new


def as_large(value: Any, like: Any) -> Any:
    """``value``, a tensor or a number, of the shape of ``like``."""
    if isinstance(value, int | float):
        return torch.full_like(like, float(value))
    return value if are_alike(value.shape, like.shape) else torch.zeros_like(like) + value


def are_alike(own: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same, but for sizes that are no numbers."""
    return len(own) == len(other) and all(a == b for a, b in zip(own, other, strict=True) if isinstance(a, int))


def index_fill(x: Any, dim: int, index: Any, value: float) -> Any:
    """``x`` with a number at some places of a dimension, which are the same for each sample."""
    axis, shape = dim % len(x.shape), x.shape
    here = torch.zeros(shape[axis]).index_fill(0, index, 1.0) > 0
    return torch.where(here.reshape(-1, *(1 for _ in shape[axis + 1 :])), float(value), x)


def all_of(one: Any) -> bool:
    """Whether an index takes all of a dimension."""
    return isinstance(one, slice) and one == slice(None)


def _masks(index: Any) -> bool:
    return isinstance(index, fx.Proxy | Tensor) and index.dtype == torch.bool


def _masked(x: Any, mask: Any, value: Any) -> Any:
    if not isinstance(value, int | float):
        raise refused("setitem", "puts values where a mask is", "use torch.where of a mask and two maps")
    for _ in range(len(x.shape) - len(mask.shape)):
        mask = mask.unsqueeze(-1)
    return x.masked_fill(mask, value)


def _whole(index: Any, rank: int) -> list[Any]:
    """What ``index`` takes of each dimension."""
    each = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, one in enumerate(each) if one is Ellipsis), len(each))
    more = rank - sum(one is not Ellipsis for one in each)
    return [*each[:at], *[slice(None)] * more, *each[at + 1 :]]


def _knows(one: Any, wide: Any) -> bool:
    ends = (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)
    return isinstance(wide, int) and all(end is None or type(end) is int for end in ends)


SPELLED: Mapping[Callable[..., Any] | str, Callable[..., Any]] = {
    **dict.fromkeys((torch.index_fill, "index_fill"), index_fill),
    "zero": torch.zeros_like,
    "fill": torch.full_like,
    "copy": lambda x, value, *_: as_large(value, x),
}
"""As in :mod:`talaria.programs.layers.spelled`; what torch has in place alone is named without its last letter."""
METHODS = {
    "add", "sub", "mul", "div", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin",
    "cos", "relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "clip", "floor", "ceil", "round", "erf",
    "expm1", "lerp", "addcmul", "addcdiv", "masked_fill", "scatter", "index_fill", "zero", "fill", "copy",
    "detach", "squeeze", "unsqueeze", "transpose", "logical_not",
}  # fmt: skip
"""Methods that torch has in place, too, ``add_`` and so on."""
