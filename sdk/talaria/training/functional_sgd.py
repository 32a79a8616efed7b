"""SGD one step at a time, for methods that need gradients at more than one point of a batch (APFL, Per-FedAvg).

Several walks may share the task's one scratch module: it only lends its graph, and each walk brings weights and
buffers of its own (``torch.func.functional_call``), so that nothing is copied back and forth between steps. A walk
that takes a plain gradient step per batch of :func:`talaria.training.loop.feed` ends where
:func:`talaria.training.loop.train` does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from talaria.model.batch_norm import lone_sample_in_eval
from talaria.model.state import array_of, beside, load, state_of, tensor_of, to_arrays
from talaria.model.twice import TwiceDifferentiable
from talaria.tensors import Array, Tensors
from talaria.training.interface import Task
from talaria.training.layer_draws import LayerDraws
from talaria.training.loop import freeze_but
from talaria.training.objectives import LOGITS, Curved, share_of
from talaria.training.sgd import SGD
from talaria.types import Recipe

Leaves = dict[str, Tensor]
"""Named tensors of torch that gradients are taken at."""


class _Slope(torch.autograd.Function):
    """The gradient of an objective by a model's outputs, as a function of these that torch differentiates once more."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, objective: Curved, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(out, y)
        ctx.objective = objective
        found = objective({LOGITS: array_of(out)}, {}, array_of(x), array_of(y))
        return tensor_of(found.taps[LOGITS]).to(out.device)

    @staticmethod
    def backward(ctx: Any, *way: Tensor) -> tuple[Tensor | None, ...]:
        out, y = ctx.saved_tensors
        return tensor_of(ctx.objective.bent(*map(array_of, (out, y, way[0])))).to(out.device), None, None, None


class FunctionalSGD:
    """One sequence of weights under the recipe's SGD; a :class:`~talaria.training.interface.Walk`."""

    def __init__(
        self,
        task: Task,
        state: Tensors,
        recipe: Recipe,
        purpose: str = "train",
        objective: Curved | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self.task, self.recipe, self._objective = task, recipe, objective
        self.module = load(task.model, state)
        trained = freeze_but(self.module, only)
        self._weights = {k: v.detach().clone().requires_grad_() for k, v in trained.items()}
        self._frozen = {k: v.detach().clone() for k, v in self.module.named_parameters() if k not in trained}
        self._buffers = {k: v.detach().clone() for k, v in self.module.named_buffers()}
        self._draws = LayerDraws(task, purpose)
        self._optimizer = SGD(self._weights, recipe)

    @property
    def weights(self) -> Tensors:
        """The weights as they are now; read them before the next step."""
        return to_arrays(self._weights)

    def draws(self, purpose: str) -> LayerDraws:
        """Draws of dropout for one purpose."""
        return LayerDraws(self.task, purpose)

    def gradient(
        self, x: Array, y: Array, *, at: Tensors | None = None, keep: bool = False, draws: LayerDraws | None = None
    ) -> Tensors:
        """See :class:`~talaria.training.interface.Walk`; parameters without influence are left out."""
        slopes = self._slopes(self._leaves(at), x, y, keep, draws or self._draws, differentiable=False)
        return to_arrays({k: v for k, v in slopes.items() if v is not None})

    @torch.enable_grad()
    def curved(self, x: Array, y: Array, along: Tensors, draws: LayerDraws) -> Tensors:
        """The Hessian of the batch's loss times ``along``, by differentiating twice."""
        with TwiceDifferentiable():
            slopes = self._slopes(self._weights, x, y, False, draws, differentiable=True)
        named = [(v, along[k]) for k, v in slopes.items() if v is not None and v.requires_grad and k in along]
        if not named:
            return {}
        inner = torch.stack([(v * beside(self.module, a)).sum() for v, a in named]).sum()
        bent = torch.autograd.grad(inner, list(self._weights.values()), allow_unused=True)
        return to_arrays({k: v for k, v in zip(self._weights, bent, strict=True) if v is not None})

    def step(self, slopes: Tensors, *, at: Tensors | None = None, scale: float = 1.0) -> None:
        """One optimizer step of the weights, see :class:`~talaria.training.interface.Walk`."""
        decay = 0.0 if at is None and scale == 1 else self.recipe.weight_decay
        for name, weight in self._weights.items():
            weight.grad = torch.empty_like(weight).copy_(tensor_of(slopes[name])) if name in slopes else None
            if weight.grad is not None and decay:
                weight.grad.add_(weight.detach() if at is None else beside(self.module, at[name]), alpha=decay)
            if weight.grad is not None and scale != 1:
                weight.grad.mul_(scale)
        self._optimizer.recipe = self.recipe.but(weight_decay=self.recipe.weight_decay - decay)
        self._optimizer.step()

    def state(self) -> Tensors:
        """Copies of all weights and buffers under the state-dict's names."""
        with torch.no_grad():
            every = {**self._frozen, **self._weights, **self._buffers}
            for name, own in (*self.module.named_parameters(), *self.module.named_buffers()):
                own.copy_(every[name])
        return state_of(self.module)

    def _leaves(self, at: Tensors | None) -> Leaves:
        """``at`` as leaves in the layout of the walk's own weights, by which torch chooses its kernels."""
        if at is None:
            return self._weights
        own = {k: torch.empty_like(v, requires_grad=False) for k, v in self._weights.items()}
        return {k: v.copy_(tensor_of(at[k])).requires_grad_() for k, v in own.items()}

    @torch.enable_grad()
    def _slopes(
        self, at: Leaves, x: Array, y: Array, keep: bool, draws: LayerDraws, *, differentiable: bool
    ) -> dict[str, Tensor | None]:
        if not at:  # all is frozen, which torch's gradient takes for a mistake
            return {}
        total: dict[str, Tensor | None] = dict.fromkeys(at)
        pieces, inputs, labels = min(self.recipe.accumulate, len(y)), beside(self.module, x), beside(self.module, y)
        for xs, ys in zip(inputs.tensor_split(pieces), labels.tensor_split(pieces), strict=True):
            buffers = self._buffers if keep else {k: v.clone() for k, v in self._buffers.items()}
            with draws, lone_sample_in_eval(self.module, len(ys)):
                out = functional_call(self.module, {**self._frozen, **at, **buffers}, (xs,))
            share = share_of(self._objective, array_of(ys), y)
            if self._objective is None:
                out, slope = F.cross_entropy(out, ys, label_smoothing=self.recipe.smoothing) * share, None
            else:
                slope = _Slope.apply(out, self._objective, xs, ys) * share
            slopes = torch.autograd.grad(out, [*at.values()], slope, allow_unused=True, create_graph=differentiable)
            for name, slope in zip(at, slopes, strict=True):
                before = total[name]
                total[name] = before if slope is None else slope if before is None else before + slope
        return total
