"""Tensors of one number that a pass lays out by the batch's size, as first states are, said by others.

Zeros stay what they are (:mod:`talaria.programs.layers.zeros`); another number, and a parameter beside zeros, is laid
out for each sample.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from talaria.programs.layers.base import listed

ZEROS, EMPTY = torch.zeros, torch.empty  # by which others stand while a pass is followed


def _size(args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The size that a call is given, one by one or together."""
    return listed(args or [named["size"]])


def _laid_out(value: float, size: Sequence[Any]) -> Any:
    """A number as a tensor of this size."""
    return torch.full((1,) * len(size), float(value)).expand(*size)


def _ones(*args: Any, **named: Any) -> Any:
    return _laid_out(1.0, _size(args, named))


def _full(size: Sequence[Any], fill_value: float, **_: Any) -> Any:
    return _laid_out(fill_value, size)


def _of_method(how: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes a tensor, as the function that does."""
    return lambda x, *args, **named: how(*args, **named)


def _made(x: fx.Proxy) -> list[Any]:
    """The size that the call which made a tensor was given."""
    given: Any = x.node.args, dict(x.node.kwargs)
    args, named = fx.node.map_aggregate(given, _followed(x))
    return _size(args if x.node.op == "call_function" else args[1:], named)


def _followed(x: fx.Proxy) -> Callable[[Any], Any]:
    """What stands for an argument of the call that made ``x``."""
    return lambda one: x.tracer.proxy(one) if isinstance(one, fx.Node) else one


def _empty(x: Any, *_: Any) -> bool:
    return isinstance(x, fx.Proxy) and x.node.target in (EMPTY, "new", "new_empty")


def _filled(x: Any, value: float = 0.0) -> Any:
    """What was made without a value, with one."""
    return torch.zeros(*_made(x)) if value == 0 else _laid_out(value, _made(x))


def _zeros(one: Any) -> fx.Proxy | None:
    """The call that made ``one``, zeros before whose batch another dimension stands; None for anything else."""
    node = one.node if isinstance(one, fx.Proxy) else None
    while node is not None and node.target in _THE_SAME and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node is None or node.target not in (ZEROS, "new_zeros"):
        return None
    found: fx.Proxy = one.tracer.proxy(node)
    return found if isinstance(_made(found)[0], int) else None


_THE_SAME = ("to", "float", "requires_grad_", "detach", "contiguous", "type_as", torch.zeros_like)


def _beside_zeros(a: Any, b: Any, **_: Any) -> bool:
    return _zeros(a) is not None or _zeros(b) is not None


def _added(a: Any, b: Any) -> Any:
    """A tensor or a number, as large as the zeros beside it."""
    pairs = ((_zeros(a), b), (_zeros(b), a))
    size, other = next((_made(zeros), other) for zeros, other in pairs if zeros is not None)
    return other.expand(*size) if isinstance(other, fx.Proxy | torch.Tensor) else _laid_out(other, size)


SPELLED: Mapping[Callable[..., Any] | str, Callable[..., Any]] = {
    torch.ones: _ones,
    torch.full: _full,
    "new_ones": _of_method(_ones),
    "new_full": _of_method(_full),
}
"""As in :mod:`talaria.programs.layers.spelled`."""
WHERE_ASKED: Mapping[Callable[..., Any] | str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    **dict.fromkeys((operator.add, operator.iadd), (_beside_zeros, _added)),
    **dict.fromkeys(("zero", "fill"), (_empty, _filled)),
}
