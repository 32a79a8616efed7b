"""APFL: each device serves a mixture of its own model and the federated one (Deng, Kamani, Mahdavi, 2020).

v̄ = α v + (1−α) w, mixed in the parameters. Per batch, with every gradient at the old values:
w ← w − η ∇f(w);  v ← v − η α ∇f(v̄), the α from the chain rule;  α ← clip(α − η_α ⟨v−w, ∇f(v̄)⟩, 0, 1) in the first
batch of a round, in every step, or never. Only w travels, exactly as in FedAvg. v̄ has BatchNorm statistics of its
own, estimated anew on the device's inputs before it is served with the latest w. Weight decay acts on v̄.

Confirmed: the formulas of the paper (standard statement). The authors' code mixes logits, scales the gradient of α
twice and adds 0.02 α to it; none of that is in the paper, nor here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import Epochs, Rate, Weighed, check, off, one_of, within
from talaria.algorithms.sharing import PERSONAL, WHOLE, parted, update
from talaria.model.split import Split
from talaria.tensors import Array, Tensors, only, prefixed, under, without
from talaria.training.batching import feed
from talaria.training.engine import calibrate, served, state_of, walk
from talaria.training.interface import Task, Walk
from talaria.types import Recipe, Update

if TYPE_CHECKING:
    from talaria.model.weights import Model

ALPHA = "mix/alpha"
UPDATES: dict[str, Callable[[int], bool]] = {
    "off": lambda batch: False,
    "first_batch": lambda batch: batch == 0,
    "every_step": lambda batch: True,
}
"""In which batches of a round α is learned, by name."""


@dataclass(frozen=True, kw_only=True)
class APFL:
    """``alpha`` is where α starts, ``alpha_update`` when it is learned (off, first_batch, every_step), ``alpha_lr``
    its rate (0: the recipe's); ``join_epochs`` train v under the fixed w on a device that never took part. The paper
    weighs devices uniformly (``weighting="uniform"``)."""

    alpha: Annotated[float, within("[0, 1]"), off(0, "makes it FedAvg"), off(1, "makes it Local")] = 0.5
    alpha_update: Annotated[str, one_of(*UPDATES)] = "first_batch"
    alpha_lr: Rate = 0.0
    join_epochs: Epochs = 5
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="apfl",
        title="APFL",
        shares="body, adapters, head",
        keeps="a whole model of its own and its weight α",
        serves="the mixture of both, one network",
        source="Deng et al., 2020, arXiv:2003.13461",
        evidence="confirmed",
        plain_steps="its two models step along one slope",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        shared, private = parted(model, split, *WHOLE)
        alpha = np.array(self.alpha, np.float64)
        return shared, {**private, **prefixed(state_of(model), PERSONAL), ALPHA: alpha}

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        rest = {k: t for k, t in without(private, PERSONAL).items() if k != ALPHA}
        v, alpha = self._own(task, private, "train")
        w = walk(task, {**shared, **rest}, task.recipe)
        for batch, (x, y) in enumerate(feed(task, task.recipe, task.train)):
            slopes = w.gradient(x, y, keep=True)
            alpha = self._own_step(v, w.weights, x, y, alpha, batch, task.recipe)
            w.step(slopes)
        state = w.state()
        return update(task, state, shared), {**only(state, rest), **_kept(v, alpha)}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        v, alpha = self._own(task, private, "join")
        w = only(shared, v.weights)
        if task.newcomer:
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            for batch, (x, y) in enumerate(feed(task, recipe, task.train, "join")):
                alpha = self._own_step(v, w, x, y, alpha, batch, recipe)
        own = v.state()
        learned = task.split.parameters(*WHOLE)  # under each name that a weight has, where a walk knows one of them
        mixture = {**own, **_mixed(only(shared, learned), only(own, learned), alpha)}
        return served(task, calibrate(task, mixture))

    def _own(self, task: Task, private: Tensors, purpose: str) -> tuple[Walk, float]:
        v = walk(task, under(private, PERSONAL), task.recipe, purpose)
        return v, float(private[ALPHA])

    def _own_step(self, v: Walk, w: Tensors, x: Array, y: Array, alpha: float, batch: int, recipe: Recipe) -> float:
        """One step of v at the mixture with w, which stays; returns the new α."""
        own = v.weights
        at = _mixed(w, own, alpha)
        slopes = v.gradient(x, y, at=at, keep=True)
        learned = alpha
        if UPDATES[self.alpha_update](batch):
            # dot product of v - w with the gradient at the mixture, in float64
            along = sum(float(((own[k] - w[k]) * g).sum(dtype=np.float64)) for k, g in slopes.items())
            learned = min(1.0, max(0.0, alpha - (self.alpha_lr or recipe.lr) * along))
        v.step(slopes, at=at, scale=alpha)
        return learned


def _mixed(w: Tensors, v: Tensors, alpha: float) -> Tensors:
    """α v + (1−α) w; exactly v at α = 1 and exactly w at α = 0."""
    if alpha < 0.5:
        return {k: np.asarray(w[k] + alpha * (v[k] - w[k])) for k in v}
    return {k: np.asarray(v[k] - (1 - alpha) * (v[k] - w[k])) for k in v}


def _kept(v: Walk, alpha: float) -> Tensors:
    return {**prefixed(v.state(), PERSONAL), ALPHA: np.array(alpha, np.float64)}
