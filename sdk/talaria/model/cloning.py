"""A copy of a module as ``copy.deepcopy`` makes it, several times faster: most of what a module holds is empty."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.nn import Module

_SAME = (str, bytes, int, float, bool, type(None))
_HOLDERS = (dict, OrderedDict, set, list)


def clone(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy of ``module``: what two places share they share in the copy, hooks and modes come along.

    ``memo`` is deepcopy's: what it holds by ``id`` takes the place of the original. A module that says itself how it is
    copied or pickled is copied so.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    kind = type(module)
    if not _plain(kind):
        return copy.deepcopy(module, memo)
    out = memo[id(module)] = kind.__new__(kind)
    state: dict[str, Any] = module.__getstate__()  # type: ignore[no-untyped-call]
    out.__setstate__({name: _copied(name, value, memo) for name, value in state.items()})  # type: ignore[no-untyped-call]
    return out


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name == "_modules":
        return type(value)((key, None if part is None else clone(part, memo)) for key, part in value.items())
    if type(value) in _SAME:
        return value
    if type(value) in _HOLDERS and not value:
        return type(value)()
    _cut(value, memo)
    return copy.deepcopy(value, memo)


def _cut(value: Any, memo: dict[int, Any]) -> None:
    """Have what a pass left in a module to be looked at (``self.attention = share``) copied without what it was made
    of, which deepcopy refuses."""
    if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in memo:
        memo[id(value)] = value.detach().clone()
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _cut(one, memo)


def _plain(kind: type[Module]) -> bool:
    """Whether modules of this kind have all they hold in their ``__dict__``, and are copied as any module is."""
    usual = ("__new__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return not hasattr(kind, "__deepcopy__") and all(getattr(kind, name) is getattr(Module, name) for name in usual)
