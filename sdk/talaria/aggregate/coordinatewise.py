"""Robust rules coordinate by coordinate: the median and the trimmed mean (Yin et al., ICML 2018)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.aggregate.checks import Weighting, check_weighting
from talaria.aggregate.rows import Keep, Rows, check_rule, settle
from talaria.errors import ConfigError
from talaria.types import Tensors, Update

_SLAB = 1 << 18
"""Coordinates sorted at once: bounds the scratch memory beside the rows."""


@dataclass(frozen=True, kw_only=True)
class Median:
    """The coordinate median of the holders; for an even count, the mean of the two in the middle.

    - ``f``: how many wrong clients to survive. Fewer than ``2f+1`` updates are refused, and a coordinate that fewer
      than ``min_holders`` (default ``2f+1``) hold stays: its sole keeper would own it. ``keep="all"`` moves only
      coordinates that all hold, and says which as ``mask/<group>``.
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
        return {k: median(rows.values[k], rows.held[k], weights) for k in rows.names}, dict(state)


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
        return {k: trimmed(rows.values[k], rows.held[k], self.cut) for k in rows.names}, dict(state)


def median(values: Tensor, held: Tensor, weights: Tensor | None = None) -> Tensor:
    """Float64 median over rows: ``values`` (n, ...), ``held`` bool of the same rank; 0 where nobody holds.

    ``weights`` float64 (n,) makes it the weighted median.
    """
    return _by_slab(values, held, lambda x, h: _median(x, h, weights))


def trimmed(values: Tensor, held: Tensor, cut: int) -> Tensor:
    """Float64 mean over rows without ``cut`` values at each end; 0 where nobody holds."""
    return _by_slab(values, held, lambda x, h: _trimmed(x, h, cut))


def _by_slab(values: Tensor, held: Tensor, rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    x = values.reshape(len(values), -1)
    h = held.expand_as(values).reshape(len(values), -1)
    out = torch.zeros(x.shape[1], dtype=torch.float64)
    for start in range(0, x.shape[1], _SLAB):
        slab = slice(start, start + _SLAB)
        out[slab] = rule(x[:, slab].to(torch.float64), h[:, slab])
    return out.view(values.shape[1:])


def _median(x: Tensor, held: Tensor, weights: Tensor | None) -> Tensor:
    x, order = x.masked_fill(~held, float("inf")).sort(0)
    count = held.sum(0)
    if weights is None:
        low, high = (count - 1).clamp(min=0) // 2, count // 2
    else:
        share = torch.where(held, weights[:, None], 0.0).gather(0, order)
        half = share.sum(0) / 2
        below = share.cumsum(0)
        low, high = (below < half).sum(0), (below <= half).sum(0)
    # With no holder the index may fall past the end; what it reads there is replaced below.
    low, high = (i.clamp(max=len(x) - 1).unsqueeze(0) for i in (low, torch.minimum(high, (count - 1).clamp(min=0))))
    a, b = x.gather(0, low)[0], x.gather(0, high)[0]
    # a + (b - a) / 2 is exact where both agree and stays between them; it overflows only for float64 extremes.
    return torch.where(count > 0, a + (b - a) / 2, 0.0)


def _trimmed(x: Tensor, held: Tensor, cut: int) -> Tensor:
    # Sort and slice: the total minus the extremes would lose every digit to one huge outlier.
    x = x.masked_fill(~held, float("inf")).sort(0).values
    count = held.sum(0)
    drop = torch.clamp((count - 1).clamp(min=0) // 2, max=cut)
    place = torch.arange(len(x))[:, None]
    inside = (place >= drop) & (place < count - drop)
    mean = torch.where(inside, x, 0.0).sum(0) / inside.sum(0)
    return torch.where(count > 0, mean, 0.0)
