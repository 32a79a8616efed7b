"""Arithmetic that several rules share, on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from talaria.tensors import Array


def lerp(start: Array, end: Array, share: Array | float) -> Array:
    """``start + share * (end - start)``, float64; ``start`` itself at 0 and ``end`` itself at 1, for finite values."""
    near = np.greater_equal(share, 0.5)  # to the end: from there the step back is the short one
    one = end if near.all() else start
    base = one if near.size == 1 else np.where(near, end, start)
    out = np.subtract(end, start, dtype=np.float64, out=np.empty(np.broadcast_shapes(start.shape, end.shape)))
    out *= np.where(near, np.subtract(share, 1.0), share)
    out += base
    return out


@np.errstate(over="ignore")
def cast(value: Array, dtype: np.dtype[Any]) -> Array:
    """``value`` as ``dtype``; what leaves its range becomes infinite, for the caller to refuse. It may share memory."""
    return np.asarray(value).astype(dtype, copy=False)
