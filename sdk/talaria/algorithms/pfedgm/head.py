"""The personal Gaussian head: a device's class statistics, fused with the fleet's, as one linear or quadratic layer.

``shared`` is what the server sent: means μ^g and their spread, the tied covariance Σ^g within classes, the variance
between devices, counts (:mod:`talaria.aggregate.class_statistics`). Statistics are float64.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential

from talaria.aggregate import class_statistics as pooled
from talaria.algorithms.pfedgm import gaussian
from talaria.algorithms.pfedgm.gaussian import Statistics
from talaria.algorithms.pfedgm.navigator import Projection
from talaria.model.state import array_of, tensor_of
from talaria.tensors import Array, Tensors
from talaria.types import Task

UNSEEN = -50.0
"""Log prior of a class that neither the fleet nor the device has ever seen."""
SPAN = 30.0
"""Largest span of the served logits at the class means. Features that training has compacted give Mahalanobis
distances of 1e5, which float32 cannot hold to 1e-4; one factor on all logits changes no decision."""


class Quadratic(Module):
    """``log N(z; μ_c, Σ_c) + log π_c``: ``factors`` (C, k, k) whiten per class; ``means`` (C, k), ``bias`` (C,)."""

    def __init__(self, factors: Tensor, means: Tensor, bias: Tensor) -> None:
        super().__init__()
        classes, dim, _ = factors.shape
        self.register_buffer("weight", factors.reshape(classes * dim, dim))
        self.register_buffer("shift", torch.einsum("cij,cj->ci", factors, means).reshape(-1))
        self.register_buffer("bias", bias)

    def forward(self, z: Tensor) -> Tensor:
        """Logits (N, C)."""
        bias = self.get_buffer("bias")
        white = z @ self.get_buffer("weight").T - self.get_buffer("shift")
        return bias - 0.5 * white.square().reshape(len(z), len(bias), -1).sum(2)


def taken(task: Task, z: Array, shared: Tensors, at_least: int = 1) -> Statistics:
    """The statistics of the training samples' features ``z`` (N, k), without classes of fewer than ``at_least``."""
    flat, y = shared[pooled.WITHIN].ndim == 1, tensor_of(task.train.y)
    return gaussian.collect(tensor_of(z), y, task.classes, diagonal=flat, at_least=at_least)


def as_sent(stats: Statistics, shared: Tensors) -> Tensors:
    """The statistics under the names of ``shared``, and zeros for what the server alone works out."""
    values = {pooled.COUNT: stats.count, pooled.MEAN: stats.mean, pooled.WITHIN: stats.scatter}
    none = {k: np.zeros_like(shared[k]) for k in (pooled.BETWEEN, pooled.PRIOR)}
    return {k: array_of(v).astype(shared[k].dtype) for k, v in values.items()} | none


def personal_head(stats: Statistics, shared: Tensors, matrix: Tensor, prior_samples: float, predictive: bool) -> Module:
    """The head for features (N, d) under the projection ``matrix`` (k, d): one linear layer, or where ``predictive``
    the projection and a quadratic score per class. ``prior_samples`` is ν₀."""
    means, spreads = fused(stats, shared)
    sigma, prior = covariance(stats, shared, prior_samples), log_prior(stats, shared)
    held, kind = stats.mean[stats.count > 0], matrix.dtype
    if not predictive:
        weight, bias = gaussian.discriminant(means, sigma, prior)
        weight, bias = weight - weight.mean(0), bias - bias.mean()
        scale = tamed(held @ weight.T + bias)
        return _linear((scale * weight @ matrix.double()).to(kind), (scale * bias).to(kind))
    factors = [gaussian.whitening(sigma + spread) for spread in spreads]
    bias = prior - 0.5 * torch.stack([d for _, d in factors])
    white = torch.stack([a for a, _ in factors])
    scale = tamed(Quadratic(white, means, bias)(held))
    score = Quadratic((scale**0.5 * white).to(kind), means.to(kind), (scale * bias).to(kind))
    return Sequential(Projection(matrix), score)


def fused(stats: Statistics, shared: Tensors) -> tuple[Tensor, list[Tensor]]:
    """``(μ_ic (C, k), [P_ic])``: K = P (P + Σ^g/n_ic)⁻¹, μ_ic = μ^g_c + K (m_ic − μ^g_c)."""
    prior, between, spread_of = (_known(shared, k) for k in (pooled.MEAN, pooled.BETWEEN, pooled.PRIOR))
    sigma = gaussian.regular(_known(shared, pooled.WITHIN))
    means, spreads = prior.clone(), []
    for c in range(len(prior)):
        variance = between + spread_of[c]
        spread = variance if sigma.dim() == 1 else torch.diag(variance)
        if stats.count[c] > 0:
            means[c], spread, _ = gaussian.posterior(prior[c], spread, stats.mean[c], sigma / stats.count[c])
        spreads.append(spread)
    return means, spreads


def covariance(stats: Statistics, shared: Tensors, prior_samples: float) -> Tensor:
    """Σ_i = (ν₀ Σ^g + S_i)/(ν₀ + n_i − C_i); Σ^g is the device's own while the fleet has counted nothing."""
    n, held = float(stats.count.sum()), float((stats.count > 0).sum())
    sigma = _known(shared, pooled.WITHIN)
    if not shared[pooled.COUNT].any():
        sigma = gaussian.regular(stats.scatter / max(n - held, 1.0))
    return gaussian.regular((prior_samples * sigma + stats.scatter) / (prior_samples + n - held))


def log_prior(stats: Statistics, shared: Tensors) -> Tensor:
    """log π_c (C,) of the device's own labels, one sample's weight spread over all classes."""
    classes = len(stats.count)
    a = 1 / classes
    share = torch.log((stats.count + a) / (stats.count.sum() + a * classes))
    seen = (stats.count > 0) | (_known(shared, pooled.COUNT) > 0)
    return torch.where(seen, share, torch.full_like(share, UNSEEN))


def tamed(logits: Tensor) -> float:
    """What to multiply logits (N, C) by so that no row spans more than :data:`SPAN`; at most 1."""
    spans = logits.amax(1) - logits.amin(1) if len(logits) else torch.zeros(1)
    return min(1.0, SPAN / max(float(spans.max()), SPAN))


def _known(shared: Tensors, name: str) -> Tensor:
    return tensor_of(shared[name]).double()


def _linear(weight: Tensor, bias: Tensor) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer
