"""The personal Gaussian head: a device's class statistics, fused with the fleet's, as one linear or quadratic layer.

The linear layer is W = Σ_i⁻¹ μ_ic through R, centred over classes and scaled down as a whole where its logits would
span more than :data:`SPAN`, or be sums of more than :data:`TERMS`. The quadratic one adds each mean's own uncertainty
to Σ_i: for very few samples.

``shared`` is what the server sent: means μ^g and their spread, the tied covariance Σ^g within classes, the variance
between devices, counts (:mod:`talaria.aggregate.class_statistics`). Statistics are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from talaria.aggregate import class_statistics as pooled
from talaria.algorithms.pfedgm import gaussian
from talaria.algorithms.pfedgm.gaussian import Statistics
from talaria.tensors import Array, Tensors
from talaria.training.interface import Task

CENTRES, HELD = "own/centres", "own/held"
"""Among a device's private tensors: its class means (C, k), and which classes it holds (C,)."""
UNSEEN = -50.0
"""Log prior of a class that neither the fleet nor the device has ever seen."""
SPAN = 30.0
"""Largest span of the served logits at the class means. Features that training has compacted give Mahalanobis
distances of 1e5, which float32 cannot hold to 1e-4; one factor on all logits changes no decision."""
TERMS = 300.0
"""Largest sum of the magnitudes that a served logit is made of at the class means. Where a device's features differ by
little beside what they have in common, large terms cancel, of which float32 keeps a ten-millionth each."""


@dataclass(frozen=True)
class Linear:
    """Logits (N, C) of what enters the last layer: ``weight`` (C, d), ``bias`` (C,)."""

    weight: Array
    bias: Array

    def named(self, layer: str) -> Tensors:
        """What it holds, by the keys that the layer in whose place it stands would have."""
        return {f"{layer}.weight": self.weight, f"{layer}.bias": self.bias}

    def __call__(self, inputs: Array) -> Array:
        """Logits (N, C) of ``inputs`` (N, d)."""
        found: Array = inputs @ self.weight.T + self.bias
        return found


@dataclass(frozen=True)
class Quadratic:
    """``log N(z; μ_c, Σ_c) + log π_c`` of z = ``matrix`` times what enters the last layer: ``factors`` (C, k, k) whiten
    per class; ``means`` (C, k), ``bias`` (C,), ``matrix`` (k, d)."""

    factors: Array
    means: Array
    bias: Array
    matrix: Array

    def named(self, layer: str) -> Tensors:
        """What it holds beside the projection, by the keys of the module that torch serves."""
        own = {"weight": self.weight, "shift": self.shift, "bias": self.bias}
        return {f"{layer}.1.{name}": value for name, value in own.items()}

    @property
    def weight(self) -> Array:
        """(C k, k): all classes' factors, one after another."""
        return self.factors.reshape(-1, self.factors.shape[2])

    @property
    def shift(self) -> Array:
        """(C k,): the whitened means."""
        found: Array = np.einsum("cij,cj->ci", self.factors, self.means).reshape(-1)
        return found

    def __call__(self, inputs: Array) -> Array:
        """Logits (N, C) of ``inputs`` (N, d)."""
        white = (inputs @ self.matrix.T) @ self.weight.T - self.shift
        found: Array = self.bias - 0.5 * np.square(white).reshape(len(inputs), len(self.bias), -1).sum(2)
        return found


def taken(task: Task, z: Array, shared: Tensors, at_least: int = 1) -> Statistics:
    """The statistics of the training samples' features ``z`` (N, k), without classes of fewer than ``at_least``."""
    flat = shared[pooled.WITHIN].ndim == 1
    return gaussian.collect(z, task.train.y, task.classes, diagonal=flat, at_least=at_least)


def remembered(stats: Statistics, shared: Tensors) -> Tensors:
    """What the device keeps of its classes for the next round: fused means, and which classes it holds."""
    return {CENTRES: fused(stats, shared)[0].astype(np.float32), HELD: (stats.count > 0).astype(np.uint8)}


def as_sent(stats: Statistics, shared: Tensors) -> Tensors:
    """The statistics under the names of ``shared``, and zeros for what the server alone works out."""
    values = {pooled.COUNT: stats.count, pooled.MEAN: stats.mean, pooled.WITHIN: stats.scatter}
    none = {k: np.zeros_like(shared[k]) for k in (pooled.BETWEEN, pooled.PRIOR)}
    return {k: v.astype(shared[k].dtype) for k, v in values.items()} | none


