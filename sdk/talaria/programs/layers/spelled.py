"""Functions that are others put together: a pass that calls one is followed as if it said these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from talaria.programs.layers import laid_out, logic, placing
from talaria.programs.layers.base import listed
from talaria.programs.layers.ranking import RANKING


def _given(one: Any) -> bool:
    """Whether a bound is a value that is followed, and no number."""
    return isinstance(one, fx.Proxy | torch.Tensor)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """A value at a bound that is a tensor shares its slope with it, as in torch; one at a number rests."""
    if _given(min):
        x, min = torch.maximum(x, min), None
    if _given(max):
        x, max = torch.minimum(x, max), None
    return x if min is None and max is None else torch.clamp(x, min, max)


def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return input + (end - input) * weight


def prod(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The product of all values along ``dim``, two by two, so that the way back is right where some are 0."""
    pieces = list(x.unbind(dim))
    while len(pieces) > 1:
        pieces = [reduce(operator.mul, pieces[i : i + 2]) for i in range(0, len(pieces), 2)]
    return pieces[0].unsqueeze(dim) if keepdim else pieces[0]


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + tensor1 * tensor2 * value


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + tensor1 / tensor2 * value


def _add(input: Any, other: Any, *, alpha: float) -> Any:
    return input + other * alpha


