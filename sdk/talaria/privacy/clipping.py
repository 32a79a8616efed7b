"""How long a device's difference may be: one length for the whole run, or one that follows the devices' own.

A length that follows is that of Andrew et al. (NeurIPS 2021): each device tells within the sum whether its difference
was short enough, and the length ``C`` moves to where the share ``quantile`` of them is,
``C <- C exp(-rate (share - quantile))``. What it tells is one number of sensitivity 1/2, and has noise of its own, of
which the noise on the values makes up: both together are as private as ``noise`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from talaria.errors import StateError
from talaria.tensors import Array, Tensors

WITHIN = "privacy/within"
"""The metric: 1/2 of a device whose difference was not cut, -1/2 of any other."""
KEY = "privacy/clip"
"""Name of the length in a server's state: float64."""
COUNT_NOISE = 5.0
"""Standard deviation of the noise on the count of those who were not cut, in units of ``noise``; the paper has a
twentieth of the cohort. It makes the noise on values half a percent wider."""
SHORTEST, LONGEST = 1e-9, 1e9


def clipped(steps: Tensors, norm: float) -> Tensors:
    """All ``steps`` scaled down together, so that their L2 length is ``norm`` at most; float64 where they are."""
    own = length(steps)
    if own <= norm:
        return steps
    return {name: np.asarray(value * np.float64(norm / own)) for name, value in steps.items()}


def length(steps: Tensors) -> float:
    """The L2 length of all ``steps`` together."""
    return float(sum(float(np.square(v, dtype=np.float64).sum()) for v in steps.values()) ** 0.5)


def on_values(noise: float, count: float = COUNT_NOISE) -> float:
    """The noise multiplier of the values, where the count has noise of ``count`` times ``noise`` (above 1/2) and both
    together are to be as private as ``noise``: ``1 / noise^2 = 1 / values^2 + 1 / (2 count noise)^2``."""
    return noise / math.sqrt(1 - (2 * count) ** -2)


def next_clip(clip: float, share: float, quantile: float, rate: float) -> float:
    """The length for the next round, where ``share`` of the devices (with noise, also beyond 0..1) were within
    ``clip``."""
    moved = clip * math.exp(-rate * (min(max(share, 0.0), 1.0) - quantile))
    return min(max(moved, SHORTEST), LONGEST)


def clip_in(state: Mapping[str, Array]) -> float | None:
    """The length in a server's state, also of a rule around the one that keeps it; None without one.

    Raises :class:`StateError` where it is damaged.
    """
    found = next((value for name, value in state.items() if name.endswith(KEY)), None)
    if found is None:
        return None
    if found.shape != () or found.dtype.kind != "f" or not SHORTEST <= float(found) <= LONGEST:
        raise StateError(f"privacy: the length {KEY!r} is damaged; restore the state")
    return float(found)


def as_tensors(clip: float) -> Tensors:
    """The length as a server's state keeps it."""
    return {KEY: np.array(clip, np.float64)}
