"""SGD one step at a time, for methods that need gradients at more than one point of a batch (APFL, Per-FedAvg).

Several walks may share the task's one scratch module: it only lends its graph, and each walk brings weights and
buffers of its own (``torch.func.functional_call``), so that nothing is copied back and forth between steps. A walk
that takes a plain gradient step per batch of :func:`talaria.training.loop.feed` ends where
:func:`talaria.training.loop.train` does, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from talaria.model.state import load, state_of
from talaria.tensors import Tensors
from talaria.training.layer_draws import LayerDraws
from talaria.training.loop import freeze_but, lone_sample_in_eval
from talaria.training.sgd import SGD
from talaria.types import Recipe, Task

Leaves = dict[str, Tensor]
"""Named tensors of torch, inside a method's own steps."""


class FunctionalSGD:
    """One sequence of weights under the recipe's SGD; all parameters are trained.

    ``weights`` are leaves by parameter name, ``buffers`` the BatchNorm statistics that belong to them.
    """

    def __init__(self, task: Task, state: Tensors, recipe: Recipe, purpose: str = "train") -> None:
        self.module = load(task.model, state)
        self.recipe = recipe
        trained = freeze_but(self.module, None)
        self.weights = {k: v.detach().clone().requires_grad_() for k, v in trained.items()}
        self.buffers = {k: v.detach().clone() for k, v in self.module.named_buffers()}
        self.draws = LayerDraws(task, purpose)
        self.optimizer = SGD(self.weights, recipe)

    def gradient(
        self, at: Leaves, x: Tensor, y: Tensor, *, keep: bool = False, draws: LayerDraws | None = None
    ) -> Leaves:
        """The gradient of the batch's mean cross-entropy at ``at`` (leaves), where the weights need not be.

        BatchNorm normalizes by the batch; with ``keep`` its statistics move as in training, else they stand still.
        ``draws`` is what dropout draws from (default: the walk's own). Parameters without influence are left out.
        """
        slopes = self._slopes(at, x, y, keep, draws or self.draws, differentiable=False)
        return {k: v for k, v in slopes.items() if v is not None}

    def curved(self, at: Leaves, x: Tensor, y: Tensor, along: Leaves, draws: LayerDraws) -> Leaves:
        """The Hessian of the batch's loss at ``at`` times ``along``, by differentiating twice."""
        slopes = self._slopes(at, x, y, False, draws, differentiable=True)
        named = [(v, along[k]) for k, v in slopes.items() if v is not None and v.requires_grad and k in along]
        if not named:
            return {}
        inner = torch.stack([(v * a.detach()).sum() for v, a in named]).sum()
        bent = torch.autograd.grad(inner, list(at.values()), allow_unused=True)
        return {k: v for k, v in zip(at, bent, strict=True) if v is not None}

    def step(self, slopes: Leaves) -> None:
        """One optimizer step of the weights along ``slopes``."""
        for name, weight in self.weights.items():
            weight.grad = slopes.get(name)
        self.optimizer.step()

    def state(self) -> Tensors:
        """Copies of all weights and buffers under the state-dict's names."""
        with torch.no_grad():
            for name, own in (*self.module.named_parameters(), *self.module.named_buffers()):
                own.copy_(self.weights[name] if name in self.weights else self.buffers[name])
        return state_of(self.module)

    def _slopes(
        self, at: Leaves, x: Tensor, y: Tensor, keep: bool, draws: LayerDraws, *, differentiable: bool
    ) -> dict[str, Tensor | None]:
        buffers = self.buffers if keep else {k: v.clone() for k, v in self.buffers.items()}
        total: dict[str, Tensor | None] = dict.fromkeys(at)
        pieces = min(self.recipe.accumulate, len(y))
        for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            with draws, lone_sample_in_eval(self.module, len(ys)):
                logits = functional_call(self.module, {**at, **buffers}, (xs,))
            loss = F.cross_entropy(logits, ys, label_smoothing=self.recipe.smoothing) * (len(ys) / len(y))
            slopes = torch.autograd.grad(loss, list(at.values()), allow_unused=True, create_graph=differentiable)
            for name, slope in zip(at, slopes, strict=True):
                before = total[name]
                total[name] = slope if before is None or slope is None else before + slope
        return total


def leaves(tensors: Leaves) -> Leaves:
    """The same values as leaves that a gradient can be taken at."""
    return {k: v.detach().requires_grad_() for k, v in tensors.items()}
