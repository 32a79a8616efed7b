"""What a layer is called with, as its hooks see it (``with_kwargs=True``) and as tracing does."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn import Module

from talaria.model.inside import base_of


def by_place(layer: Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with all that ``layer`` needs by place, ``layer(input=x)`` is ``layer(x)``, and what it may have by name.

    >>> from torch.nn import MultiheadAttention
    >>> by_place(MultiheadAttention(4, 1), (1, 2), {"need_weights": False, "value": 3})
    ((1, 2, 3), {'need_weights': False})
    """
    if not named:
        return given, named
    known = inspect.signature(base_of(layer).forward).parameters.values()
    needed = [one.name for one in known if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    placed = [name for name in needed[len(given) :] if name in named]
    return (*given, *(named[name] for name in placed)), {k: v for k, v in named.items() if k not in placed}
