"""One class for each sample: ``y`` int64 (N,), outputs are logits (N, classes)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
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
    answer: ClassVar[tuple[str, ...]] = ("N", "classes")

    balance: bool = False
    """Whether all classes weigh alike, however few samples a device has of one: a sample weighs what its class falls
    short of an equal share of the device's own training samples, 1 on average."""
    weights: Array | None = field(default=None, init=False, repr=False, compare=False)

    def fitted(self, y: Array) -> Classification:
        """See :class:`~talaria.tasks.base.Goal`."""
        if not self.balance:
            return self
        counts = np.bincount(y)
        out = replace(self)
        object.__setattr__(out, "weights", even(counts, len(y)))
        return out

    def require(self, where: str, y: Array, outputs: int) -> None:
        """See :class:`~talaria.tasks.base.Goal`."""
        if y.dtype != np.int64 or y.ndim != 1:
            raise DataError(
                f"{where} labels are {y.dtype} {y.shape}, need int64 (N,), one class for each; name the task "
                "(regression, multilabel, per_step) where they are something else"
            )
        if len(y) and int(y.view(np.uint64).max()) >= outputs:  # a negative label is a large one there
            raise DataError(
                f"{where} labels span {int(y.min())}..{int(y.max())}, need 0..{outputs - 1}; map them first"
            )

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """Mean cross-entropy, each sample by the weight of its class."""
        if self.weights is None:
            return cross_entropy(out, y)
        each = self.weights.astype(out.dtype)[y]
        log = log_softmax(out)
        target = np.zeros_like(log)
        target[np.arange(len(y)), y] = 1
        loss = -float((log[np.arange(len(y)), y] * each).mean())
        return loss, (np.exp(log) - target) * each[:, None] / np.asarray(len(y), log.dtype)

    def count(self, y: Array) -> int:
        """All."""
        return len(y)

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`~talaria.tasks.base.Goal`."""
        turned = cross_entropy_bent(out, way)
        return turned if self.weights is None else turned * self.weights.astype(out.dtype)[y][:, None]

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

    def example(self, shape: tuple[int, ...]) -> Array:
        """Each class in turn."""
        return np.arange(shape[0], dtype=np.int64) % shape[-1]


def even(counts: Array, many: int) -> Array:
    """float32 (values, ...): what each of ``many`` targets counts by its value, so that all values that occur count
    alike, and 1 on average; ``counts`` (values, ...) are how many have each."""
    weights = many / (np.maximum(counts, 1) * np.maximum(np.count_nonzero(counts, axis=0), 1))
    return np.asarray(weights, np.float32)


def cross_entropy(logits: Array, y: Array, smoothing: float = 0.0) -> tuple[float, Array]:
    """The mean loss of a batch and its gradient by the ``logits`` (N, classes), in their dtype; ``y`` int64 (N,) in
    0..classes-1. Raises :class:`~talaria.errors.DataError` for the targets of another task."""
    if logits.ndim != 2 or y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"cross-entropy: outputs {logits.shape} and targets {y.dtype} {y.shape} are not of one class for each "
            "sample; leave the objective to the task, or let the algorithm's card say why it cannot (classes_alone)"
        )
    log = log_softmax(logits)
    count, classes = logits.shape
    target = np.full_like(log, smoothing / classes)
    target[np.arange(count), y] += 1 - smoothing
    loss = -float((target * log).sum(1).mean())
    return loss, (np.exp(log) - target) / np.asarray(count, log.dtype)


def cross_entropy_bent(logits: Array, way: Array) -> Array:
    """The second derivative of a batch's mean cross-entropy by the ``logits`` (N, classes), times ``way``; labels, and
    how far they are smoothed, are not in it."""
    shares = np.exp(log_softmax(logits))
    turned: Array = shares * (way - (shares * way).sum(1, keepdims=True)) / np.asarray(len(logits), way.dtype)
    return turned


def log_softmax(logits: Array) -> Array:
    """The logarithm of the class probabilities (N, classes)."""
    away = logits - logits.max(1, keepdims=True)
    found: Array = away - np.log(np.exp(away).sum(1, keepdims=True))
    return found