def personal_head(
    stats: Statistics, shared: Tensors, matrix: Array, prior_samples: float, predictive: bool
) -> Linear | Quadratic:
    """The head for features (N, d) under the projection ``matrix`` (k, d), in its dtype: one linear layer, or where
    ``predictive`` the projection and a quadratic score per class. ``prior_samples`` is ν₀."""
    means, spreads = fused(stats, shared)
    sigma, prior = covariance(stats, shared, prior_samples), log_prior(stats, shared)
    held, kind = stats.mean[stats.count > 0], matrix.dtype
    if not predictive:
        weight, bias = gaussian.discriminant(means, sigma, prior)
        weight, bias = weight - weight.mean(0), bias - bias.mean()
        scale = tamed(held @ weight.T + bias, np.abs(held) @ np.abs(weight).T + np.abs(bias))
        return Linear((scale * weight @ matrix.astype(np.float64)).astype(kind), (scale * bias).astype(kind))
    factors = [gaussian.whitening(sigma + spread) for spread in spreads]
    bias = prior - 0.5 * np.array([d for _, d in factors])
    white = np.stack([a for a, _ in factors])
    plain = Quadratic(white, means, bias, np.eye(means.shape[1]))
    terms = np.abs(held @ plain.weight.T - plain.shift) * (np.abs(held) @ np.abs(plain.weight).T + np.abs(plain.shift))
    scale = tamed(plain(held), terms.reshape(len(held), *white.shape[:2]).sum(2))
    return Quadratic((scale**0.5 * white).astype(kind), means.astype(kind), (scale * bias).astype(kind), matrix)


def fused(stats: Statistics, shared: Tensors) -> tuple[Array, list[Array]]:
    """``(μ_ic (C, k), [P_ic])``: K = P (P + Σ^g/n_ic)⁻¹, μ_ic = μ^g_c + K (m_ic − μ^g_c)."""
    prior, between, spread_of = (_known(shared, k) for k in (pooled.MEAN, pooled.BETWEEN, pooled.PRIOR))
    sigma = gaussian.regular(_known(shared, pooled.WITHIN))
    means, spreads = prior.copy(), []
    for c in range(len(prior)):
        variance = between + spread_of[c]
        spread = variance if sigma.ndim == 1 else np.diag(variance)
        if stats.count[c] > 0:
            means[c], spread, _ = gaussian.posterior(prior[c], spread, stats.mean[c], sigma / stats.count[c])
        spreads.append(spread)
    return means, spreads


def covariance(stats: Statistics, shared: Tensors, prior_samples: float) -> Array:
    """Σ_i = (ν₀ Σ^g + S_i)/(ν₀ + n_i − C_i); Σ^g is the device's own while the fleet has counted nothing."""
    n, held = float(stats.count.sum()), float((stats.count > 0).sum())
    sigma = _known(shared, pooled.WITHIN)
    if not shared[pooled.COUNT].any():
        sigma = gaussian.regular(stats.scatter / max(n - held, 1.0))
    return gaussian.regular((prior_samples * sigma + stats.scatter) / (prior_samples + n - held))


def log_prior(stats: Statistics, shared: Tensors) -> Array:
    """log π_c (C,) of the device's own labels, one sample's weight spread over all classes."""
    classes = len(stats.count)
    a = 1 / classes
    share = np.log((stats.count + a) / (stats.count.sum() + a * classes))
    seen = (stats.count > 0) | (_known(shared, pooled.COUNT) > 0)
    return np.where(seen, share, UNSEEN)


def tamed(logits: Array, terms: Array) -> float:
    """What to multiply logits (N, C) by so that no row spans more than :data:`SPAN`, and none of their ``terms`` (N, C)
    is above :data:`TERMS`; at most 1."""
    spans = logits.max(1) - logits.min(1)
    return min(1.0, *(most / max(float(of.max(initial=0)), most) for of, most in ((spans, SPAN), (terms, TERMS))))


def _known(shared: Tensors, name: str) -> Array:
    return shared[name].astype(np.float64)
