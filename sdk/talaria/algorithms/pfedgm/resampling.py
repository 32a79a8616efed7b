"""What a round trains on: weighted re-sampling of classes, the class frequencies that this makes, and virtual features
of absent classes."""

from collections.abc import Callable

import numpy as np

from talaria.aggregate import class_statistics as pooled
from talaria.algorithms.pfedgm import gaussian
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors


def resampled(y: Array, rho: float, draws: Draws) -> Array:
    """``len(y)`` indices with P(b) ∝ n_{y_b}^−ρ: 0 keeps the data as it is, 1 makes the classes equally frequent.

    A class drawn more often than it has samples repeats them in turn; one drawn less often is thinned.
    """
    if rho == 0:
        return np.arange(len(y))
    held, count = np.unique(y, return_counts=True)
    share = np.cumsum(count.astype(np.float64) ** (1 - rho))
    drawn = np.searchsorted(share / share[-1], draws.uniform(len(y)), side="right")
    wanted = np.bincount(drawn, minlength=len(held))
    out = []
    for label, n in zip(held.tolist(), wanted.tolist(), strict=True):
        own = np.flatnonzero(y == label)
        rounds = -(-n // len(own))
        shuffled = [own[draws.order(len(own))] for _ in range(rounds)]
        out.append(np.concatenate(shuffled)[:n] if shuffled else own[:0])
    return np.concatenate(out)


def sampled_log_prior(count: Array, rho: float) -> Array:
    """log π̃_c (C,): the class frequencies under the re-sampling, with one sample's weight for an absent class."""
    weight = np.where(count > 0, np.maximum(count, 1) ** (1 - rho), 1.0).astype(count.dtype)
    found: Array = np.log(weight / weight.sum())
    return found


def virtual_features(count: Array, shared: Tensors, draws: Draws) -> Callable[[], tuple[Array, Array]] | None:
    """Draws one feature per class that the device lacks (``count`` 0) and the fleet knows, from N(μ^g_c, Σ^g); None
    where there is no such class."""
    absent = np.flatnonzero((count == 0) & (shared[pooled.COUNT] > 0))
    if not len(absent):
        return None
    root = gaussian.factor(gaussian.regular(shared[pooled.WITHIN].astype(np.float64)))
    means = shared[pooled.MEAN][absent].astype(np.float64)

    def sample() -> tuple[Array, Array]:
        noise = draws.normal(*means.shape)
        return (means + gaussian.coloured(noise, root)).astype(np.float32), absent

    return sample
