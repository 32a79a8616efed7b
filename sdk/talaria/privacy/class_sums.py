"""Class statistics as sums: what a fleet pools for pFedGM without seeing any device's.

Device ``i`` of weight ``w_i``, at most ``W``, has ``n_ic`` samples of class ``c`` with mean ``m_ic`` and scatter
``S_i``; ``mu_c`` is the fleet's mean, which all know. In a private round its share ``w_i / W`` of

    n_ic / w_i,  n_ic^2 / (w_i W),  [n_ic > 0] / w_i,
    n_ic (m_ic - mu_c) / w_i,  n_ic (m_ic - mu_c)^2 / w_i,  S_i / w_i

is added to that of others. These sums are all that :class:`~talaria.aggregate.class_statistics.Pool` holds: the scatter
between devices is ``sum n (m - mu)^2 - N (m_bar - mu)^2``, about means that are near, so that little cancels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from talaria.aggregate.class_statistics import COUNT, MEAN, WITHIN, Pool, nearest_covariance, require
from talaria.tensors import Array, Tensors
from talaria.types import Update

PREFIX = "stats/sum/"
COUNTS, SQUARES, HOLDERS = f"{PREFIX}count", f"{PREFIX}count_squared", f"{PREFIX}holders"
MEANS, AWAY, SCATTER = f"{PREFIX}mean", f"{PREFIX}away", f"{PREFIX}scatter"
SHARES = (COUNTS, SQUARES, HOLDERS)
"""Those that are never above 1."""


def shapes(known: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the sums by name, of a scatter the upper triangle; none where ``known``, the shapes of what is
    shared, has no class statistics."""
    if COUNT not in known:
        return {}
    classes, means, scatter = known[COUNT], known[MEAN], known[WITHIN]
    flat = scatter if len(scatter) == 1 else (scatter[0] * (scatter[0] + 1) // 2,)
    return {**dict.fromkeys(SHARES, classes), MEANS: means, AWAY: means, SCATTER: flat}


def brought(shared: Tensors, update: Update, weight: float, most_weight: int) -> Tensors:
    """What a device whose update counts ``weight`` brings, float64: see the module.

    Raises :class:`~talaria.errors.AggregationError` for statistics that are none.
    """
    count, mean, scatter = require(shared, update)
    cut = weight / update.weight  # a device above the largest weight counts as so many samples
    count, scatter = count * cut, scatter * cut
    share, away = count / weight, mean - shared[MEAN].astype(np.float64)
    flat = scatter if scatter.ndim == 1 else scatter[np.triu_indices(len(scatter))]
    return {
        COUNTS: share,
        SQUARES: share * count / most_weight,
        HOLDERS: (count > 0) / weight,
        MEANS: share[:, None] * away,
        AWAY: share[:, None] * np.square(away),
        SCATTER: flat / weight,
    }


def pooled(shared: Tensors, sums: Tensors, most_weight: int) -> Pool:
    """The pool that the opened ``sums`` of devices' shares come to."""
    classes, dim = shared[MEAN].shape
    pool = Pool(classes, dim, shared[WITHIN].shape)
    whole = {name: value * most_weight for name, value in sums.items()}
    pool.n = np.maximum(whole[COUNTS].round(), 0.0)
    pool.holders = np.clip(whole[HOLDERS].round(), 0.0, pool.n)
    pool.n_squared = np.clip(whole[SQUARES] * most_weight, pool.n, np.square(pool.n))
    step = whole[MEANS] / np.maximum(pool.n, 1)[:, None]
    pool.mean = shared[MEAN].astype(np.float64) + step
    pool.between = np.maximum(whole[AWAY] - pool.n[:, None] * np.square(step), 0.0)
    pool.within = nearest_covariance(_square(whole[SCATTER], shared[WITHIN].shape))
    return pool


def _square(flat: Array, shape: tuple[int, ...]) -> Array:
    if len(shape) == 1:
        return flat
    out = np.zeros(shape)
    out[np.triu_indices(shape[0])] = flat
    return out + np.triu(out, 1).T
