"""FFGG: fine-tune the private part, then send the gradient of the shared part (Mishchenko, Islamov, Gorbunov,
Horváth, "Partially Personalized Federated Learning: Breaking the Curse of Data Heterogeneity", arXiv:2305.18285).

Confirmed (abstract): the variables split into a global θ and a private w_i; where some θ lets every client fit its
data by w_i alone ("overpersonalized"), a simple algorithm keeps heterogeneity from hurting local steps, asynchrony
and Byzantine robustness. Reconstructed: the algorithm that its name fixes, the local form and its two variants, the
choice of body for θ and of adapters and head for w_i; no code was published and the theorems were not readable.

    w_i ← argmin_w f_i(θ, w), warm-started;  g_i = ∇_θ f_i(θ, w_i);  θ ← θ − γ · mean_i g_i

Each device sends a difference, −γ g_i or y − θ after local steps, so that every rule for updates applies as it is:
the uniform mean (default), a robust rule against Byzantine devices, or a buffered one for asynchrony. By Danskin's
theorem g_i is the gradient of F_i(θ) = min_w f_i(θ, w), so γ ≤ 1/L_θθ is safe however stiff the private part is,
and at an overpersonalized θ* every g_i is zero, stale ones and those of a few sampled devices included. Weight
decay on the private part, label noise or a part too small to fit the data end that regime.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.ffgg.gradients import body_gradient
from talaria.algorithms.hparams import Epochs, Rate, at_least, check, one_of, require
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.tensors import Tensors, minus, only
from talaria.training.batching import steps_of
from talaria.training.engine import aim_of, calibrate, ready, served, train
from talaria.training.interface import Task
from talaria.training.objectives import Objective
from talaria.types import Recipe, Update

if TYPE_CHECKING:
    from talaria.model.weights import Model


@dataclass(frozen=True, kw_only=True)
class FFGG:
    """``form="gradient"`` is the algorithm above: one gradient of the body over all local samples a round, of the loss
    that the private part was fitted to: with the recipe's label smoothing, each sample augmented by one draw.
    ``form="local"`` (default, for networks) takes ``local_steps`` mini-batch steps on the body (0: the recipe's
    epochs) and sends how far it came; ``refit`` fits the private part again before each of them (variant A), else it
    stays as fitted at θ (variant B).

    The private part is fitted for ``head_epochs``, or ``head_steps`` optimizer steps where above 0, warm-started,
    and for ``final_epochs`` once more before the model is served. ``gamma`` and ``head_lr`` are the two learning
    rates (0: the recipe's). ``objective`` replaces the task's loss in tests.
    """

    form: Annotated[str, one_of("local", "gradient")] = "local"
    local_steps: Annotated[int, at_least(0, " (0 counts the recipe's epochs)")] = 0
    refit: bool = False
    gamma: Rate = 0.0
    head_epochs: Epochs = 1
    head_steps: Annotated[int, at_least(0, " (0 counts head_epochs)")] = 0
    head_lr: Rate = 0.0
    final_epochs: Epochs = 5
    allow_degenerate: bool = False
    aggregator: Aggregator = field(default_factory=partial(MaskedMean, weighting="uniform"), repr=False)
    objective: Objective | None = field(default=None, repr=False, compare=False)

    card: ClassVar[Card] = Card(
        name="ffgg",
        title="FFGG",
        shares="body, as a gradient step",
        keeps="adapters, head",
        serves="shared body with its own fine-tuned head",
        source="Mishchenko et al., 2023, arXiv:2305.18285",
        evidence="partly reconstructed",
        differences=True,
    )

    def __post_init__(self) -> None:
        check(self)
        local, fits = self.form == "local", self.head_epochs or self.head_steps or self.allow_degenerate
        require(self, "local_steps", local or self.local_steps <= 1, "needs form='local'; 'gradient' takes one step")
        require(self, "refit", local or not self.refit, "needs form='local'; 'gradient' fits the head once anyway")
        says = "switches the fine-tuning off; raise it, or set allow_degenerate=true to compare"
        require(self, "head_epochs", bool(fits), says)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        start = {**shared, **private}
        if self.form == "gradient":
            state = self._fitted(task, calibrate(task, start), "head 0")
            slopes = body_gradient(task, state, self.objective or aim_of(task))
            gamma = self.gamma or task.recipe.lr
            # What the gradient does not cover (aggregated BatchNorm statistics) moves by its own difference.
            moved = {**state, **{k: np.asarray(shared[k] - gamma * g) for k, g in slopes.items() if k in shared}}
            norm = sum(float(np.square(g, dtype=np.float64).sum()) for g in slopes.values()) ** 0.5
            return _difference(update(task, moved, shared, gradient_norm=norm), shared), only(state, private)
        state = self._fitted(task, ready(task, start), "head 0")
        body = task.split.of("body")
        steps = task.recipe.but(lr=self.gamma or task.recipe.lr, steps=self.local_steps or task.recipe.steps)
        if not self.refit:
            state = self._trained(task, state, body, steps, "body")
        else:
            for k in range(steps_of(steps, len(task.train))):
                state = state if k == 0 else self._fitted(task, state, f"head {k}")
                state = self._trained(task, state, body, steps.but(steps=1), f"body {k}")
        return _difference(update(task, state, shared), shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        once_more = self._head_recipe(task).but(epochs=self.final_epochs, steps=None)
        return served(task, self._fitted(task, ready(task, {**shared, **private}), "final head", once_more))

    def _fitted(self, task: Task, state: Tensors, purpose: str, recipe: Recipe | None = None) -> Tensors:
        """w_i ← argmin_w f_i(θ, w), warm-started."""
        head = task.split.of("adapters", "head")
        return self._trained(task, state, head, recipe or self._head_recipe(task), purpose)

    def _trained(self, task: Task, state: Tensors, names: Collection[str], recipe: Recipe, purpose: str) -> Tensors:
        return train(task, state, only=names, recipe=recipe, objective=self.objective, purpose=purpose)

    def _head_recipe(self, task: Task) -> Recipe:
        lr = self.head_lr or task.recipe.lr
        return task.recipe.but(epochs=self.head_epochs, steps=self.head_steps or None, lr=lr)


def _difference(sent: Update, shared: Tensors) -> Update:
    return sent.but(tensors=minus(sent.tensors, shared), kind="delta")
