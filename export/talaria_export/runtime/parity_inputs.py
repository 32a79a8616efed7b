"""Inputs drawn from a seed, equal on every machine: what parity is proven on when the user's samples stay at home."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from talaria.tensors import Array
from talaria_export.bundle.preprocess import Preprocessing


def drawn(seed: int, count: int, shape: tuple[int, ...], shift: float, scale: float) -> Array:
    """``count`` inputs, float32 ``(count, *shape)``, uniform with mean ``shift`` and deviation ``scale``.

    Made from the raw stream of PCG64, which numpy keeps fixed between versions (its distributions are not).
    """
    size = count * math.prod(shape)
    raw = np.random.PCG64(seed).random_raw(size)
    unit = (np.asarray(raw, dtype=np.uint64) >> np.uint64(40)).astype(np.float64) / 2**24
    return ((unit * 2 - 1) * math.sqrt(3) * scale + shift).astype(np.float32).reshape(count, *shape)


def drawn_as(source: Mapping[str, Any], steps: Preprocessing) -> Array:
    """The inputs that a manifest's ``parity`` names, ``seed``, ``count``, ``shift`` and ``scale``, as the bundle takes
    them; where ``normalized``, each channel in the unit that it comes in."""
    length, *rest = steps.inputs(source["count"])
    x = drawn(source["seed"], length, tuple(rest), source["shift"], source["scale"])
    return steps.raw(x) if source.get("normalized") else x


def spread(x: Array | None) -> tuple[float, float]:
    """``(shift, scale)`` for :func:`drawn` that resembles ``x`` while telling next to nothing about it.

    The scale is a power of two; the shift is a whole number of scales.
    """
    if x is None or x.size == 0:
        return 0.0, 1.0
    deviation = float(x.std(dtype=np.float64))
    scale = 2.0 ** round(math.log2(deviation)) if deviation > 1e-12 else 1.0
    return round(float(x.mean(dtype=np.float64)) / scale) * scale, scale


def over(kinds: int) -> tuple[float, float]:
    """``(shift, scale)`` for :func:`drawn` that gives numbers from 0 up to below ``kinds``, for models that cut them to
    whole ones."""
    return kinds / 2, 0.999 * kinds / math.sqrt(12)
