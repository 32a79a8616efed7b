"""Weighted values as whole numbers whose sum cannot leave the modulus.

A device's value ``x``, of weight ``w`` out of at most ``W``, counts as ``round(clip(x, bound) w / W unit / bound)``,
which is within ``-unit..unit``. ``unit`` is the largest for which ``most`` devices stay within half the modulus: no
overflow can happen, and the sum modulo 2^bits, read with its sign, is the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from talaria.errors import AggregationError, ConfigError
from talaria.tensors import Array

Bits = Literal[16, 32]


@dataclass(frozen=True)
class Grid:
    """Numbers modulo 2^``bits``, of which ``most`` devices add one each."""

    bits: int
    most: int

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise ConfigError(f"fixed point: bits={self.bits!r} must be 16 or 32")
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

    def encode(self, values: Array, bound: float, share: float) -> Array:
        """``values`` (floating point, any shape) as numbers of :attr:`dtype`; beyond ``bound`` they are cut.

        ``share`` is the device's weight over the largest, in (0, 1]. Raises :class:`AggregationError` for NaN.
        """
        if not np.isfinite(values).all():
            raise AggregationError("fixed point: the update holds NaN or infinity; lower the learning rate")
        cut = np.clip(values.astype(np.float64), -bound, bound)
        whole = np.rint(cut * (share * self.unit / bound))
        return np.clip(whole, -self.unit, self.unit).astype(np.int64).astype(self.dtype)

    def signed(self, total: Array) -> Array:
        """A sum of encoded values with its sign, int64."""
        return total.view(np.int16 if self.bits == 16 else np.int32).astype(np.int64)

    def decode(self, total: Array, bound: float) -> Array:
        """The sum of the devices' ``share * value``, float64."""
        return self.signed(total) * (bound / self.unit)
