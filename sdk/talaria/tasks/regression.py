"""Numbers for each sample: ``y`` float32 (N, K), or (N,) for one; outputs are (N, K).

A device learns its targets in units of its own spread: mean and standard deviation of its training targets are private,
and are folded into the head of the model that it serves, which speaks in the targets' own units. Where 0 means
something (a change, a residual), the mean of few labels is noise that every answer would carry: ``center=zero``. Where
a number means the same to everybody (degrees, mg/dl), so is the spread of few labels: ``spread=20`` is a unit for all.
Both together, ``center=zero,spread=1``, leave the targets alone, for networks that give more than their head says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from talaria import valid
from talaria.errors import DataError
from talaria.tasks.base import WORST, Scale
from talaria.tensors import Array

LEAST_SPREAD = 1e-6


@dataclass(frozen=True)
class Regression:
    """``kind``: ``"huber"`` (P. J. Huber, 1964; squared up to ``delta`` standard deviations, linear beyond) or
    ``"squared"``. The score is R², the share of a target's variance that is explained, of several targets the mean of
    theirs, whatever their units: 1 is perfect, 0 is what a target's mean is worth, and it may be negative.

    ``center``: what is taken off a device's targets before they are scaled, their ``"mean"`` or nothing (``"zero"``).
    ``spread``: what they are scaled by, in their own units, on every device and for every target; None: their standard
    deviations on the device.
    """

    name: ClassVar[str] = "regression"
    figures: ClassVar[tuple[str, str]] = ("r2", "minus_mae")
    lowest: ClassVar[float] = WORST
    fewest: ClassVar[int] = 1
    answer: ClassVar[tuple[str, ...]] = ("N", "numbers")

    kind: str = "huber"
    delta: float = 1.0
    center: str = "mean"
    spread: float | None = None

    def __post_init__(self) -> None:
        valid.among("task 'regression'", "kind", self.kind, ("huber", "squared"))
        valid.among("task 'regression'", "center", self.center, ("mean", "zero"))
        valid.number("task 'regression'", "delta", self.delta, "above 0, in standard deviations", low=1e-6, high=1e6)
        if self.spread is not None:
            rule = "above 0, in the targets' units"
            valid.number("task 'regression'", "spread", self.spread, rule, low=LEAST_SPREAD, high=1e12)

    def require(self, where: str, y: Array, outputs: int) -> None:
        """See :class:`~talaria.tasks.base.Goal`."""
        width = 1 if y.ndim == 1 else y.shape[-1]
        if y.dtype != np.float32 or y.ndim not in (1, 2) or width != outputs:
            raise DataError(
                f"{where} targets are {y.dtype} {y.shape}, need float32 (N, {outputs}); give as many numbers for each "
                "sample as the model has outputs"
            )

    def fitted(self, y: Array) -> Regression:
        """Itself."""
        return self

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """The mean over samples and targets of the squared error (halved), or of Huber's."""
        away = out - y.reshape(out.shape)
        count = np.asarray(away.size, out.dtype)
        if self.kind == "squared":
            return float((away * away).sum() / (2 * count)), away / count
        cut = np.clip(away, -self.delta, self.delta).astype(out.dtype)
        return float((cut * (away - cut / 2)).sum() / count), cut / count

    def count(self, y: Array) -> int:
        """All."""
        return len(y)

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`~talaria.tasks.base.Goal`; 0 where Huber's loss is linear."""
        turned = np.asarray(way / np.asarray(out.size, out.dtype))
        return turned if self.kind == "squared" else turned * (np.abs(out - y.reshape(out.shape)) <= self.delta)

    def measured(self, out: Array, y: Array) -> tuple[float, float]:
        """The mean of each target's R², and minus the mean absolute error, in the targets' units. Of a target that does
        not vary, such as that of a single sample, no share can be explained: 1 where it is met, else 0, as scikit-learn
        has it."""
        found, wanted = (values.reshape(len(y), -1).astype(np.float64) for values in (out, y))
        if not np.isfinite(found).all():
            return WORST, WORST
        away = found - wanted
        missed, spread = (away**2).sum(0), ((wanted - wanted.mean(0)) ** 2).sum(0)
        least = LEAST_SPREAD**2 * len(wanted)
        varies = spread > least
        explained = np.maximum(WORST, 1 - missed / np.where(varies, spread, 1))
        return float(np.where(varies, explained, missed <= least).mean()), -float(np.abs(away).mean())

    def decided(self, out: Array) -> Array | None:
        """None: it says numbers."""
        return None

    def scale(self, y: Array) -> Scale | None:
        """Of each target the mean, or 0, and the standard deviation about it, 1 where there is none; or ``spread``."""
        values = y.reshape(len(y), -1).astype(np.float64)
        if self.center == "mean":
            mean, sd = values.mean(0), values.std(0)
        else:
            mean, sd = np.zeros(values.shape[1]), np.sqrt((values**2).mean(0))
        if self.spread is not None:
            sd = np.full(values.shape[1], self.spread)
        return Scale(mean.astype(np.float32), np.where(sd > LEAST_SPREAD, sd, 1.0).astype(np.float32))

    def strata(self, y: Array) -> Array:
        """All alike."""
        return np.zeros(len(y), np.int64)

    def example(self, shape: tuple[int, ...]) -> Array:
        """Numbers that differ."""
        return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
