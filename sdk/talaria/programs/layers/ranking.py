"""Values in their order, as functions that a pass is followed through: each value is compared with all beside it, and
what is chosen learns where it stands. Of equal values the first one comes first, as in torch's stable sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from talaria.programs.layers.base import refused


class Ranked(NamedTuple):
    """What torch's functions give that order values: these, and their places as numbers that teach nothing."""

    values: Any
    indices: Any


def cumsum(x: Any, dim: int) -> Any:
    """Sums of all values up to each, as one product."""
    axis, rank = dim % len(x.shape), len(x.shape)
    _require_behind("cumsum", axis)
    upto = torch.ones(x.shape[axis], x.shape[axis]).tril()
    if rank == 2:
        return (upto @ x.unsqueeze(2)).squeeze(2)
    if axis == rank - 2:
        return upto @ x
    return (upto @ x.transpose(axis, rank - 2)).transpose(axis, rank - 2)


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Ranked:
    """The ``k`` largest or smallest values along ``dim``, in order."""
    return _ranked("topk", x, dim, largest, range(k))


def sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Ranked:
    """All values along ``dim`` in order."""
    return _ranked("sort", x, dim, descending, range(x.shape[dim]))


def argsort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    """The places of all values along ``dim`` in order."""
    return sort(x, dim, descending).indices


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Ranked:
    """The ``k``-th smallest value along ``dim``, counted from 1."""
    found = _ranked("kthvalue", x, dim, False, [k - 1])
    return found if keepdim else Ranked(*(one.squeeze(dim % len(x.shape)) for one in found))


def median(x: Any, dim: int, keepdim: bool = False) -> Ranked:
    """The value in the middle along ``dim``, of two the smaller one."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def argmax(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The place of the largest value along ``dim``, of equal ones the first."""
    return _first("argmax", x, dim, keepdim, x.amax(dim, True))


def argmin(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The place of the smallest value along ``dim``, likewise."""
    return _first("argmin", x, dim, keepdim, x.amin(dim, True))


def _first(name: str, x: Any, dim: int, keepdim: bool, value: Any) -> Any:
    axis = dim % len(x.shape)
    _require_behind(name, axis)
    many = x.shape[axis]
    numbers = torch.arange(float(many)).reshape(many, *(1 for _ in x.shape[axis + 1 :]))
    return ((x == value).float() * (numbers - many)).amin(axis, keepdim) + many


def scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    """``x`` with the values of ``src``, or a number, at the places that ``index`` names, each once."""
    rank = len(x.shape)
    axis = dim % rank
    _require_behind("scatter", axis)
    many, behind = x.shape[axis], [1] * (rank - 1 - axis)
    places = torch.arange(float(many)).reshape(many, 1, *behind)
    chosen = index.unsqueeze(axis).expand(*[-1] * axis, many, *[-1] * (rank - axis)) == places
    found = src if isinstance(src, int | float) else torch.where(chosen, src.unsqueeze(axis), 0.0).sum(axis + 1)
    return torch.where(chosen.float().sum(axis + 1) > 0, found, x)


def _ranked(name: str, x: Any, dim: int, descending: bool, places: Sequence[int]) -> Ranked:
    rank = len(x.shape)
    axis = dim % rank
    _require_behind(name, axis)
    many, behind = x.shape[axis], [1] * (rank - 1 - axis)
    mine, others = x.unsqueeze(axis + 1), x.unsqueeze(axis)
    earlier = torch.ones(many, many).tril(-1).reshape(many, many, *behind)
    ahead = (others > mine if descending else others < mine).float() + (others == mine).float() * earlier
    order = ahead.sum(axis + 1).unsqueeze(axis)
    order = order.expand(*[-1] * axis, len(places), *[-1] * (rank - axis))
    chosen = order == torch.tensor([float(one) for one in places]).reshape(len(places), 1, *behind)
    numbers = torch.arange(float(many)).reshape(many, *behind)
    return Ranked(torch.where(chosen, others, 0.0).sum(axis + 1), (chosen.float() * numbers).sum(axis + 1))


def _require_behind(name: str, axis: int) -> None:
    if axis == 0:
        raise refused(name, "goes along the first dimension", "put the batch there, and name one behind it")


RANKING: Mapping[Callable[..., Any] | str, Callable[..., Any]] = {
    **dict.fromkeys((torch.cumsum, "cumsum"), cumsum),
    **dict.fromkeys((torch.scatter, "scatter"), scatter),
    **dict.fromkeys((torch.topk, "topk"), topk),
    **dict.fromkeys((torch.sort, "sort"), sort),
    **dict.fromkeys((torch.argsort, "argsort"), argsort),
    **dict.fromkeys((torch.argmax, "argmax"), argmax),
    **dict.fromkeys((torch.argmin, "argmin"), argmin),
    **dict.fromkeys((torch.kthvalue, "kthvalue"), kthvalue),
    **dict.fromkeys((torch.median, "median"), median),
}
"""By the function, or the name of a tensor's method."""
