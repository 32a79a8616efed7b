"""Ditto: beside the federated model each device keeps its own, held near it (Li, Hu, Beirami, Smith, ICML 2021).

min_v F_k(v) + λ/2 ‖v − wᵗ‖²: w is trained and sent exactly as in FedAvg, untouched by λ and v; then
v ← v − η (∇F_k(v) + λ (v − wᵗ)), one simultaneous step with the model as received for anchor. The pull is part of
the gradient, so that momentum sees it, and covers parameters only: v has BatchNorm statistics of its own.
A small λ trusts the federation less, which is what protects against poisoned updates. Confirmed from the paper and
the authors' code. Both branches draw the same shuffles, each from a generator of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import Epochs, Rate, Weighed, at_least, check, off
from talaria.algorithms.sharing import PERSONAL, WHOLE, parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only, prefixed, under, without
from talaria.training.engine import ready, served, state_of, train
from talaria.training.interface import Task
from talaria.training.objectives import Pull
from talaria.types import Recipe, Update


@dataclass(frozen=True, kw_only=True)
class Ditto:
    """``lam`` is λ. ``personal_epochs`` and ``personal_lr`` are v's (0: the recipe's); ``join_epochs`` train v on a
    device that never took part before it is served. The authors average uniformly the devices that they draw in
    proportion to their samples; ``weighting="uniform"`` does so."""

    lam: Annotated[float, at_least(0), off(0, "makes it Local")] = 0.1
    personal_epochs: Annotated[int, at_least(0, " (0 takes the recipe's)")] = 0
    personal_lr: Rate = 0.0
    join_epochs: Epochs = 5
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="ditto",
        title="Ditto",
        shares="body, adapters, head",
        keeps="a whole model of its own",
        serves="its own model",
        source="Li et al., ICML 2021, arXiv:2012.04221",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        shared, private = parted(model, split, *WHOLE)
        return shared, {**private, **prefixed(state_of(model), PERSONAL)}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        rest = without(private, PERSONAL)
        state = train(task, {**shared, **rest})
        recipe = task.recipe
        if self.personal_epochs:
            recipe = recipe.but(epochs=self.personal_epochs, steps=None)
        own = self._pulled(task, shared, under(private, PERSONAL), recipe, "train")
        return update(task, state, shared), {**only(state, rest), **prefixed(own, PERSONAL)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        own = under(private, PERSONAL)
        if task.newcomer:
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            own = self._pulled(task, shared, ready(task, own), recipe, "join")
        return served(task, own)

    def _pulled(self, task: Task, anchor: Tensors, own: Tensors, recipe: Recipe, purpose: str) -> Tensors:
        recipe = recipe.but(lr=self.personal_lr or recipe.lr)
        return train(task, own, recipe=recipe, pull=Pull(anchor, self.lam) if self.lam else None, purpose=purpose)
