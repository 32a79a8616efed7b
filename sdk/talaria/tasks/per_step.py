"""A class for each step of a sequence: ``y`` int64 (N, steps), outputs are logits (N, steps, classes).

A step labelled -1 is padding, or unknown: it is neither learned nor counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from talaria.errors import DataError
from talaria.tasks.base import Scale
from talaria.tasks.classification import Classification
from talaria.tensors import Array

PADDING = -1


@dataclass(frozen=True)
class PerStep:
    """Cross-entropy over the labelled steps; the score is the share of them labelled right. With ``balance`` all
    classes weigh alike, however few of a device's steps have one, as those of
    :class:`~talaria.tasks.classification.Classification`."""

    name: ClassVar[str] = "per_step"
    figures: ClassVar[tuple[str, str]] = ("step_accuracy", "macro_recall")
    lowest: ClassVar[float] = 0.0
    fewest: ClassVar[int] = 2
    answer: ClassVar[tuple[str, ...]] = ("N", "steps", "classes")

    balance: bool = False
    steps: Classification = field(default=Classification(), init=False, repr=False, compare=False)
    """What is learned of the steps that are labelled."""

    def require(self, where: str, y: Array, outputs: int) -> None:
        """See :class:`~talaria.tasks.base.Goal`."""
        if y.dtype != np.int64 or y.ndim != 2:
            raise DataError(f"{where} labels are {y.dtype} {y.shape}, need int64 (N, steps), one class for each step")
        if y.size and not PADDING <= int(y.min()) <= int(y.max()) < outputs:
            raise DataError(
                f"{where} labels span {int(y.min())}..{int(y.max())}, need 0..{outputs - 1}, or -1 for padding; "
                "map them first"
            )

    def fitted(self, y: Array) -> PerStep:
        """See :class:`~talaria.tasks.base.Goal`."""
        out = replace(self)
        object.__setattr__(out, "steps", Classification(balance=self.balance).fitted(y[y != PADDING]))
        return out

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """The mean over the labelled steps of the batch; 0 where there is none."""
        _require_steps(out, y)
        known = y != PADDING
        slopes = np.zeros_like(out)
        if not known.any():
            return 0.0, slopes
        loss, slopes[known] = self.steps.loss(out[known], y[known])
        return loss, slopes

    def count(self, y: Array) -> int:
        """The labelled steps."""
        return int(np.count_nonzero(y != PADDING))

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`~talaria.tasks.base.Goal`."""
        known, turned = y != PADDING, np.zeros_like(out)
        if known.any():
            turned[known] = self.steps.bent(out[known], y[known], way[known])
        return turned

    def measured(self, out: Array, y: Array) -> tuple[float, float]:
        """The share of labelled steps that are right, and the mean over the labels that occur of the share found."""
        _require_steps(out, y)
        known = y != PADDING
        return self.steps.measured(out[known], y[known]) if known.any() else (0.0, 0.0)

    def decided(self, out: Array) -> Array | None:
        """The likeliest class of each step."""
        return np.asarray(out.argmax(-1))

    def scale(self, y: Array) -> Scale | None:
        """None."""
        return None

    def strata(self, y: Array) -> Array:
        """All alike."""
        return np.zeros(len(y), np.int64)

    def example(self, shape: tuple[int, ...]) -> Array:
        """All classes in turn, step by step."""
        return (np.arange(math.prod(shape[:-1]), dtype=np.int64) % shape[-1]).reshape(shape[:-1])


def _require_steps(out: Array, y: Array) -> None:
    if out.ndim != 3 or out.shape[:2] != y.shape:
        raise DataError(
            f"per_step: the model gives {out.shape[1:]} for a sample of {y.shape[1]} labelled steps; it must give "
            f"({y.shape[1]}, classes): end it with a Linear layer that reads each step"
        )
