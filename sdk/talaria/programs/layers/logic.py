"""What masks say together, as functions that a pass is followed through. A mask is 1 where something is so, else 0."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _both(a: Any, b: Any) -> Any:
    return a.float() * b.float() > 0.5


def _either(a: Any, b: Any) -> Any:
    return a.float() + b.float() > 0.5


def _one(a: Any, b: Any) -> Any:
    return a.float() != b.float()


def _any(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return x.float().amax(dim, keepdim) > 0.5


def _all(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return x.float().amin(dim, keepdim) > 0.5


SPELLED: Mapping[Callable[..., Any] | str, Callable[..., Any]] = {
    **dict.fromkeys((operator.and_, torch.logical_and, "logical_and"), _both),
    **dict.fromkeys((operator.or_, torch.logical_or, "logical_or"), _either),
    **dict.fromkeys((operator.xor, torch.logical_xor, "logical_xor"), _one),
    **dict.fromkeys((torch.any, "any"), _any),
    **dict.fromkeys((torch.all, "all"), _all),
    **dict.fromkeys((torch.isnan, "isnan"), lambda x: torch.ne(x, x)),
}
"""As in :mod:`talaria.programs.layers.spelled`."""
