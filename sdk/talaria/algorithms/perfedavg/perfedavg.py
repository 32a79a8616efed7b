"""Per-FedAvg: learn a start that is good after one local step (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020).

min_w Σ f_k(w − α ∇f_k(w)). One local meta-step reads three disjoint batches D, D', D'': with w̃ = w − α ∇f(w; D) and
g = ∇f(w̃; D'),
    fo      w ← w − β g
    hf      w ← w − β [g − α (∇f(w+δg; D'') − ∇f(w−δg; D'')) / 2δ]
    exact   w ← w − β [g − α ∇²f(w; D'') g]
β and the number of meta-steps are those of the recipe. Before it is served each device takes one (or a few) steps of
size α on all its training samples. Confirmed: the formulas of the paper (standard statement); its δ is a constant,
here ``delta`` is the length of δg, so that float32 resolves the difference at any scale of the gradient. On networks
with ReLU the difference ``hf`` crosses kinks, and is several times off the term that it stands for; the three forms
ended within .005 of one another's accuracy, hence ``fo``, which costs two gradients a step, is the default.
There the term of ``exact`` jumps, too, where a unit switches: runs of two engines, or of this one and a loop of your
own, which differ by rounding at first, may differ by 1e-2 in single weights some rounds later. On smooth networks they
keep to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.hparams import Rate, Weighed, at_least, check, off, one_of
from talaria.algorithms.perfedavg.curvature import differenced, moved
from talaria.algorithms.perfedavg.triples import Batch, triples
from talaria.algorithms.sharing import update
from talaria.model.split import Split
from talaria.tensors import Tensors, only
from talaria.training.batching import at_once
from talaria.training.engine import ready, served, train, walk
from talaria.training.interface import LayerStreams, Task, Walk
from talaria.types import Recipe, Update

if TYPE_CHECKING:
    from talaria.model.weights import Model

SLICE = 256
"""Samples that one pass of the served step holds in memory, at most."""


@dataclass(frozen=True, kw_only=True)
class PerFedAvg:
    """``inner_lr`` is α (0: the recipe's learning rate), ``form`` the treatment of the second derivative ("none" takes
    no inner step: FedAvg, to compare), ``adapt_steps`` the steps before serving: the paper's objective is after one, a
    few were better on every data set that was tried.

    The paper weighs devices uniformly. A device with fewer than three batches of samples takes smaller batches.
    """

    inner_lr: Rate = 0.0
    form: Annotated[str, one_of("fo", "hf", "exact", "none"), off("none", "makes it FedAvg")] = "fo"
    delta: Annotated[float, at_least(1e-4, ": below it float32 rounds the difference away")] = 0.01
    adapt_steps: Annotated[int, at_least(0), off(0, "never adapts")] = 5
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="perfedavg",
        title="Per-FedAvg",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model after a few local steps",
        source="Fallah et al., NeurIPS 2020, arXiv:2002.07948",
        evidence="confirmed",
        plain_steps="its steps are a meta-learner's own",
    )

    def __post_init__(self) -> None:
        check(self)

    def alpha(self, recipe: Recipe) -> float:
        """α under ``recipe``."""
        if self.form == "none":
            return 0.0
        return self.inner_lr or recipe.lr

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return FedAvg().init(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        w = walk(task, {**shared, **private}, task.recipe)
        noise = w.draws("train/inner"), w.draws("train"), w.draws("train/curve")
        for batches in triples(task):
            w.step(self._meta_gradient(w, task.recipe, batches, noise))
        state = w.state()
        return update(task, state, shared), only(state, private)

    def _meta_gradient(
        self,
        walk: Walk,
        recipe: Recipe,
        batches: tuple[Batch, Batch, Batch],
        noise: tuple[LayerStreams, LayerStreams, LayerStreams],
    ) -> Tensors:
        """The gradient of f(w − α ∇f(w)), estimated on (D, D', D''). Only the pass over D, at w, moves BatchNorm."""
        w, alpha = walk.weights, self.alpha(recipe)
        step = walk.gradient(*batches[0], keep=True, draws=noise[0])
        g = walk.gradient(*batches[1], at=moved(w, step, -alpha), draws=noise[1])
        if self.form == "fo" or alpha == 0:
            return g
        if self.form == "exact":
            bent = walk.curved(*batches[2], g, noise[2])
        else:
            bent = differenced(walk, batches[2], g, noise[2], self.delta)
        return {k: np.asarray(slope - alpha * bent[k]) if k in bent else slope for k, slope in g.items()}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = ready(task, {**shared, **private})
        alpha = self.alpha(task.recipe)
        if not alpha:
            return served(task, state)
        count = max(1, len(task.train))
        slices = -(-count // at_once(task, SLICE))
        plain = Recipe(steps=self.adapt_steps, batch=count, lr=alpha, momentum=0.0, accumulate=slices)
        recipe = plain.but(smoothing=task.recipe.smoothing, freeze=task.recipe.freeze)
        return served(task, train(task, state, recipe=recipe, purpose="tune"))
