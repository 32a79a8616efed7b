"""Named input augmentations: pure functions ``(x, draws) -> x`` that draw from ``draws`` alone.

The name is a setting (:class:`talaria.types.Recipe`), so that it travels in a run's manifest and every device
means the same by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from talaria.errors import ConfigError, DataError
from talaria.foreign import shown
from talaria.seeds import Draws
from talaria.tensors import Array

Augmentation = Callable[[Array, Draws], Array]
"""``(x, draws) -> x``: float32 (N, ...) to an array of the same shape and dtype; the input stays untouched."""

_ANGLE = math.radians(15)
_SCALE = 0.1
_JITTER = 0.05
_SHIFT = 0.1


def none(x: Array, draws: Draws) -> Array:
    """``x`` as it is; draws nothing."""
    del draws
    return x


def imu(x: Array, draws: Draws) -> Array:
    """Another way of wearing the same sensor: ``x`` (N, 3k, T) holds k sensors of three axes each.

    Per sample: one rotation of up to 15 degrees for all its sensors (they sit on one rigid body), a gain of
    1 ± 0.1 per sensor, a shift by up to a tenth of the window (the edge value fills the gap), and noise of 0.05.
    Angles and noise are in the units of ``x``; on z-scored axes the rotation is that of the scaled space.
    After Um et al. 2017, arXiv:1706.00527.
    """
    if x.ndim != 3 or x.shape[1] % 3:
        raise DataError(f"augment 'imu': x has shape {x.shape}, need (N, 3k, time); use augment='none'")
    count, channels, time = x.shape
    sensors = x.reshape(count, channels // 3, 3, time)
    turned = _rotations(count, draws)[:, None] @ sensors
    gain = 1 + _SCALE * draws.normal(count, channels // 3, 1, 1)
    out = (turned * gain.astype(np.float32)).reshape(count, channels, time)
    at = _shifted(count, time, int(_SHIFT * time), draws)
    out = np.take_along_axis(out, at[:, None, :], 2)
    return out + (_JITTER * draws.normal(*x.shape)).astype(np.float32)


def _rotations(count: int, draws: Draws) -> Array:
    """float32 (N, 3, 3): rotations about random axes by an angle uniform in ±15 degrees (Rodrigues' formula)."""
    axis = draws.normal(count, 3)
    axis /= np.sqrt((axis * axis).sum(1, keepdims=True))
    angle = (2 * draws.uniform(count, 1, 1) - 1) * _ANGLE
    x, y, z = axis.T
    o = np.zeros_like(x)
    cross = np.stack([o, -z, y, z, o, -x, -y, x, o], 1).reshape(count, 3, 3)
    turned: Array = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)
    return turned.astype(np.float32)


def crop_flip(x: Array, draws: Draws) -> Array:
    """Images ``x`` (N, C, H, W): shifted by up to an eighth of each side, mirrored left to right half the time.

    The edge pixels fill the gap, because zero is not black in a normalized image.
    """
    if x.ndim != 4:
        raise DataError(f"augment 'crop_flip': x has shape {x.shape}, need (N, C, H, W); use augment='none'")
    count, _, height, width = x.shape
    rows = _shifted(count, height, height // 8, draws)
    columns = _shifted(count, width, width // 8, draws)
    mirrored = draws.uniform(count, 1) < 0.5
    columns = np.where(mirrored, columns[:, ::-1], columns)
    picked = np.take_along_axis(x, rows[:, None, :, None], 2)
    return np.take_along_axis(picked, columns[:, None, None, :], 3)


def _shifted(count: int, size: int, reach: int, draws: Draws) -> Array:
    """Where each of ``size`` places takes its value from, int64 (N, size), shifted by at most ``reach``."""
    shift = draws.integers(-reach, reach + 1, count, 1)
    return np.clip(np.arange(size) + shift, 0, size - 1)


AUGMENTATIONS: dict[str, Augmentation] = {"none": none, "imu": imu, "crop_flip": crop_flip}


def get(name: str) -> Augmentation:
    """The augmentation called ``name``; :class:`ConfigError` lists the valid names."""
    try:
        return AUGMENTATIONS[name]
    except KeyError:
        raise ConfigError(f"augment={shown(name)} is unknown; use one of {', '.join(AUGMENTATIONS)}") from None
