"""Any of several labels for each sample: ``y`` int64 (N, labels) of 0 and 1, outputs are logits (N, labels)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from talaria.errors import DataError
from talaria.tasks.base import Scale
from talaria.tasks.classification import even
from talaria.tensors import Array


@dataclass(frozen=True)
class MultiLabel:
    """Binary cross-entropy of each label. A label is said where its logit is above 0; the score is micro F1, over all
    labels together, and beside it stands macro F1, the mean over the labels that occur.

    With ``balance`` a label weighs as much in the samples that have it as in those that have it not, however few a
    device has of either: a rare label is else never said.
    """

    name: ClassVar[str] = "multilabel"
    figures: ClassVar[tuple[str, str]] = ("micro_f1", "macro_f1")
    lowest: ClassVar[float] = 0.0
    fewest: ClassVar[int] = 1
    answer: ClassVar[tuple[str, ...]] = ("N", "labels")

    balance: bool = False
    weights: Array | None = field(default=None, init=False, repr=False, compare=False)
    """float32 (2, labels): what a sample counts that has a label not, and one that has it; 1 on average."""

    def require(self, where: str, y: Array, outputs: int) -> None:
        """See :class:`~talaria.tasks.base.Goal`."""
        if y.dtype != np.int64 or y.ndim != 2 or y.shape[1] != outputs:
            raise DataError(
                f"{where} labels are {y.dtype} {y.shape}, need int64 (N, {outputs}), 0 or 1 for each label of a sample"
            )
        if y.size and not 0 <= int(y.min()) <= int(y.max()) <= 1:
            raise DataError(f"{where} labels span {int(y.min())}..{int(y.max())}, need 0 or 1; map them first")

    def fitted(self, y: Array) -> MultiLabel:
        """See :class:`~talaria.tasks.base.Goal`."""
        if not self.balance:
            return self
        counts = np.stack([(y == value).sum(0) for value in (0, 1)])
        out = replace(self)
        object.__setattr__(out, "weights", even(counts, len(y)))
        return out

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """The mean over samples and labels."""
        count = np.asarray(out.size, out.dtype)
        each = self._each(y)
        small = np.exp(-np.abs(out))
        loss = np.maximum(out, 0) - out * y + np.log1p(small)
        said = np.where(out >= 0, 1 / (1 + small), small / (1 + small))
        return float((loss * each).sum() / count), ((said - y) * each / count).astype(out.dtype)

    def _each(self, y: Array) -> Array:
        return (
            np.ones((1, 1), np.float32) if self.weights is None else np.where(y == 1, self.weights[1], self.weights[0])
        )

    def count(self, y: Array) -> int:
        """All."""
        return len(y)

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`~talaria.tasks.base.Goal`."""
        small = np.exp(-np.abs(out))
        return np.asarray(way * self._each(y) * small / ((1 + small) ** 2 * out.size), out.dtype)

    def measured(self, out: Array, y: Array) -> tuple[float, float]:
        """Micro and macro F1; a label that neither occurs nor is said counts nowhere. NaN says nothing."""
        said, true = out > 0, y == 1
        both, either = (said & true).sum(0), said.sum(0) + true.sum(0)
        known, silent = true.any(0), float(not said.any() and not np.isnan(out).any())
        macro = float((2 * both[known] / either[known]).mean()) if known.any() else silent
        return float(2 * both.sum() / either.sum()) if either.sum() else silent, macro

    def decided(self, out: Array) -> Array | None:
        """Each label, said or not."""
        return np.asarray(out > 0)

    def scale(self, y: Array) -> Scale | None:
        """None."""
        return None

    def strata(self, y: Array) -> Array:
        """Samples with the same labels are alike."""
        found = np.unique(y, axis=0, return_inverse=True)[1]
        return np.asarray(found.reshape(-1), np.int64)

    def example(self, shape: tuple[int, ...]) -> Array:
        """One label each, in turn."""
        return np.eye(shape[-1], dtype=np.int64)[np.arange(shape[0]) % shape[-1]]
