"""Robust rules coordinate by coordinate: the median and the trimmed mean (Yin et al., ICML 2018)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from talaria.aggregate.robust.stacked_updates import RobustRule, Rows
from talaria.aggregate.validation import Weighting, check_weighting
from talaria.errors import ConfigError
from talaria.tensors import Array, Tensors


@dataclass(frozen=True, kw_only=True)
class Median(RobustRule):
    """The coordinate median of the holders; for an even count, the mean of the two in the middle.

    ``weighting="samples"`` is the weighted median, midway between its lower and its upper form. Weights are the
    clients' own word, so ``"uniform"`` is the default.
    """

    owner: ClassVar[str] = "median"
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weighting("median", self.weighting)

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The medians, float64."""
        weights = rows.weights if self.weighting == "samples" else None
        return {k: median(rows, k, weights) for k in rows.names}, dict(state)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(RobustRule):
    """The mean of the holders without the ``b`` smallest and ``b`` largest values of each coordinate.

    ``trim`` is ``b``, by default ``f``; a coordinate with ``n_j`` holders loses ``min(b, (n_j - 1) // 2)`` at each
    end. ``f=0`` with no ``trim`` would be the mean, and is refused.
    """

    owner: ClassVar[str] = "trimmed mean"
    trim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut < max(1, self.f):
            raise ConfigError(
                f"trimmed mean: trim={self.cut} must be at least f={self.f} and at least 1; with 0 it is the mean"
            )

    @property
    def cut(self) -> int:
        """Values dropped at each end."""
        return self.f if self.trim is None else self.trim

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The trimmed means, float64."""
        return {k: rows.by_column(k, lambda x, h: _trimmed(x, h, self.cut)) for k in rows.names}, dict(state)


def median(rows: Rows, name: str, weights: Array | None = None) -> Array:
    """The median of one tensor over its holders, float64; ``weights`` (n,) makes it the weighted median."""
    return rows.by_column(name, lambda x, h: _median(x, h, weights))


def _median(x: Array, held: Array, weights: Array | None) -> Array:
    x = np.where(held, x, np.inf)
    last = np.maximum(held.sum(0) - 1, 0)
    if weights is None:
        x.sort(0)
        low, high = last // 2, (last + 1) // 2
    else:
        order = x.argsort(0, kind="stable")
        x = np.take_along_axis(x, order, 0)
        share = np.take_along_axis(np.where(held, weights[:, None], 0.0), order, 0)
        half, below = share.sum(0) / 2, share.cumsum(0)
        low, high = np.minimum((below < half).sum(0), last), np.minimum((below <= half).sum(0), last)
    a, b = np.take_along_axis(x, low[None], 0)[0], np.take_along_axis(x, high[None], 0)[0]
    # Not (a + b) / 2: this form is exact where both agree and does not overflow between equals.
    return np.asarray(a + (b - a) / 2)


def _trimmed(x: Array, held: Array, cut: int) -> Array:
    # Sort and slice: the total minus the extremes would lose every digit to one huge outlier.
    x = np.sort(np.where(held, x, np.inf), 0)
    count = held.sum(0)
    drop = np.minimum(np.maximum(count - 1, 0) // 2, cut)
    place = np.arange(len(x))[:, None]
    inside = (place >= drop) & (place < count - drop)
    return np.asarray(np.where(inside, x, 0.0).sum(0) / inside.sum(0))