def _sub(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return input - other * alpha


def _matched(input: Any, mat1: Any, mat2: Any) -> Any:
    return input + mat1 @ mat2


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """How far vectors are apart, as torch has it, which adds ``eps`` to each of their differences."""
    return torch.norm(x1 - x2 + eps, p, -1, keepdim)


def _movedim(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    many = len(x.shape)
    pairs = zip(*([one] if isinstance(one, int) else one for one in (source, destination)), strict=True)
    ends = {to % many: at % many for at, to in pairs}
    rest = iter([axis for axis in range(many) if axis not in ends.values()])
    return x.permute(*(ends[place] if place in ends else next(rest) for place in range(many)))


def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return x[_at(x, dim, slice(start, start + length))]


def _select(x: Any, dim: int, index: int) -> Any:
    return x[_at(x, dim, index)]


def _at(x: Any, dim: int, piece: int | slice | torch.Tensor) -> tuple[int | slice | torch.Tensor, ...]:
    return (*[slice(None)] * (dim % len(x.shape)), piece)


def _repeat_interleave(x: Any, repeats: Any, dim: int) -> Any:
    many = len(x.shape)
    dim %= many
    if isinstance(x.shape[dim], int) and x.shape[dim] == 1:
        return x.repeat(*(repeats if place == dim else 1 for place in range(many)))
    each = [*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]]
    return x.unsqueeze(dim + 1).expand(*each).flatten(dim, dim + 1)


def _tile(x: Any, *dims: Any) -> Any:
    many = listed(dims)
    return x.repeat(*(1 for _ in range(len(x.shape) - len(many))), *many)


def _diff(x: Any, n: int = 1, dim: int = -1) -> Any:
    for _ in range(n):
        x = _narrow(x, dim, 1, x.shape[dim] - 1) - _narrow(x, dim, 0, x.shape[dim] - 1)
    return x


def _below(x: Any, diagonal: int = 0) -> Any:
    return x * torch.ones(x.shape[-2:]).tril(diagonal)


def _above(x: Any, diagonal: int = 0) -> Any:
    return x * torch.ones(x.shape[-2:]).triu(diagonal)


def _windows(x: Any, dimension: int, size: int, step: int) -> Any:
    """Windows of a dimension, with what is in each as one more dimension at the end."""
    axis = dimension % len(x.shape)
    starts = range(0, x.shape[axis] - size + 1, step)
    if step == size:
        x = _narrow(x, axis, 0, len(starts) * size)
    else:
        x = x[_at(x, axis, torch.tensor([start + i for start in starts for i in range(size)]))]
    return _movedim(x.unflatten(axis, (len(starts), size)), axis + 1, -1)


def _one_hot(x: Any, num_classes: int) -> Any:
    return x.unsqueeze(-1) == torch.arange(float(num_classes))


def _view_as(x: Any, other: Any) -> Any:
    return x.view(*other.shape)


def _ones_like(x: Any) -> Any:
    return torch.zeros_like(x) + 1.0


def _full_like(x: Any, fill_value: float) -> Any:
    return torch.zeros_like(x) + fill_value


_PIECES = ("unbind", "chunk", "split", torch.unbind, torch.chunk, torch.split)


def _of_pieces(join: Callable[..., Any]) -> Callable[..., Any]:
    """``join`` of what a call gives as several, such as ``x.unbind(1)``."""
    return lambda pieces, *args, **named: join(list(pieces), *args, **named)


def _moves(x: Any, *to: Any, **named: Any) -> bool:
    """Whether more is said than what the numbers become: where they lie, or what they are to be like."""
    return bool(named) or len(to) > 1 or isinstance(to[0], str | torch.device | fx.Proxy)


def _to(x: Any, *to: Any, **named: Any) -> Any:
    kind = next((one for one in (*to, named.get("dtype")) if isinstance(one, torch.dtype)), None)
    return x if kind in (None, x.dtype) else x.to(kind)


def _no_batch(equation: Any, *tensors: Any) -> bool:
    """Whether a product goes over two tensors that are the same for each sample."""
    named = isinstance(equation, str) and "->" in equation and "." not in equation and len(tensors) == 2
    return named and all(map(_same_for_each, tensors))


def _same_for_each(x: Any) -> bool:
    """Whether no size of ``x`` is a batch's."""
    return isinstance(x.shape, tuple) and all(isinstance(size, int) for size in x.shape)


def _kernel_turned(x: Any, *dims: Any, **named: Any) -> bool:
    """Whether the last dimension of a matrix that is the same for each sample is turned, as that of a kernel."""
    return listed([*dims, *named.values()]) in ([-1], [1]) and _same_for_each(x) and len(x.shape) == 2


def _turned(x: Any, *_: Any, **__: Any) -> Any:
    return x @ torch.eye(x.shape[1]).flip(1)


def _over_letters(equation: str, *tensors: Any) -> Any:
    given, out = equation.replace(" ", "").split("->")
    names = given.split(",")
    summed = [one for one in dict.fromkeys("".join(names)) if one not in out]
    letters, laid = [*out, *summed], list[Any]()
    for own, tensor in zip(names, tensors, strict=True):
        ordered = tensor.permute(*(own.index(one) for one in letters if one in own))
        missing = [place for place, one in enumerate(letters) if one not in own]
        laid.append(reduce(lambda x, place: x.unsqueeze(place), missing, ordered))
    met = laid[0] * laid[1]
    return met.sum(tuple(range(len(out), len(letters)))) if summed else met


def channel_shuffle(x: Any, groups: int) -> Any:
    _, wide, *space = x.shape
    apart = x.reshape(x.shape[0], groups, wide // groups, *space)
    return apart.transpose(1, 2).reshape(x.shape[0], wide, *space)


def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    """Over the mean square of ``size`` neighbouring channels (Krizhevsky et al. 2012)."""
    _, wide, *space = input.shape
    square = (input * input).reshape(input.shape[0], wide, -1).transpose(1, 2)
    mean = F.avg_pool1d(F.pad(square, (size // 2, (size - 1) // 2)), size, 1)
    length = (mean * alpha + k) ** beta
    return input / length.transpose(1, 2).reshape(input.shape[0], wide, *space)


SPELLED: Mapping[Callable[..., Any] | str, Callable[..., Any]] = {
    **RANKING,
    **dict.fromkeys((torch.lerp, "lerp"), _lerp),
    **dict.fromkeys((torch.prod, "prod"), prod),
    **dict.fromkeys((torch.addcmul, "addcmul"), _addcmul),
    **dict.fromkeys((torch.addcdiv, "addcdiv"), _addcdiv),
    **dict.fromkeys((torch.addmm, torch.baddbmm, "addmm", "baddbmm"), _matched),
    **dict.fromkeys((torch.movedim, torch.moveaxis, "movedim", "moveaxis"), _movedim),
    **dict.fromkeys((torch.narrow, "narrow"), _narrow),
    **dict.fromkeys((torch.select, "select"), _select),
    **dict.fromkeys((torch.tile, "tile"), _tile),
    **dict.fromkeys((torch.take_along_dim, "take_along_dim"), lambda x, indices, dim: torch.gather(x, dim, indices)),
    **dict.fromkeys((torch.swapaxes, torch.swapdims, "swapdims"), lambda x, one, other: x.transpose(one, other)),
    "cpu": lambda x: x,
    "where": lambda x, mask, other: torch.where(mask, x, other),
    "view_as": _view_as,
    "reshape_as": _view_as,
    **dict.fromkeys((torch.repeat_interleave, "repeat_interleave"), _repeat_interleave),
    **laid_out.SPELLED,
    **placing.SPELLED,
    **logic.SPELLED,
    **dict.fromkeys((torch.diff, "diff"), _diff),
    **dict.fromkeys((torch.tril, "tril"), _below),
    **dict.fromkeys((torch.triu, "triu"), _above),
    "unfold": _windows,
    F.one_hot: _one_hot,
    torch.ones_like: _ones_like,
    torch.full_like: _full_like,
    F.pairwise_distance: pairwise_distance,
    F.channel_shuffle: channel_shuffle,
    F.local_response_norm: local_response_norm,
}
"""By the function, or the name of a tensor's method."""
WHERE_ASKED: Mapping[Callable[..., Any] | str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    torch.einsum: (_no_batch, _over_letters),
    **dict.fromkeys((torch.flip, "flip"), (_kernel_turned, _turned)),
    **{
        join: (
            lambda pieces, *args, **named: isinstance(pieces, fx.Proxy) and pieces.node.target in _PIECES,
            _of_pieces(join),
        )
        for join in (torch.stack, torch.cat)
    },
    **dict.fromkeys(
        (torch.clamp, torch.clip, "clamp", "clip"),
        (lambda *args, **named: any(map(_given, (*args[1:], *named.values()))), _clamp),
    ),
    "to": (_moves, _to),
    **dict.fromkeys((torch.add, "add"), (lambda *args, **named: "alpha" in named, _add)),
    **laid_out.WHERE_ASKED,
    **dict.fromkeys((torch.sub, "sub"), (lambda *args, **named: "alpha" in named, _sub)),
}
"""Likewise, of calls of which only some are others put together."""


def spelled(target: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What says a call by others; None of any other call."""
    try:
        asked, how = WHERE_ASKED.get(target, (None, None))
        plain = SPELLED.get(target)
    except TypeError:  # a target without a hash
        return None
    return how if asked is not None and asked(*args, **named) else plain
