"""Class-conditional Gaussians with a tied covariance: exact statistics, conjugate updates, discriminants.

Everything is float64 inside. A covariance is (d, d), or (d,) where it is diagonal; no matrix is inverted, only
factored. Sources: the Kalman gain form of the conjugate normal update; Fisher's LDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from talaria.tensors import Array

EPSILON = 1e-4
"""Share of the mean variance that is added to the diagonal of a covariance before it is factored."""
LEAST = 5e-7
"""Share of the trace that is added at least: pooled statistics travel as float32, whose rounding may take eigenvalues
below zero by a few 1e-7 of it. Only above 200 dimensions is it the larger of the two."""


@dataclass(frozen=True)
class Statistics:
    """Per class: ``count`` (C,), ``mean`` (C, d); over all: ``scatter`` = Σ_c Σ_b (z − m_c)(z − m_c)ᵀ,
    (d, d) or its diagonal (d,). Float64; classes without samples have mean 0."""

    count: Array
    mean: Array
    scatter: Array


def collect(z: Array, y: Array, classes: int, *, diagonal: bool = False, at_least: int = 1) -> Statistics:
    """The statistics of features ``z`` (N, d) with labels ``y`` (N,), without the classes of fewer than ``at_least``
    samples: neither their counts and means nor their part of the scatter."""
    many = np.bincount(y, minlength=classes) >= at_least
    z, y = z[many[y]].astype(np.float64), y[many[y]]
    count = np.bincount(y, minlength=classes).astype(np.float64)
    mean = np.zeros((classes, z.shape[1]))
    np.add.at(mean, y, z)
    mean /= np.maximum(count, 1)[:, None]
    away = z - mean[y]
    return Statistics(count, mean, np.square(away).sum(0) if diagonal else away.T @ away)


def posterior(prior: Array, spread: Array, mean: Array, noise: Array) -> tuple[Array, Array, Array]:
    """``(mean, covariance, gain)`` of N(``prior``, ``spread``) after seeing ``mean`` with error covariance ``noise``
    (that of one sample divided by their number).

    ``K = P (P + R)⁻¹``, ``μ + K (m − μ)``, ``(I − K) P``; elementwise where ``spread`` and ``noise`` are diagonal,
    (d,) each. ``(P + R)`` must be positive definite.
    """
    if spread.ndim == 1:
        gain = spread / (spread + noise)
        return prior + gain * (mean - prior), (1 - gain) * spread, gain
    gain = _solved(spread + noise, spread).T
    left = (np.eye(len(prior)) - gain) @ spread
    return prior + gain @ (mean - prior), (left + left.T) / 2, gain


def regular(covariance: Array, epsilon: float = EPSILON) -> Array:
    """``Σ + max(ε/d, LEAST) tr(Σ) · I``; the identity where Σ is zero."""
    diagonal = covariance if covariance.ndim == 1 else covariance.diagonal()
    level = float(diagonal.mean())
    if level <= 0:
        one = np.ones_like(diagonal)
        return one if covariance.ndim == 1 else np.diag(one)
    if covariance.ndim == 1:
        return covariance + epsilon * level
    raised: Array = covariance + max(epsilon, LEAST * len(diagonal)) * level * np.eye(len(diagonal))
    return raised


def discriminant(means: Array, covariance: Array, log_prior: Array) -> tuple[Array, Array]:
    """``(W, b)`` with logits ``W z + b = zᵀΣ⁻¹μ_c − ½ μ_cᵀΣ⁻¹μ_c + log π_c``: linear discriminant analysis.

    ``means`` (C, d), ``covariance`` positive definite, ``log_prior`` (C,); W is (C, d) and b (C,).
    """
    weight = means / covariance if covariance.ndim == 1 else _solved(covariance, means.T).T
    return weight, log_prior - 0.5 * (weight * means).sum(1)


def whitening(covariance: Array) -> tuple[Array, float]:
    """``(A, log det)`` with ``zᵀΣ⁻¹z = ||A z||²``: A is (d, d); the inverse of the Cholesky factor."""
    if covariance.ndim == 1:
        return np.diag(1 / np.sqrt(covariance)), float(np.log(covariance).sum())
    lower = np.linalg.cholesky(covariance)
    return np.linalg.solve(lower, np.eye(len(covariance))), 2 * float(np.log(lower.diagonal()).sum())


def factor(covariance: Array) -> Array:
    """What turns white noise (N, d) into N(0, Σ) by :func:`coloured`: Cholesky's L, or the deviations (d,)."""
    return np.sqrt(covariance) if covariance.ndim == 1 else np.linalg.cholesky(covariance)


def coloured(noise: Array, root: Array) -> Array:
    """White ``noise`` (N, d) with the covariance whose :func:`factor` is ``root``."""
    return noise * root if root.ndim == 1 else noise @ root.T


def _solved(positive: Array, right: Array) -> Array:
    """``X`` with ``positive @ X = right``, by the Cholesky factor. Raises numpy's LinAlgError where there is none."""
    lower = np.linalg.cholesky(positive)
    return np.linalg.solve(lower.T, np.linalg.solve(lower, right))
