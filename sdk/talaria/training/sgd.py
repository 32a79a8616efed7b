"""SGD with momentum and weight decay, as torch.optim.SGD takes its steps, bit for bit, and the recipe's other
optimizers.

The first optimizer of torch.optim in a process imports some 900 modules: two seconds and 150 MB on each device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from talaria.training.array_sgd import CLIP_TINY, SECOND, TINY
from talaria.types import Recipe


class SGD:
    """One optimizer over ``trained``, leaves by name, for the rate, momentum and weight decay of ``recipe``; made anew
    in every round and phase."""

    def __init__(self, trained: Mapping[str, Tensor], recipe: Recipe) -> None:
        self.trained, self.recipe = trained, recipe
        self.momentum: dict[str, Tensor] = {}
        """The momenta by name; one begins with the first gradient."""
        self.squares: dict[str, Tensor] = {}
        self.steps: dict[str, int] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.trained.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move what has a gradient."""
        live = {name: p for name, p in self.trained.items() if p.grad is not None}
        if not live:
            return
        weights, slopes = list(live.values()), [p.grad for p in live.values() if p.grad is not None]
        slopes = self._clipped(slopes)
        if self.recipe.optimizer in ("adam", "adamw"):
            for name, slope in zip(live, slopes, strict=True):
                self._adam(name, live[name], slope)
            return
        if self.recipe.weight_decay:
            slopes = list(torch._foreach_add(slopes, weights, alpha=self.recipe.weight_decay))
        if self.recipe.momentum:
            moved = self._gathered(dict(zip(live, slopes, strict=True)))
            ahead = self.recipe.optimizer == "nesterov"
            slopes = list(torch._foreach_add(slopes, moved, alpha=self.recipe.momentum)) if ahead else moved
        torch._foreach_add_(weights, slopes, alpha=-self.recipe.lr)

    def _gathered(self, slopes: Mapping[str, Tensor]) -> list[Tensor]:
        known = [name for name in slopes if name in self.momentum]
        if known:
            moving = [self.momentum[name] for name in known]
            torch._foreach_mul_(moving, self.recipe.momentum)
            torch._foreach_add_(moving, [slopes[name] for name in known])
        self.momentum |= {name: slope.clone() for name, slope in slopes.items() if name not in self.momentum}
        return [self.momentum[name] for name in slopes]

    def _clipped(self, slopes: list[Tensor]) -> list[Tensor]:
        """Shortened together where their norm is beyond the recipe's."""
        if not self.recipe.clip:
            return slopes
        norm = math.sqrt(math.fsum(float(slope.double().square().sum()) for slope in slopes))
        share = self.recipe.clip / (norm + CLIP_TINY)
        return slopes if share >= 1 else [slope * share for slope in slopes]

    def _adam(self, name: str, weight: Tensor, slope: Tensor) -> None:
        recipe = self.recipe
        if recipe.optimizer == "adamw":
            weight.mul_(1 - recipe.lr * recipe.weight_decay)
        elif recipe.weight_decay:
            slope = slope.add(weight, alpha=recipe.weight_decay)
        steps = self.steps[name] = self.steps.get(name, 0) + 1
        mean = self.momentum.setdefault(name, torch.zeros_like(weight))
        square = self.squares.setdefault(name, torch.zeros_like(weight))
        mean.lerp_(slope, 1 - recipe.momentum)
        square.mul_(SECOND).addcmul_(slope, slope, value=1 - SECOND)
        root = square.sqrt().div_(math.sqrt(1 - SECOND**steps)).add_(TINY)
        weight.addcdiv_(mean, root, value=-recipe.lr / (1 - recipe.momentum**steps))
