"""Weighted values as whole numbers whose sum cannot leave the modulus.

A device's value ``x``, of weight ``w`` out of at most ``W``, counts as ``round(clip(x, bound) w / W unit / bound)``,
which is within ``-unit..unit``. ``unit`` is the largest for which ``most`` devices stay within half the modulus: no
overflow can happen, and the sum modulo 2^bits, read with its sign, is the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from talaria.errors import AggregationError, ConfigError
from talaria.foreign import shown
from talaria.tensors import Array

_BLOCK = 1 << 13
"""Values at once: their float64 copies stay in the cache."""


def require_bits(what: str, bits: object) -> None:
    """Raise :class:`~talaria.errors.ConfigError`, beginning with ``what``, unless numbers can have so many ``bits``."""
    if type(bits) is not int or bits not in (16, 32):
        raise ConfigError(f"{what}: bits={shown(bits)} must be 16 or 32")


@dataclass(frozen=True)
class Grid:
    """Numbers modulo 2^``bits``, of which ``most`` devices add one each."""

    bits: int
    most: int

    def __post_init__(self) -> None:
        require_bits("fixed point", self.bits)
        if self.most < 1 or self.unit < 1 << 6:
            raise ConfigError(
                f"fixed point: most={self.most} devices leave {self.bits} bits fewer than 7 for a value; use bits=32"
            )

    @property
    def unit(self) -> int:
        """What the largest value of one device counts."""
        return ((1 << (self.bits - 1)) - 1) // self.most

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned numbers of these bits; their addition is that of the modulus."""
        return np.dtype(np.uint16 if self.bits == 16 else np.uint32)

    def encode(self, values: Array, bound: float, share: float, out: Array | None = None) -> Array:
        """``values`` (floating point, any shape) as numbers of :attr:`dtype`; beyond ``bound`` they are cut.

        ``share`` is the device's weight over the largest, in (0, 1]. ``out`` (as many values, of this dtype's width,
        contiguous) takes them. Raises :class:`AggregationError` for NaN.
        """
        flat, scale = np.ascontiguousarray(values).reshape(-1), share * self.unit / bound
        if out is None:
            out = np.empty(values.shape, self.dtype)
        # Two's complement: a signed number is written where the unsigned one is read.
        into = out.reshape(-1).view(out.dtype.str.replace("u", "i"))
        room = np.empty(min(len(flat), _BLOCK))
        for start in range(0, len(flat), _BLOCK):
            given = flat[start : start + _BLOCK]
            part = room[: len(given)]
            np.copyto(part, given)
            if not np.isfinite(part.dot(part)) and not np.isfinite(part).all():  # finite squares: all are finite
                raise AggregationError("fixed point: the update holds NaN or infinity; lower the learning rate")
            np.clip(part, -bound, bound, out=part)
            part *= scale
            np.rint(part, out=part)  # at most ``unit``: three roundings of a number below 2^31 are far below 1/2
            np.copyto(into[start : start + _BLOCK], part, casting="unsafe")
        return out

    def signed(self, total: Array) -> Array:
        """A sum of encoded values with its sign, int64."""
        return total.view(np.int16 if self.bits == 16 else np.int32).astype(np.int64)

    def decode(self, total: Array, bound: float) -> Array:
        """The sum of the devices' ``share * value``, float64."""
        return self.signed(total) * (bound / self.unit)
