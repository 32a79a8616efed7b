"""Arithmetic on Tensors: flat dicts of named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from talaria.errors import ModelError

Tensors = dict[str, Tensor]
"""A flat dict of named tensors. Every state is one, and so is one safetensors file."""


def only(tensors: Tensors, keys: Iterable[str]) -> Tensors:
    """The named entries, in the order of ``keys``; a missing one is a :class:`ModelError`."""
    try:
        return {k: tensors[k] for k in keys}
    except KeyError as missing:
        raise ModelError(f"tensor {missing} is missing; the state does not fit this model") from None


def without(tensors: Tensors, prefix: str) -> Tensors:
    """The entries whose name does not begin with ``prefix``."""
    return {k: v for k, v in tensors.items() if not k.startswith(prefix)}


def under(tensors: Tensors, prefix: str) -> Tensors:
    """The entries whose name begins with ``prefix``, with it cut off.

    >>> import torch
    >>> list(under({"own/w": torch.ones(1), "w": torch.ones(1)}, "own/"))
    ['w']
    """
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    """The same tensors with ``prefix`` before each name."""
    return {prefix + k: v for k, v in tensors.items()}


def copied(tensors: Tensors) -> Tensors:
    """Detached copies that share no memory with ``tensors``."""
    return {k: v.detach().clone() for k, v in tensors.items()}


def minus(a: Tensors, b: Tensors) -> Tensors:
    """``a - b`` over the names of ``a``."""
    return {k: v - b[k] for k, v in a.items()}


def fill(own: Tensors, values: Tensors) -> None:
    """Copy ``values`` into the tensors of ``own``, in place and by name alone: a module's ``load_state_dict`` may ask
    for more than its tensors. Names and shapes must fit."""
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(values[key])


def equal(a: Tensors, b: Tensors) -> bool:
    """True where names, dtypes, shapes and bits agree (NaN equals itself)."""
    return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
