"""SGD with momentum over arrays, as torch.optim.SGD has it (Sutskever et al., 2013), for engines without torch."""

from __future__ import annotations

import numpy as np

from talaria.tensors import Tensors
from talaria.types import Recipe


class ArraySGD:
    """The recipe's optimizer; made anew in every round and phase."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._momentum: Tensors = {}

    def step(self, weights: Tensors, slopes: Tensors, *, at: Tensors | None = None, scale: float = 1.0) -> None:
        """Put the next values of those that have slopes into ``weights``, whose arrays are not written to.

        They go along ``scale * (slope + weight decay * at)``; ``at`` is by default the weights themselves."""
        recipe, decayed = self.recipe, weights if at is None else at
        for name, slope in slopes.items():
            weight = weights[name]
            way = slope + recipe.weight_decay * decayed[name] if recipe.weight_decay else slope
            way = way if scale == 1 else scale * way
            if recipe.momentum:
                way = recipe.momentum * self._momentum[name] + way if name in self._momentum else way
                self._momentum[name] = np.asarray(way, weight.dtype)
            weights[name] = np.asarray(weight - recipe.lr * way, weight.dtype)
