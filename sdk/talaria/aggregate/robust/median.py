"""Robust rules coordinate by coordinate: the median and the trimmed mean (Yin et al., ICML 2018)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.aggregate.robust.stacked_updates import Keep, Rows, check_rule, settle
from talaria.aggregate.validation import Weighting, check_weighting
from talaria.errors import ConfigError
from talaria.tensors import Tensors
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class Median:
    """The coordinate median of the holders; for an even count, the mean of the two in the middle.

    - ``f``: how many wrong clients to survive. Fewer than ``2f+1`` updates are refused, and a coordinate that fewer
      than ``min_holders`` (default ``2f+1``) hold stays: its sole keeper would own it. ``keep="all"`` moves only
      coordinates that all hold. Which channels enough clients kept is said as ``mask/<group>``.
    - ``weighting="samples"``: the weighted median, midway between its lower and its upper form. Weights are the
      clients' own word, so ``"uniform"`` is the default.
    """

    f: int = 1
    weighting: Weighting = "uniform"
    min_holders: int | None = None
    keep: Keep = "holders"

    def __post_init__(self) -> None:
        check_rule("median", self.f, self.min_holders, self.keep)
        check_weighting("median", self.weighting)

    @property
    def least(self) -> int:
        """``2f+1``."""
        return 2 * self.f + 1

    def init(self, shared: Tensors) -> Tensors:
        """No state."""
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; order of clients does not matter."""
        return settle(self, shared, state, updates)

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The medians, float64."""
        weights = rows.weights if self.weighting == "samples" else None
        return {k: median(rows, k, weights) for k in rows.names}, dict(state)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean:
    """The mean of the holders without the ``b`` smallest and ``b`` largest values of each coordinate.

    ``trim`` is ``b``, by default ``f``; a coordinate with ``n_j`` holders loses ``min(b, (n_j - 1) // 2)`` at each
    end. The other options are those of :class:`Median`. ``f=0`` with no ``trim`` would be the mean, and is refused.
    """

    f: int = 1
    trim: int | None = None
    min_holders: int | None = None
    keep: Keep = "holders"

    def __post_init__(self) -> None:
        check_rule("trimmed mean", self.f, self.min_holders, self.keep)
        if self.cut < max(1, self.f):
            raise ConfigError(
                f"trimmed mean: trim={self.cut} must be at least f={self.f} and at least 1; with 0 it is the mean"
            )

    @property
    def cut(self) -> int:
        """Values dropped at each end."""
        return self.f if self.trim is None else self.trim

    @property
    def least(self) -> int:
        """``2f+1``."""
        return 2 * self.f + 1

    def init(self, shared: Tensors) -> Tensors:
        """No state."""
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; order of clients does not matter."""
        return settle(self, shared, state, updates)

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The trimmed means, float64."""
        return {k: rows.by_column(k, lambda x, h: _trimmed(x, h, self.cut)) for k in rows.names}, dict(state)


def median(rows: Rows, name: str, weights: Tensor | None = None) -> Tensor:
    """The median of one tensor over its holders, float64; ``weights`` (n,) makes it the weighted median."""
    return rows.by_column(name, lambda x, h: _median(x, h, weights))


def _median(x: Tensor, held: Tensor, weights: Tensor | None) -> Tensor:
    x, order = x.masked_fill(~held, float("inf")).sort(0)
    last = (held.sum(0) - 1).clamp(min=0)
    if weights is None:
        low, high = last // 2, (last + 1) // 2
    else:
        share = torch.where(held, weights[:, None], 0.0).gather(0, order)
        half, below = share.sum(0) / 2, share.cumsum(0)
        low, high = torch.minimum((below < half).sum(0), last), torch.minimum((below <= half).sum(0), last)
    a, b = x.gather(0, low[None])[0], x.gather(0, high[None])[0]
    # Not (a + b) / 2: this form is exact where both agree and does not overflow between equals.
    return a + (b - a) / 2


def _trimmed(x: Tensor, held: Tensor, cut: int) -> Tensor:
    # Sort and slice: the total minus the extremes would lose every digit to one huge outlier.
    x = x.masked_fill(~held, float("inf")).sort(0).values
    count = held.sum(0)
    drop = ((count - 1).clamp(min=0) // 2).clamp(max=cut)
    place = torch.arange(len(x))[:, None]
    inside = (place >= drop) & (place < count - drop)
    return torch.where(inside, x, 0.0).sum(0) / inside.sum(0)
