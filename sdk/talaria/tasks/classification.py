"""One class for each sample: ``y`` int64 (N,), outputs are logits (N, classes)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from talaria.errors import DataError
from talaria.tasks.base import Scale
from talaria.tensors import Array


@dataclass(frozen=True)
class Classification:
    """Cross-entropy; the score is the share labelled right."""

    name: ClassVar[str] = "classification"
    figures: ClassVar[tuple[str, str]] = ("accuracy", "macro_recall")
    lowest: ClassVar[float] = 0.0
    fewest: ClassVar[int] = 2

    def require(self, where: str, y: Array, outputs: int) -> None:
        """See :class:`~talaria.tasks.base.Goal`."""
        if y.dtype != np.int64 or y.ndim != 1:
            raise DataError(
                f"{where} labels are {y.dtype} {y.shape}, need int64 (N,), one class for each; name the task "
                "(regression, multilabel, per_step) where they are something else"
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < outputs:
            raise DataError(
                f"{where} labels span {int(y.min())}..{int(y.max())}, need 0..{outputs - 1}; map them first"
            )

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """Mean cross-entropy."""
        return cross_entropy(out, y)

    def measured(self, out: Array, y: Array) -> tuple[float, float]:
        """The share labelled right, and the mean over the labels that occur of the share found.

        A row that holds NaN counts as wrong, whatever its label: a model that diverged must not score.
        """
        right = (out.argmax(1) == y) & ~np.isnan(out).any(1)
        recalls = [float(right[y == label].mean()) for label in sorted(set(y.tolist()))]
        return float(right.mean()), math.fsum(recalls) / len(recalls)

    def decided(self, out: Array) -> Array | None:
        """The likeliest class of each sample."""
        return np.asarray(out.argmax(1))

    def scale(self, y: Array) -> Scale | None:
        """None."""
        return None

    def strata(self, y: Array) -> Array:
        """The labels themselves."""
        return y

    def example(self, count: int, outputs: int) -> Array:
        """Each class in turn."""
        return np.arange(count, dtype=np.int64) % outputs


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
