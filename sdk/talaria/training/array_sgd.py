"""The recipe's optimizers over arrays, as torch.optim has them, for engines without torch: SGD with momentum (Sutskever
et al., 2013) and its kin."""

from __future__ import annotations

import math

import numpy as np

from talaria.tensors import Array, Tensors
from talaria.types import Recipe

SECOND, TINY, CLIP_TINY = 0.999, 1e-8, 1e-6
"""Adam's second decay and the number beside its root, and that beside the norm that is clipped, as torch has them."""


class ArraySGD:
    """The recipe's optimizer; made anew in every round and phase."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._momentum: Tensors = {}
        self._squares: Tensors = {}
        self._steps: dict[str, int] = {}

    def step(self, weights: Tensors, slopes: Tensors, *, at: Tensors | None = None, scale: float = 1.0) -> None:
        """Put the next values of those that have slopes into ``weights``, whose arrays are not written to.

        They go along ``scale * (slope + weight decay * at)``; ``at`` is by default the weights themselves."""
        recipe, decay = self.recipe, self.recipe.weight_decay
        if at is not None or scale != 1:  # then the decay is part of what is clipped, and of what Adam divides
            decayed = weights if at is None else at
            slopes = {
                name: scale * (slope + decay * decayed[name] if decay else slope) for name, slope in slopes.items()
            }
            decay = 0.0
        slopes = _clipped(slopes, recipe.clip)
        for name, slope in slopes.items():
            weight = weights[name]
            if recipe.optimizer in ("adam", "adamw"):
                weights[name] = self._adam(decay, name, weight, slope)
                continue
            now = slope + decay * weight if decay else slope
            way = now
            if recipe.momentum:
                way = recipe.momentum * self._momentum[name] + way if name in self._momentum else way
                self._momentum[name] = np.asarray(way, weight.dtype)
                if recipe.optimizer == "nesterov":
                    way = now + recipe.momentum * way
            weights[name] = np.asarray(weight - recipe.lr * way, weight.dtype)

    def _adam(self, decay: float, name: str, weight: Array, slope: Array) -> Array:
        recipe, kind = self.recipe, weight.dtype
        if recipe.optimizer == "adamw":
            weight = weight * np.asarray(1 - recipe.lr * decay, kind)
        elif decay:
            slope = slope + decay * weight
        steps = self._steps[name] = self._steps.get(name, 0) + 1
        mean = self._momentum.get(name, np.zeros_like(weight))
        square = self._squares.get(name, np.zeros_like(weight))
        self._momentum[name] = mean = np.asarray(mean + (1 - recipe.momentum) * (slope - mean), kind)
        self._squares[name] = square = np.asarray(SECOND * square + (1 - SECOND) * slope * slope, kind)
        rate = recipe.lr / (1 - recipe.momentum**steps)
        return np.asarray(weight - rate * mean / (np.sqrt(square) / math.sqrt(1 - SECOND**steps) + TINY), kind)


def _clipped(slopes: Tensors, limit: float) -> Tensors:
    """The slopes, shortened together where their L2 norm is beyond ``limit``; 0 for none."""
    if not limit:
        return slopes
    norm = math.sqrt(math.fsum(float((slope.astype(np.float64) ** 2).sum()) for slope in slopes.values()))
    share = limit / (norm + CLIP_TINY)
    return slopes if share >= 1 else {name: np.asarray(slope * share, slope.dtype) for name, slope in slopes.items()}
