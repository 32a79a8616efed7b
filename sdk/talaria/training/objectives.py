"""Losses in plain arrays: what a batch costs, and the slope of that by what the model made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from talaria.tasks.base import Goal
from talaria.tasks.classification import cross_entropy, log_softmax
from talaria.tensors import Array, Tensors
from talaria.training.engine import LOGITS, Slopes

__all__ = ["Aimed", "CrossEntropy", "cross_entropy", "log_softmax"]


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy of the logits, with label ``smoothing``; an :class:`~talaria.training.engine.Objective`."""

    smoothing: float = 0.0
    taps: Sequence[str] = (LOGITS,)
    own: Sequence[str] = ()

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = cross_entropy(seen[LOGITS], y, self.smoothing)
        return Slopes(loss, {LOGITS: slope})


@dataclass(frozen=True)
class Aimed:
    """A task's own loss of what the model gives; an :class:`~talaria.training.engine.Objective`."""

    goal: Goal
    taps: Sequence[str] = (LOGITS,)
    own: Sequence[str] = ()

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = self.goal.loss(seen[LOGITS], y)
        return Slopes(loss, {LOGITS: slope})
