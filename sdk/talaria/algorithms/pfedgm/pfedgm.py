"""pFedGM: personal Gaussian classifiers over shared features (Hu, Ma, arXiv:2603.11620, 2026).

Confirmed (abstract): clients' representation distributions are modelled, not their heads alone; a Gaussian generator
models heterogeneity by weighted re-sampling; a shared objective pushes classes apart across clients and a local one
shrinks the spread within them; the Gaussian classifier splits into a navigator, optimized globally, and a statistic
extractor; a Kalman-like gain fuses at two scales, global and local, with the global representation distribution as
prior and the client's data as likelihood. Reconstructed: every equation, after conjugate Gaussian updates and the
relatives pFedFDA (NeurIPS 2024) and FedPAC. No code was published; the accuracies in the paper are not claimed here.

    z = R φ_θ(x), R a fixed projection to k numbers;  z | c ~ N(μ_c, Σ), one Σ for all classes
    round:  CE(navigator) + η_inter mean relu(m − ||V_c − V_c'||)² + η_intra ||z − μ^loc_y||²/k + ω CE(virtual)
            on classes re-sampled ∝ n_c^−ρ and virtual features of absent classes from N(μ^g_c, Σ^g); θ and V are sent
            with the counts, means and scatter of z after training (classes of n_min samples or more)
    server: θ, V ← mean;  statistics pooled and smoothed (:mod:`talaria.aggregate.class_statistics`)
    serve:  statistics on the device's data with the present θ;  K = P (P + Σ^g/n_ic)⁻¹, P = T + P^g_c;
            μ_ic = μ^g_c + K (m_ic − μ^g_c);  Σ_i = (ν₀ Σ^g + S_i)/(ν₀ + n_i − C_i);  logits by linear discriminant

CE(navigator) is of its scores plus the log frequencies of the re-sampled classes, CE(virtual) of the scores alone: one
virtual feature is drawn of each absent class, whatever its share. The variance head that the abstract's generator may
have is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from talaria.aggregate import class_statistics as pooled
from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import TuneOn, labelled
from talaria.algorithms.hparams import Epochs, Rate, above, at_least, check, one_of, require, within
from talaria.algorithms.pfedgm import navigator
from talaria.algorithms.pfedgm.head import CENTRES, HELD, as_sent, personal_head, remembered, taken
from talaria.algorithms.pfedgm.navigator import projection_of
from talaria.algorithms.pfedgm.objective import objective
from talaria.algorithms.pfedgm.resampling import resampled
from talaria.algorithms.pfedgm.serving import entering, served_with
from talaria.algorithms.sharing import WHOLE, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import ready, state_of, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class PFedGM:
    """``features`` is k; ``covariance`` "full", "diagonal", or "auto": full up to 128 features. ``rho`` is ρ;
    ``inter``, ``intra``, ``virtual`` are η_inter, η_intra and ω; ``margin`` is m. ``prior_samples`` is ν₀ (0: as many
    as z has numbers).

    ``tune_epochs`` trains θ and V on the device before the served statistics are taken, at ``tune_lr`` (0: the
    recipe's); ``tune_on="all"`` learns and takes statistics from the validation samples too. The result stays there.
    """

    features: Annotated[int, within("[1, 1024]")] = 64
    covariance: Annotated[str, one_of("auto", "full", "diagonal")] = "auto"
    rho: Annotated[float, within("[0, 1]")] = 0.5
    inter: Annotated[float, at_least(0)] = 0.1
    intra: Annotated[float, at_least(0)] = 0.01
    virtual: Annotated[float, at_least(0)] = 0.1
    margin: Annotated[float, above(0)] = 1.0
    n_min: Annotated[int, at_least(2, ": the mean of one sample is that sample")] = 2
    prior_samples: Annotated[float, at_least(0, " (0: as many as z has numbers)")] = 0.0
    predictive: bool = False
    tune_epochs: Epochs = 5
    tune_lr: Rate = 0.0
    tune_on: TuneOn = "train"
    motion: Annotated[float, at_least(0)] = 1e-2
    blend: Annotated[float, within("(0, 1]")] = 0.5
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
        classes_alone="its head is one Gaussian for each class",
        beside=(CENTRES, HELD),
    )

    def __post_init__(self) -> None:
        check(self)
        some = self.allow_degenerate or not self.inter == self.intra == self.virtual == 0
        says = "with intra and virtual 0 too switches all of its objectives off; choose another value, or set "
        require(self, "inter", some, says + "allow_degenerate=true to compare")

    @property
    def aggregator(self) -> Aggregator:
        return pooled.PooledStatistics(inner=self.inner, motion=self.motion, blend=self.blend)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        state, layer = state_of(model), navigator.last_linear(model, split)
        weight, gone = state[f"{layer}.weight"], {f"{layer}.weight", f"{layer}.bias"}
        away = [k for k in split.travels(*WHOLE) if k not in gone]
        classes, dim = len(weight), min(self.features, weight.shape[1])
        diagonal = self.covariance == "diagonal" or (self.covariance == "auto" and dim > 128)
        stats = pooled.empty(classes, dim, diagonal=diagonal)
        shared = {**only(state, away), **navigator.start(weight, self.features), **stats}
        return shared, {k: v for k, v in state.items() if k not in gone.union(away)}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = self._trained(task, navigator.enter(task, shared, private), shared, private, "train")
        z = projection_of(task.split, task.mask, self.features)(entering(task, ready(task, state)))
        own, sent = taken(task, z, shared), taken(task, z, shared, self.n_min)
        values = {**state, **as_sent(sent, shared)}
        kept = {k: v for k, v in values.items() if k not in shared}
        return update(task, values, shared), {**kept, **remembered(own, shared)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        inner = task.but(train=labelled(task, self.tune_on))
        state = ready(inner, navigator.enter(task, shared, private))
        if self.tune_epochs:
            recipe = task.recipe.but(epochs=self.tune_epochs, steps=None, lr=self.tune_lr or task.recipe.lr)
            state = self._trained(inner.but(recipe=recipe), state, shared, private, "tune")
        inputs, project = entering(inner, state), projection_of(task.split, task.mask, self.features)
        matrix = project.matrix(inputs.shape[1], inputs.dtype)
        nu = self.prior_samples or float(len(matrix))
        head = personal_head(taken(inner, project(inputs), shared), shared, matrix, nu, self.predictive)
        return served_with(head, task, state)

    def _trained(self, task: Task, state: Tensors, shared: Tensors, private: Tensors, purpose: str) -> Tensors:
        draws = task.draws(purpose + " samples")
        samples = task.train.take(resampled(task.train.y, self.rho, draws))
        project = projection_of(task.split, task.mask, self.features)
        weights: dict[str, float] = {"rho": self.rho, "inter": self.inter, "intra": self.intra, "virtual": self.virtual}
        loss = objective(task, shared, private, draws, project, margin=self.margin, **weights)
        return train(task, state, samples=samples, objective=loss, purpose=purpose)
