"""Pools class statistics of many devices exactly, and smooths them over rounds with a Kalman gain.

Reconstructed for pFedGM's global scale. Per class c: N_c, m̄_c and the within-scatter W add up by the law of total
scatter; the between-device variance T is the method-of-moments estimate of DerSimonian and Laird (1986), per
dimension, pooled over the classes that two devices or more hold. The pooled means are observations with error
R_c = Σ̄/N_c + T Σ_i n_ic²/N_c² of means that move because the features do:

    P⁻ = P + Q Σ̄;  K = P⁻ / (P⁻ + R);  μ ← μ + K (m̄ − μ);  P ← (1 − K) P⁻;  Σ ← (1 − β) Σ + β Σ̄
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from talaria.aggregate.arithmetic import cast, lerp
from talaria.aggregate.base import Aggregator
from talaria.aggregate.wrappers import chain
from talaria.errors import AggregationError, ConfigError
from talaria.tensors import Array, Tensors
from talaria.types import Update

COUNT, MEAN, WITHIN = "stats/count", "stats/mean", "stats/within"
BETWEEN, PRIOR = "stats/between", "stats/prior"
SENT = (COUNT, MEAN, WITHIN)
"""What a device sends: its counts (C,), means (C, d) and scatter; the server answers with pooled counts, smoothed
means, the covariance in the scatter's place, and T (d,) and P (C, d), :data:`ANSWERED`, which come back as zeros."""
ANSWERED = (BETWEEN, PRIOR)
ALL = (*SENT, *ANSWERED)
DIFFUSE = 1e6
"""Prior variance before anything is known."""


def empty(classes: int, dim: int, *, diagonal: bool) -> Tensors:
    """The shared statistics before the first round (float32)."""
    return {
        COUNT: np.zeros(classes, np.float32),
        MEAN: np.zeros((classes, dim), np.float32),
        WITHIN: np.zeros(dim if diagonal else (dim, dim), np.float32),
        BETWEEN: np.zeros(dim, np.float32),
        PRIOR: np.full((classes, dim), DIFFUSE, np.float32),
    }


class Pool:
    """Running sums over devices, float64; a local variable of one ``apply``. ``shape`` is that of the scatter."""

    def __init__(self, classes: int, dim: int, shape: tuple[int, ...]) -> None:
        self.dim = dim
        self.n, self.n_squared, self.holders = np.zeros(classes), np.zeros(classes), np.zeros(classes)
        self.mean, self.between, self.within = np.zeros((classes, dim)), np.zeros((classes, dim)), np.zeros(shape)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, count: Array, mean: Array, scatter: Array) -> None:
        """One device: means by Welford's update, so that nothing cancels."""
        count, mean = count.astype(np.float64), mean.astype(np.float64)
        total = self.n + count
        share = (count / np.maximum(total, 1))[:, None]
        away = mean - self.mean
        self.between += self.n[:, None] * share * np.square(away)
        self.mean += share * away
        self.n = total
        self.n_squared += np.square(count)
        self.holders += count > 0
        self.within += scatter

    def covariance(self) -> Array | None:
        """Σ̄ = W / (Σ n_ic − #{n_ic > 0}); None where no class has two samples on one device."""
        freedom = float(self.n.sum() - self.holders.sum())
        return self.within / freedom if freedom > 0 else None

    def variance_between(self, covariance: Array) -> Array:
        """T (d,), at least 0; 0 where no class is held by two devices."""
        many = self.holders >= 2
        if not many.any():
            return np.zeros(self.dim)
        sigma = diagonal(covariance)
        excess = self.between[many].sum(0) - (self.holders[many] - 1).sum() * sigma
        scale = (self.n[many] - self.n_squared[many] / self.n[many]).sum()
        return np.asarray(np.maximum(excess / scale, 0.0))


def diagonal(covariance: Array) -> Array:
    """The variances (d,) of a full or diagonal covariance."""
    return covariance if covariance.ndim == 1 else covariance.diagonal()


