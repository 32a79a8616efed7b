"""Arithmetic on Tensors: flat dicts of named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from talaria.errors import ModelError

Array = np.ndarray[Any, np.dtype[Any]]

Tensors = dict[str, Array]
"""A flat dict of named numpy arrays. Every state is one, and so is one safetensors file."""


def only(tensors: Tensors, keys: Iterable[str]) -> Tensors:
    """The named entries, in the order of ``keys``; a missing one is a :class:`ModelError`."""
    try:
        return {k: tensors[k] for k in keys}
    except KeyError as missing:
        raise ModelError(f"tensor {missing} is missing; the state does not fit this model") from None


def arrays(tensors: Mapping[str, Array]) -> Tensors:
    """The same tensors; what arithmetic, as numpy does, made a number of an array without dimensions is one again."""
    return {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in tensors.items()}


def without(tensors: Tensors, prefix: str) -> Tensors:
    """The entries whose name does not begin with ``prefix``."""
    return {k: v for k, v in tensors.items() if not k.startswith(prefix)}


def under(tensors: Tensors, prefix: str) -> Tensors:
    """The entries whose name begins with ``prefix``, with it cut off.

    >>> import numpy as np
    >>> list(under({"own/w": np.ones(1), "w": np.ones(1)}, "own/"))
    ['w']
    """
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    """The same tensors with ``prefix`` before each name."""
    return {prefix + k: v for k, v in tensors.items()}


def copied(tensors: Tensors) -> Tensors:
    """Contiguous copies that share no memory with ``tensors``."""
    return {k: np.array(v, order="C") for k, v in tensors.items()}


def spread(count: int, most: int) -> list[Array]:
    """``count`` rows in as few pieces of at most ``most`` as there can be, all about as large: each takes its rows from
    all over, as samples may be sorted by label.

    >>> [piece.tolist() for piece in spread(5, 2)]
    [[0, 3], [1, 4], [2]]
    """
    pieces = -(-count // most)
    return [np.arange(first, count, pieces) for first in range(pieces)]


def minus(a: Tensors, b: Tensors) -> Tensors:
    """``a - b`` over the names of ``a``."""
    return {k: difference(v, b[k]) for k, v in a.items()}


def difference(a: Array, b: Array) -> Array:
    """``a - b``; of truth values, which numpy does not subtract, where they differ."""
    return np.asarray(a ^ b if a.dtype == np.bool_ else a - b)


def is_float(array: Array) -> bool:
    """True for floating-point values, False for counters, bitmaps and truth values."""
    return bool(array.dtype.kind == "f")


def alike(a: Tensors, b: Tensors) -> bool:
    """True where names and shapes agree."""
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape for k in a)


def equal(a: Tensors, b: Tensors) -> bool:
    """True where names, dtypes, shapes and bits agree (NaN equals itself)."""
    return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(_bits(a), _bits(b))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
