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
decay on the private part, label noise or a part too small to fit the data end that regime: watch :func:`dispersion`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.card import Card
from talaria.algorithms.parts import parted, require, update
from talaria.tensors import minus, only
from talaria.training import augment
from talaria.training.batching import steps_of
from talaria.training.loop import Objective, calibrate, cross_entropy, gradient, ready, served, train
from talaria.types import Recipe, Samples, Split, Task, Tensors, Update

FORMS = ("local", "gradient")
CHUNK = 1024
"""Samples whose gradient is taken at once."""


def _uniform_mean() -> Aggregator:
    return MaskedMean(weighting="uniform")


@dataclass(frozen=True, kw_only=True)
class FFGG:
    """``form="gradient"`` is the algorithm above: one gradient of the body over all local samples a round, of the loss
    that the private part was fitted to: with the recipe's label smoothing, each sample augmented by one draw.
    ``form="local"`` (default, for networks) takes ``local_steps`` mini-batch steps on the body (0: the recipe's
    epochs) and sends how far it came; ``refit`` fits the private part again before each of them (variant A), else it
    stays as fitted at θ (variant B).

    The private part is fitted for ``head_epochs``, or ``head_steps`` optimizer steps where above 0, warm-started,
    and for ``final_epochs`` once more before the model is served. ``gamma`` and ``head_lr`` are the two learning
    rates (0: the recipe's). ``objective`` replaces the cross-entropy in tests and for regression.
    """

    form: str = "local"
    local_steps: int = 0
    refit: bool = False
    gamma: float = 0.0
    head_epochs: int = 1
    head_steps: int = 0
    head_lr: float = 0.0
    final_epochs: int = 5
    allow_degenerate: bool = False
    aggregator: Aggregator = field(default_factory=_uniform_mean, repr=False)
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
        require(
            "ffgg",
            form=(self.form in FORMS, self.form, f"must be one of {sorted(FORMS)}"),
            local_steps=(self.local_steps >= 0, self.local_steps, "must be at least 0 (0 counts the recipe's epochs)"),
            gamma=(self.gamma >= 0, self.gamma, "must be at least 0 (0 takes the recipe's learning rate)"),
            head_epochs=(self.head_epochs >= 0, self.head_epochs, "must be at least 0"),
            head_steps=(self.head_steps >= 0, self.head_steps, "must be at least 0 (0 counts head_epochs)"),
            head_lr=(self.head_lr >= 0, self.head_lr, "must be at least 0 (0 takes the recipe's)"),
            final_epochs=(self.final_epochs >= 0, self.final_epochs, "must be at least 0"),
        )
        if self.form == "gradient":
            require(
                "ffgg",
                local_steps=(self.local_steps <= 1, self.local_steps, "needs form='local'; 'gradient' takes one step"),
                refit=(not self.refit, self.refit, "needs form='local'; 'gradient' fits the head once anyway"),
            )
        if self.head_epochs == 0 and self.head_steps == 0 and not self.allow_degenerate:
            require(
                "ffgg",
                head_epochs=(
                    False,
                    0,
                    "switches the fine-tuning off; raise it, or set allow_degenerate=true to compare",
                ),
            )

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        start = {**shared, **private}
        if self.form == "gradient":
            return self._one_gradient(task, calibrate(task, start), shared, private)
        state = self._fitted(task, ready(task, start), "head 0")
        body, steps = task.split.of("body"), self._body_recipe(task)
        if not self.refit:
            state = self._trained(task, state, body, steps, "body")
        else:
            for k in range(steps_of(steps, len(task.train))):
                state = state if k == 0 else self._fitted(task, state, f"head {k}")
                state = self._trained(task, state, body, steps.but(steps=1), f"body {k}")
        return self._sent(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state = ready(task, {**shared, **private})
        recipe = self._head_recipe(task).but(epochs=self.final_epochs, steps=None)
        return served(task, self._trained(task, state, task.split.of("adapters", "head"), recipe, "final head"))

    def _one_gradient(self, task: Task, state: Tensors, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = self._fitted(task, state, "head 0")
        objective = self.objective or cross_entropy(task.recipe.smoothing)
        change, draws = augment.get(task.recipe.augment), task.generator("gradient")
        total: Tensors = {}
        for index in torch.split(torch.arange(len(task.train)), CHUNK):
            piece = task.train.take(index)
            piece = Samples(change(piece.x, draws), piece.y)
            part = gradient(task, state, only=task.split.of("body"), samples=piece, objective=objective)
            share = len(piece) / len(task.train)
            total = {k: share * g + total[k] if total else share * g for k, g in part.items()}
        gamma = self.gamma or task.recipe.lr
        # What the gradient does not cover (aggregated BatchNorm statistics) moves by its own difference.
        moved = {**state, **{k: shared[k] - gamma * g for k, g in total.items() if k in shared}}
        norm = float(sum(g.double().square().sum() for g in total.values())) ** 0.5
        return self._sent(task, moved, shared, gradient_norm=norm), only(state, private)

    def _fitted(self, task: Task, state: Tensors, purpose: str) -> Tensors:
        return self._trained(task, state, task.split.of("adapters", "head"), self._head_recipe(task), purpose)

    def _trained(self, task: Task, state: Tensors, names: Collection[str], recipe: Recipe, purpose: str) -> Tensors:
        return train(task, state, only=names, recipe=recipe, objective=self.objective, purpose=purpose)

    def _head_recipe(self, task: Task) -> Recipe:
        lr = self.head_lr or task.recipe.lr
        return task.recipe.but(epochs=self.head_epochs, steps=self.head_steps or None, lr=lr)

    def _body_recipe(self, task: Task) -> Recipe:
        lr = self.gamma or task.recipe.lr
        return task.recipe.but(lr=lr, steps=self.local_steps or task.recipe.steps)

    def _sent(self, task: Task, state: Tensors, shared: Tensors, **metrics: float) -> Update:
        sent = update(task, state, shared, **metrics)
        return sent.but(tensors=minus(sent.tensors, shared), kind="delta")


def dispersion(updates: Iterable[Update]) -> float:
    """``B̂² = mean_i ||g_i − ḡ||² / ||ḡ||²`` over the differences of unmasked updates: how heterogeneous they are.

    Bounded in the overpersonalized regime; growing without bound while the loss falls means that the private parts
    cannot fit the data. Infinite where the differences cancel, and 0.0 where all are zero.
    """
    rows = [torch.cat([v.double().flatten() for v in u.tensors.values()]) for u in updates]
    if not rows:
        return 0.0
    stacked = torch.stack(rows)
    mean = stacked.mean(0)
    spread = float((stacked - mean).square().sum(1).mean())
    size = float(mean.square().sum())
    return spread / size if size > 0 else (float("inf") if spread > 0 else 0.0)
