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
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.validation import Weighting, check_weighting
from talaria.algorithms.card import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.parts import refuse_neutral, require, update
from talaria.tensors import only
from talaria.training import augment
from talaria.training.batching import LayerDraws, batches, steps_of
from talaria.training.functional_sgd import Walk, leaves
from talaria.training.loop import ready, served, train
from talaria.types import Recipe, Split, Task, Tensors, Update

FORMS = ("fo", "hf", "exact", "none")
LEAST_DELTA = 1e-4
SLICE = 256
"""Samples that one pass of the served step holds in memory."""


@dataclass(frozen=True, kw_only=True)
class PerFedAvg:
    """``inner_lr`` is α (0: the recipe's learning rate), ``form`` the treatment of the second derivative ("none" takes
    no inner step: FedAvg, to compare), ``adapt_steps`` the steps before serving: the paper's objective is after one, a
    few were better on every data set that was tried.

    The paper weighs devices uniformly. A device with fewer than three batches of samples takes smaller batches.
    """

    inner_lr: float = 0.0
    form: str = "fo"
    delta: float = 0.01
    adapt_steps: int = 5
    weighting: Weighting = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="perfedavg",
        title="Per-FedAvg",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model after one local step",
        source="Fallah et al., NeurIPS 2020, arXiv:2002.07948",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check_weighting("perfedavg", self.weighting)
        require(
            "perfedavg",
            inner_lr=(0 <= self.inner_lr < float("inf"), self.inner_lr, "must be at least 0 (0: the recipe's)"),
            form=(self.form in FORMS, self.form, f"must be one of {sorted(FORMS)}"),
            delta=(
                LEAST_DELTA <= self.delta < float("inf"),
                self.delta,
                f"must be at least {LEAST_DELTA:g}: below it float32 rounds the difference away",
            ),
            adapt_steps=(self.adapt_steps >= 0, self.adapt_steps, "must be at least 0"),
        )
        meta = self.form != "none" or self.allow_degenerate
        refuse_neutral("perfedavg", "form", self.form, "makes it FedAvg", meta)
        adapts = self.adapt_steps != 0 or self.allow_degenerate
        refuse_neutral("perfedavg", "adapt_steps", self.adapt_steps, "never adapts", adapts)

    def alpha(self, recipe: Recipe) -> float:
        """α under ``recipe``."""
        if self.form == "none":
            return 0.0
        return self.inner_lr or recipe.lr

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return FedAvg().init(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        walk = Walk(task, {**shared, **private}, task.recipe)
        inner, outer, curve = task.generator("train/inner"), task.generator("train"), task.generator("train/curve")
        noise = LayerDraws(task, "train/inner"), LayerDraws(task, "train"), LayerDraws(task, "train/curve")
        change = augment.get(task.recipe.augment)
        count = len(task.train)
        steps = steps_of(task.recipe, count)
        for second in batches(count, third(count, task.recipe.batch), steps, outer):
            first, last = apart(count, second, task.recipe.batch, inner)
            draws = (inner, outer, curve)
            triple = [
                (change(task.train.x[i], g), task.train.y[i]) for i, g in zip((first, second, last), draws, strict=True)
            ]
            walk.step(self._meta(walk, triple, noise))
        state = walk.state()
        return update(task, state, shared), only(state, private)

    def _meta(
        self, walk: Walk, triple: list[tuple[Tensor, Tensor]], noise: tuple[LayerDraws, LayerDraws, LayerDraws]
    ) -> Tensors:
        """The gradient of f(w − α ∇f(w)), estimated on (D, D', D''). Only the pass over D, at w, moves BatchNorm."""
        (x, y), (x1, y1), (x2, y2) = triple
        w, alpha = walk.weights, self.alpha(walk.recipe)
        step = walk.gradient(w, x, y, keep=True, draws=noise[0])
        near = leaves({k: v.detach() - alpha * step[k] if k in step else v for k, v in w.items()})
        slope = walk.gradient(near, x1, y1, draws=noise[1])
        if self.form == "fo" or alpha == 0:
            return slope
        if self.form == "exact":
            bent = walk.curved(w, x2, y2, slope, noise[2])
        else:
            bent = self._differenced(walk, x2, y2, slope, noise[2])
        return {k: g - alpha * bent[k] if k in bent else g for k, g in slope.items()}

    def _differenced(self, walk: Walk, x: Tensor, y: Tensor, along: Tensors, noise: LayerDraws) -> Tensors:
        """∇²f(w) · along by central differences; both sides see the same dropout, else its noise would be all."""
        length = float(torch.stack([v.double().square().sum() for v in along.values()]).sum().sqrt())
        if length == 0:
            return {}
        reach = self.delta / length
        w, again = walk.weights, noise.copy()
        ahead = leaves({k: v.detach() + reach * along[k] if k in along else v for k, v in w.items()})
        behind = leaves({k: v.detach() - reach * along[k] if k in along else v for k, v in w.items()})
        up = walk.gradient(ahead, x, y, draws=noise)
        down = walk.gradient(behind, x, y, draws=again)
        return {k: (up[k] - down[k]) / (2 * reach) for k in up.keys() & down.keys()}

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state = ready(task, {**shared, **private})
        alpha = self.alpha(task.recipe)
        if not alpha:
            return served(task, state)
        count = max(1, len(task.train))
        slices = -(-count // SLICE)
        plain = Recipe(steps=self.adapt_steps, batch=count, lr=alpha, momentum=0.0, accumulate=slices)
        recipe = plain.but(smoothing=task.recipe.smoothing)
        return served(task, train(task, state, recipe=recipe, purpose="tune"))


def third(count: int, size: int) -> int:
    """The batch size that leaves room for two more such batches beside it."""
    return min(size, max(1, count // 3))


def apart(count: int, taken: Tensor, size: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two more index batches of at most ``size``, disjoint from each other and from ``taken``.

    With one sample left both are that one; with none, both are ``taken``.
    """
    rest = torch.ones(count, dtype=torch.bool)
    rest[taken] = False
    left = rest.nonzero().flatten()
    if len(left) < 2:
        lone = left if len(left) else taken
        return lone, lone
    left = left[torch.randperm(len(left), generator=draws)]
    half = min(size, len(left) // 2)
    return left[:half], left[half : 2 * half]
