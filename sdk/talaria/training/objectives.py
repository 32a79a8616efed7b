"""Losses in plain arrays: what a batch costs, and the slope of that by what the model made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from talaria.tensors import Array, Tensors
from talaria.training.engine import LOGITS, Slopes


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy of the logits, with label ``smoothing``; an :class:`~talaria.training.engine.Objective`."""

    smoothing: float = 0.0
    taps: Sequence[str] = (LOGITS,)
    own: Sequence[str] = ()

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = cross_entropy(seen[LOGITS], y, self.smoothing)
        return Slopes(loss, {LOGITS: slope})


def cross_entropy(logits: Array, y: Array, smoothing: float = 0.0) -> tuple[float, Array]:
    """The mean loss of a batch and its gradient by the ``logits`` (N, classes), in their dtype."""
    log = log_softmax(logits)
    count, classes = logits.shape
    target = np.full_like(log, smoothing / classes)
    target[np.arange(count), y] += 1 - smoothing
    loss = -float((target * log).sum(1).mean())
    return loss, (np.exp(log) - target) / np.asarray(count, log.dtype)


def log_softmax(logits: Array) -> Array:
    """The logarithm of the class probabilities (N, classes)."""
    away = logits - logits.max(1, keepdims=True)
    found: Array = away - np.log(np.exp(away).sum(1, keepdims=True))
    return found