@dataclass(frozen=True, kw_only=True)
class PooledStatistics:
    """Takes the statistics out of each update, gives the rest to ``inner``, and renews the shared statistics.

    ``motion`` is Q in units of Σ̄; ``blend`` is β (the first covariance is taken whole). Statistics are pooled, not
    robust: one lying device can spoil them. Raises :class:`~talaria.errors.AggregationError` for statistics that
    :func:`require` refuses.
    """

    inner: Aggregator
    motion: float = 1e-2
    blend: float = 0.5

    def __post_init__(self) -> None:
        if not self.motion >= 0 or not 0 < self.blend <= 1:
            raise ConfigError(
                f"pooled statistics: motion={self.motion} must be at least 0 and blend={self.blend} in (0, 1]"
            )

    def init(self, shared: Tensors) -> Tensors:
        """The inner rule's state."""
        return self.inner.init(shared)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """New ``(shared, state)``; see the module."""
        classes, dim = shared[MEAN].shape
        pool = Pool(classes, dim, shared[WITHIN].shape)
        new, state = self.inner.apply(shared, state, _pooled(shared, updates, pool))
        return {**new, **self.renewed(shared, pool)}, state

    @np.errstate(over="ignore", invalid="ignore")
    def renewed(self, shared: Tensors, pool: Pool) -> Tensors:
        """The shared statistics after a round of the devices in ``pool``."""
        fresh = pool.covariance()
        if fresh is None:
            return {k: np.array(shared[k], order="C") for k in ALL}
        between = pool.variance_between(fresh)
        moved = shared[PRIOR].astype(np.float64) + self.motion * diagonal(fresh)
        seen = pool.n > 0
        n = np.maximum(pool.n, 1)[:, None]
        noise = diagonal(fresh) / n + between * pool.n_squared[:, None] / np.square(n)
        gain = moved / np.maximum(moved + noise, np.finfo(np.float64).tiny)
        gain = np.where(seen[:, None], gain, 0.0)
        old = shared[MEAN].astype(np.float64)
        first = not bool(shared[COUNT].any())
        covariance = fresh if first else lerp(shared[WITHIN].astype(np.float64), fresh, self.blend)
        values = {
            COUNT: np.where(seen, pool.n, shared[COUNT].astype(np.float64)),
            MEAN: old + gain * (pool.mean - old),
            WITHIN: covariance,
            BETWEEN: between,
            PRIOR: np.minimum((1 - gain) * moved, DIFFUSE),
        }
        return {k: cast(v, shared[k].dtype) for k, v in values.items()}


def _pooled(shared: Tensors, updates: Iterable[Update], pool: Pool) -> Iterator[Update]:
    for update in updates:
        pool.add(*require(shared, update))
        yield bare(update)


@runtime_checkable
class Renewing(Protocol):
    """An aggregator that may renew ``statistics`` by sums of its own."""

    @property
    def statistics(self) -> PooledStatistics | None:
        """How; None where there are none."""
        ...


def pools(rule: Aggregator) -> bool:
    """Whether ``rule`` renews class statistics."""
    return any(
        isinstance(one, PooledStatistics) or (isinstance(one, Renewing) and one.statistics is not None)
        for one in chain(rule)
    )


def bare(update: Update) -> Update:
    """The update without its statistics: what the inner rule folds."""
    return update.but(tensors={k: v for k, v in update.tensors.items() if k not in ALL})


def require(shared: Tensors, update: Update) -> tuple[Array, Array, Array]:
    """The counts, means and scatter that ``update`` brings, float64.

    Raises :class:`~talaria.errors.AggregationError` where they are missing, misshapen or not finite, where counts are
    not whole numbers of at least 0, and where the scatter is no covariance: symmetric and positive semidefinite, but
    for the rounding to float32. The diagonal alone would not do: one large entry beside it, and no device could factor
    what is pooled.
    """
    who = f"update of client {update.client!r}"
    for name in SENT:
        value = update.tensors.get(name)
        if value is None:
            raise AggregationError(f"{who}: tensor {name!r} is missing; send the device's class statistics")
        if value.shape != shared[name].shape or not np.isfinite(value).all():
            raise AggregationError(
                f"{who}: tensor {name!r} must be finite of shape {shared[name].shape}, got {value.shape}"
            )
    count, mean, scatter = (update.tensors[name].astype(np.float64) for name in SENT)
    if update.kind == "delta":
        # A codec rounds differences: what they come to is brought back to the nearest that can be.
        count, mean, scatter = (
            shared[n].astype(np.float64) + v for n, v in zip(SENT, (count, mean, scatter), strict=True)
        )
        return np.maximum(count.round(), 0.0), mean, nearest_covariance(scatter)
    odd = (count < 0) | (count != count.round())
    if odd.any():
        bad = float(count[odd][0])
        raise AggregationError(f"{who}: {COUNT!r} holds {bad:g}; counts must be whole numbers, none negative")
    if (diagonal(scatter) < 0).any():
        bad = float(diagonal(scatter).min())
        raise AggregationError(f"{who}: {WITHIN!r} holds a variance of {bad:g}; variances must not be negative")
    return count, mean, scatter if scatter.ndim == 1 else _require_covariance(scatter, who)


def _require_covariance(scatter: Array, who: str) -> Array:
    """``scatter`` made exactly symmetric. In float32 entry (i, j) of S is off by at most half an epsilon of
    sqrt(S_ii S_jj), so that an eigenvalue is by half an epsilon of the trace."""
    spread = np.sqrt(scatter.diagonal())
    rounding = float(np.finfo(np.float32).eps)
    if (np.abs(scatter - scatter.T) > 4 * rounding * spread[:, None] * spread).any():
        raise AggregationError(f"{who}: {WITHIN!r} is not symmetric, as every scatter is")
    even = (scatter + scatter.T) / 2
    least = float(np.linalg.eigvalsh(even)[0])
    if least < -rounding * float(scatter.diagonal().sum()):
        raise AggregationError(
            f"{who}: {WITHIN!r} has an eigenvalue of {least:.3g}; a scatter is positive semidefinite"
        )
    return even


def nearest_covariance(covariance: Array) -> Array:
    """The nearest positive semidefinite matrix, or variances of at least 0."""
    if covariance.ndim == 1:
        return np.maximum(covariance, 0.0)
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    nearest: Array = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return nearest
