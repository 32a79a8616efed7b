"""pFedGM: personal Gaussian classifiers over shared features (Hu, Ma, arXiv:2603.11620, 2026).

Confirmed (abstract): clients' representation distributions are modelled, not their heads alone; a Gaussian generator
models heterogeneity by weighted re-sampling; a shared objective pushes classes apart across clients and a local one
shrinks the spread within them; the Gaussian classifier splits into a navigator, optimized globally, and a statistic
extractor; a Kalman-like gain fuses at two scales, global and local, with the global representation distribution as
prior and the client's data as likelihood. Reconstructed: every equation, after conjugate Gaussian updates and the
relatives pFedFDA (NeurIPS 2024) and FedPAC. No code was published; the accuracies in the paper are not claimed here.

    z = R φ_θ(x), R a fixed projection to k numbers;  z | c ~ N(μ_c, Σ), one Σ for all classes
    round:  CE(navigator) + η_inter Σ relu(m − ||V_c − V_c'||)² + η_intra ||z − μ^loc_y||²/k + ω CE(navigator, virtual)
            on classes re-sampled ∝ n_c^−ρ and virtual features of absent classes from N(μ^g_c, Σ^g); θ and V are sent
            with the counts, means and scatter of z after training (classes of n_min samples or more)
    server: θ, V ← mean;  statistics pooled and smoothed (:mod:`talaria.aggregate.class_statistics`)
    serve:  statistics on the device's data with the present θ;  K = P (P + Σ^g/n_ic)⁻¹, P = T + P^g_c;
            μ_ic = μ^g_c + K (m_ic − μ^g_c);  Σ_i = (ν₀ Σ^g + S_i)/(ν₀ + n_i − C_i);  logits by linear discriminant

The served head is one linear layer, W = Σ_i⁻¹ μ_ic through R, centred over classes and scaled down as a whole where
its logits would span more than 30. ``predictive`` adds each mean's own uncertainty to Σ_i,
which is quadratic in z: for very few samples. The variance head that the abstract's generator may have is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor
from torch.nn import Module
from torch.nn import functional as F

from talaria.aggregate import class_statistics as pooled
from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms import gaussian
from talaria.algorithms.card import Card
from talaria.algorithms.gaussian import Statistics
from talaria.algorithms.navigator import (
    ANCHORS,
    EXTRACTOR,
    SCALE,
    Navigated,
    Projection,
    Quadratic,
    last_linear,
    linear_of,
    projection,
    projection_for,
    quadratic_of,
    replaced,
    spread_apart,
)
from talaria.algorithms.parts import WHOLE, refuse_neutral, require, update
from talaria.algorithms.resampling import resampled, sampled_log_prior
from talaria.algorithms.tuning import SAMPLES, labelled
from talaria.tensors import only, prefixed, under
from talaria.training.loop import Objective, predict, ready, served, state_of, train
from talaria.types import Samples, Split, Task, Tensors, Update

NAVIGATOR = "navigator/"
CENTRES = "own/centres"
HELD = "own/held"
UNSEEN = -50.0
"""Log prior of a class that neither the fleet nor the device has ever seen."""
SPAN = 30.0
"""Largest span of the served logits at the class means. Features that training has compacted give Mahalanobis
distances of 1e5, which float32 cannot hold to 1e-4; one factor on all logits changes no decision."""


@dataclass(frozen=True, kw_only=True)
class PFedGM:
    """``features`` is k; ``covariance`` "full", "diagonal", or "auto": full up to 128 features. ``rho`` is ρ;
    ``inter``, ``intra``, ``virtual`` are η_inter, η_intra and ω; ``margin`` is m. ``prior_samples`` is ν₀ (0: k).

    ``tune_epochs`` trains θ and V on the device before the served statistics are taken, at ``tune_lr`` (0: the
    recipe's); ``tune_on="all"`` learns and takes statistics from the validation samples too. The result stays there.
    """

    features: int = 64
    covariance: str = "auto"
    rho: float = 0.5
    inter: float = 0.1
    intra: float = 0.01
    virtual: float = 0.1
    margin: float = 1.0
    n_min: int = 2
    prior_samples: float = 0.0
    predictive: bool = False
    tune_epochs: int = 5
    tune_lr: float = 0.0
    tune_on: str = "train"
    motion: float = 1e-2
    blend: float = 0.5
    allow_degenerate: bool = False
    inner: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="pfedgm",
        title="pFedGM",
        shares="body, adapters, class anchors; counts, means and scatter of its features",
        keeps="its own class statistics, BatchNorm statistics",
        serves="the shared features, tuned on the device, with its own Gaussian head, one linear layer",
        source="Hu, Ma, 2026, arXiv:2603.11620 (abstract)",
        evidence="reconstructed",
    )

    def __post_init__(self) -> None:
        require(
            "pfedgm",
            features=(1 <= self.features <= 1024, self.features, "must be in 1..1024"),
            covariance=(
                self.covariance in ("auto", "full", "diagonal"),
                self.covariance,
                "must be 'auto', 'full' or 'diagonal'",
            ),
            rho=(0 <= self.rho <= 1, self.rho, "must be in [0, 1]"),
            inter=(self.inter >= 0, self.inter, "must be at least 0"),
            intra=(self.intra >= 0, self.intra, "must be at least 0"),
            virtual=(self.virtual >= 0, self.virtual, "must be at least 0"),
            margin=(self.margin > 0, self.margin, "must be above 0"),
            n_min=(self.n_min >= 2, self.n_min, "must be at least 2: the mean of one sample is that sample"),
            prior_samples=(self.prior_samples >= 0, self.prior_samples, "must be at least 0 (0 takes `features`)"),
            tune_epochs=(self.tune_epochs >= 0, self.tune_epochs, "must be at least 0"),
            tune_lr=(self.tune_lr >= 0, self.tune_lr, "must be at least 0 (0 takes the recipe's)"),
            tune_on=(self.tune_on in SAMPLES, self.tune_on, f"must be one of {SAMPLES}"),
            motion=(self.motion >= 0, self.motion, "must be at least 0"),
            blend=(0 < self.blend <= 1, self.blend, "must be in (0, 1]"),
        )
        if self.inter == self.intra == self.virtual == 0:
            effect = "with intra and virtual 0 too switches all of its objectives off"
            refuse_neutral("pfedgm", "inter", self.inter, effect, self.allow_degenerate)

    @property
    def aggregator(self) -> Aggregator:
        return pooled.PooledStatistics(inner=self.inner, motion=self.motion, blend=self.blend)

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        layer = last_linear(model, split)
        state, head = state_of(model), {f"{layer}.weight", f"{layer}.bias"}
        away = [k for k in split.travels("body", "adapters", "head") if k not in head]
        weight = state[f"{layer}.weight"]
        matrix = projection(self.features, weight.shape[1], weight.dtype)
        anchors = {ANCHORS: weight @ matrix.T, SCALE: torch.zeros((), dtype=weight.dtype)}
        stats = pooled.empty(len(weight), len(matrix), diagonal=self._is_diagonal(len(matrix)))
        shared = {**only(state, away), **prefixed(anchors, NAVIGATOR), **stats}
        gone = {*away, *head}
        return shared, {k: v for k, v in state.items() if k not in gone}

    def _is_diagonal(self, dim: int) -> bool:
        return self.covariance == "diagonal" or (self.covariance == "auto" and dim > 128)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        inner = self._task(task, shared)
        state = self._trained(inner, self._state(task, shared, private), shared, private, "train")
        z = predict(served(inner, ready(inner, state)), inner.train.x)
        stats = self._statistics(inner, z, shared)
        sent = self._statistics(inner, z, shared, at_least=self.n_min)
        values = {**under(state, EXTRACTOR), **prefixed(only(state, (ANCHORS, SCALE)), NAVIGATOR)}
        values |= _as_sent(sent, shared)
        moved = update(task, values, shared)
        means, _ = self._fused(stats, shared)
        own = {CENTRES: means.float(), HELD: (stats.count > 0).to(torch.uint8)}
        kept = [k for k in values if k not in shared]
        return moved, {**only(values, kept), **own}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        layer = last_linear(task.model, task.split)
        matrix = projection_for(task.model, layer, task.mask, self.features)
        inner = self._task(task, shared).but(train=labelled(task, self.tune_on))
        state = ready(inner, self._state(task, shared, private))
        if self.tune_epochs:
            recipe = task.recipe.but(epochs=self.tune_epochs, steps=None, lr=self.tune_lr or task.recipe.lr)
            local = inner.but(recipe=recipe)
            state = self._trained(local, state, shared, private, "tune")
        stats = self._statistics(inner, predict(served(inner, state), inner.train.x), shared)
        head = self.head(stats, shared, matrix)
        filler = {f"{layer}.{k}": v for k, v in task.model.get_submodule(layer).state_dict().items()}
        module = served(task, {**under(state, EXTRACTOR), **filler})
        return replaced(module, layer, head).requires_grad_(False).eval()

    def head(self, stats: Statistics, shared: Tensors, matrix: Tensor) -> Module:
        """The personal head for features (N, d) under the projection ``matrix`` (k, d)."""
        means, spreads = self._fused(stats, shared)
        covariance = self._covariance(stats, shared)
        prior = self._log_prior(stats, shared)
        held = stats.mean[stats.count > 0]
        if not self.predictive:
            weight, bias = gaussian.discriminant(means, covariance, prior)
            weight, bias = weight - weight.mean(0), bias - bias.mean()
            scale = tamed(held @ weight.T + bias)
            return linear_of((scale * weight @ matrix.double()).to(matrix.dtype), (scale * bias).to(matrix.dtype))
        factors = [gaussian.whitening(covariance + spread) for spread in spreads]
        bias = prior - 0.5 * torch.stack([d for _, d in factors])
        white = torch.stack([a for a, _ in factors])
        scale = tamed(Quadratic(white, means, bias)(held))
        return quadratic_of(matrix, scale**0.5 * white, means, scale * bias)

    def _fused(self, stats: Statistics, shared: Tensors) -> tuple[Tensor, list[Tensor]]:
        """``(μ_ic (C, k), [P_ic])`` at the local scale."""
        prior = shared[pooled.MEAN].double()
        sigma = gaussian.regular(shared[pooled.WITHIN].double())
        means, spreads = prior.clone(), []
        for c in range(len(prior)):
            variance = shared[pooled.BETWEEN].double() + shared[pooled.PRIOR][c].double()
            spread = variance if sigma.dim() == 1 else torch.diag(variance)
            if stats.count[c] > 0:
                means[c], spread, _ = gaussian.posterior(prior[c], spread, stats.mean[c], sigma / stats.count[c])
            spreads.append(spread)
        return means, spreads

    def _covariance(self, stats: Statistics, shared: Tensors) -> Tensor:
        nu = self.prior_samples or float(self.features)
        n, held = float(stats.count.sum()), float((stats.count > 0).sum())
        sigma = shared[pooled.WITHIN].double()
        if not bool(shared[pooled.COUNT].any()):
            sigma = gaussian.regular(stats.scatter / max(n - held, 1.0))
        return gaussian.regular((nu * sigma + stats.scatter) / (nu + n - held))

    def _log_prior(self, stats: Statistics, shared: Tensors) -> Tensor:
        classes = len(stats.count)
        a = 1 / classes
        share = torch.log((stats.count + a) / (stats.count.sum() + a * classes))
        seen = (stats.count > 0) | (shared[pooled.COUNT] > 0)
        return torch.where(seen, share, torch.full_like(share, UNSEEN))

    def _task(self, task: Task, shared: Tensors) -> Task:
        layer = last_linear(task.model, task.split)
        matrix = projection_for(task.model, layer, task.mask, self.features)
        extractor = replaced(task.model, layer, Projection(matrix))
        module = Navigated(extractor, shared[NAVIGATOR + ANCHORS].clone())
        keys = set(extractor.state_dict())
        names = {p: tuple(EXTRACTOR + k for k in task.split.of(p) if k in keys) for p in WHOLE}
        split = Split(
            names["body"],
            names["adapters"],
            (*names["head"], ANCHORS, SCALE),
            frozenset(EXTRACTOR + k for k in task.split.statistics),
            frozenset(EXTRACTOR + k for k in task.split.counters),
            task.split.buffers,
        )
        return task.but(model=module, split=split)

    def _state(self, task: Task, shared: Tensors, private: Tensors) -> Tensors:
        own = {k: v for k, v in {**shared, **private}.items() if k in set(task.split.keys)}
        return {**prefixed(own, EXTRACTOR), **under(shared, NAVIGATOR)}

    def _trained(self, inner: Task, state: Tensors, shared: Tensors, private: Tensors, purpose: str) -> Tensors:
        draws = inner.generator(purpose + " samples")
        samples = inner.train.take(resampled(inner.train.y, self.rho, draws))
        objective = self._objective(inner.train, inner.classes, shared, private, draws)
        return train(inner, state, samples=samples, objective=objective, purpose=purpose)

    def _statistics(self, inner: Task, z: Tensor, shared: Tensors, at_least: int = 1) -> Statistics:
        flat = shared[pooled.WITHIN].dim() == 1
        return gaussian.collect(z, inner.train.y, inner.classes, diagonal=flat, at_least=at_least)

    def _objective(
        self, samples: Samples, classes: int, shared: Tensors, private: Tensors, draws: Generator
    ) -> Objective:
        count = torch.bincount(samples.y, minlength=classes).float()
        offset = sampled_log_prior(count, self.rho)
        virtual = self._virtual(count, shared, draws)
        centres, held = private.get(CENTRES), private.get(HELD)

        def objective(module: Module, x: Tensor, y: Tensor) -> Tensor:
            navigated = cast(Navigated, module)
            z = navigated(x)
            loss = F.cross_entropy(navigated.scores(z) + offset, y)
            loss = loss + self.inter * spread_apart(navigated.anchors, self.margin)
            if centres is not None and held is not None:
                known = held[y].float()
                loss = loss + self.intra * ((z - centres[y]).square().mean(1) * known).mean()
            if virtual is not None:
                features, labels = virtual()
                loss = loss + self.virtual * F.cross_entropy(navigated.scores(features), labels)
            return loss

        return objective

    def _virtual(self, count: Tensor, shared: Tensors, draws: Generator) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Draws one feature per absent class that the fleet knows, from the broadcast Gaussians."""
        absent = ((count == 0) & (shared[pooled.COUNT] > 0)).nonzero().flatten()
        if self.virtual == 0 or not len(absent):
            return None
        sigma = gaussian.regular(shared[pooled.WITHIN].double())
        root = gaussian.factor(sigma)
        means = shared[pooled.MEAN][absent].double()

        def sample() -> tuple[Tensor, Tensor]:
            noise = torch.randn(means.shape, generator=draws, dtype=torch.float64)
            return (means + gaussian.coloured(noise, root)).float(), absent

        return sample


def tamed(logits: Tensor) -> float:
    """What to multiply logits (N, C) by so that no row spans more than :data:`SPAN`; at most 1."""
    spans = logits.amax(1) - logits.amin(1) if len(logits) else torch.zeros(1)
    return min(1.0, SPAN / max(float(spans.max()), SPAN))


def _as_sent(stats: Statistics, shared: Tensors) -> Tensors:
    values = {pooled.COUNT: stats.count, pooled.MEAN: stats.mean, pooled.WITHIN: stats.scatter}
    none = {k: torch.zeros_like(shared[k]) for k in (pooled.BETWEEN, pooled.PRIOR)}
    return {k: v.to(shared[k].dtype) for k, v in values.items()} | none
