"""SGD with momentum and weight decay, as torch.optim.SGD takes its steps, bit for bit.

The first optimizer of torch.optim in a process imports some 900 modules: two seconds and 150 MB on each device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from talaria.types import Recipe


class SGD:
    """One optimizer over ``trained``, leaves by name, for the rate, momentum and weight decay of ``recipe``; made anew
    in every round and phase."""

    def __init__(self, trained: Mapping[str, Tensor], recipe: Recipe) -> None:
        self.trained, self.recipe = trained, recipe
        self.momentum: dict[str, Tensor] = {}
        """The momenta by name; one begins with the first gradient."""

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
        if self.recipe.weight_decay:
            slopes = list(torch._foreach_add(slopes, weights, alpha=self.recipe.weight_decay))
        if self.recipe.momentum:
            slopes = self._gathered(dict(zip(live, slopes, strict=True)))
        torch._foreach_add_(weights, slopes, alpha=-self.recipe.lr)

    def _gathered(self, slopes: Mapping[str, Tensor]) -> list[Tensor]:
        known = [name for name in slopes if name in self.momentum]
        if known:
            moving = [self.momentum[name] for name in known]
            torch._foreach_mul_(moving, self.recipe.momentum)
            torch._foreach_add_(moving, [slopes[name] for name in known])
        self.momentum |= {name: slope.clone() for name, slope in slopes.items() if name not in self.momentum}
        return [self.momentum[name] for name in slopes]
