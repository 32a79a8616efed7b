"""Class-conditional Gaussians with a tied covariance: exact statistics, conjugate updates, discriminants.

Everything is float64 inside. A covariance is (d, d), or (d,) where it is diagonal; no matrix is inverted, only
factored. Sources: the Kalman gain form of the conjugate normal update; Fisher's LDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4
"""Share of the mean variance that is added to the diagonal of a covariance before it is factored."""
LEAST = 5e-7
"""Share of the trace that is added at least: pooled statistics travel as float32, whose rounding may take eigenvalues
below zero by a few 1e-7 of it. Only above 200 dimensions is it the larger of the two."""


@dataclass(frozen=True)
class Statistics:
    """Per class: ``count`` (C,), ``mean`` (C, d); over all: ``scatter`` = Σ_c Σ_b (z − m_c)(z − m_c)ᵀ,
    (d, d) or its diagonal (d,). Float64; classes without samples have mean 0."""

    count: Tensor
    mean: Tensor
    scatter: Tensor


def collect(z: Tensor, y: Tensor, classes: int, *, diagonal: bool = False, at_least: int = 1) -> Statistics:
    """The statistics of features ``z`` (N, d) with labels ``y`` (N,), without the classes of fewer than ``at_least``
    samples: neither their counts and means nor their part of the scatter."""
    many = torch.bincount(y, minlength=classes) >= at_least
    z, y = z[many[y]].double(), y[many[y]]
    count = torch.bincount(y, minlength=classes).double()
    mean = torch.zeros(classes, z.shape[1], dtype=torch.float64).index_add_(0, y, z)
    mean /= count.clamp(min=1)[:, None]
    away = z - mean[y]
    return Statistics(count, mean, away.square().sum(0) if diagonal else away.T @ away)


def posterior(prior: Tensor, spread: Tensor, mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(mean, covariance, gain)`` of N(``prior``, ``spread``) after seeing ``mean`` with error covariance ``noise``
    (that of one sample divided by their number).

    ``K = P (P + R)⁻¹``, ``μ + K (m − μ)``, ``(I − K) P``; elementwise where ``spread`` and ``noise`` are diagonal,
    (d,) each. ``(P + R)`` must be positive definite.
    """
    if spread.dim() == 1:
        gain = spread / (spread + noise)
        return prior + gain * (mean - prior), (1 - gain) * spread, gain
    gain = torch.cholesky_solve(spread, torch.linalg.cholesky(spread + noise)).T
    left = (torch.eye(len(prior), dtype=spread.dtype) - gain) @ spread
    return prior + gain @ (mean - prior), (left + left.T) / 2, gain


def regular(covariance: Tensor, epsilon: float = EPSILON) -> Tensor:
    """``Σ + max(ε/d, LEAST) tr(Σ) · I``; the identity where Σ is zero."""
    diagonal = covariance if covariance.dim() == 1 else covariance.diagonal()
    level = float(diagonal.mean())
    if level <= 0:
        one = torch.ones_like(diagonal)
        return one if covariance.dim() == 1 else torch.diag(one)
    if covariance.dim() == 1:
        return covariance + epsilon * level
    return covariance + max(epsilon, LEAST * len(diagonal)) * level * torch.eye(len(diagonal), dtype=covariance.dtype)


def discriminant(means: Tensor, covariance: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """``(W, b)`` with logits ``W z + b = zᵀΣ⁻¹μ_c − ½ μ_cᵀΣ⁻¹μ_c + log π_c``: linear discriminant analysis.

    ``means`` (C, d), ``covariance`` positive definite, ``log_prior`` (C,); W is (C, d) and b (C,).
    """
    if covariance.dim() == 1:
        weight = means / covariance
    else:
        weight = torch.cholesky_solve(means.T, torch.linalg.cholesky(covariance)).T
    return weight, log_prior - 0.5 * (weight * means).sum(1)


def whitening(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """``(A, log det)`` with ``zᵀΣ⁻¹z = ||A z||²``: A is (d, d); the inverse of the Cholesky factor."""
    if covariance.dim() == 1:
        return torch.diag(covariance.rsqrt()), covariance.log().sum()
    factor = torch.linalg.cholesky(covariance)
    eye = torch.eye(len(covariance), dtype=covariance.dtype)
    return torch.linalg.solve_triangular(factor, eye, upper=False), 2 * factor.diagonal().log().sum()


def factor(covariance: Tensor) -> Tensor:
    """What turns white noise (N, d) into N(0, Σ) by :func:`coloured`: Cholesky's L, or the deviations (d,)."""
    return covariance.sqrt() if covariance.dim() == 1 else torch.linalg.cholesky(covariance)


def coloured(noise: Tensor, root: Tensor) -> Tensor:
    """White ``noise`` (N, d) with the covariance whose :func:`factor` is ``root``."""
    return noise * root if root.dim() == 1 else noise @ root.T
