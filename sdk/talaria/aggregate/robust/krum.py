"""Krum and Multi-Krum: trust the rows that have the closest neighbours (Blanchard et al., NeurIPS 2017)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from talaria.aggregate.robust.median import median
from talaria.aggregate.robust.stacked_updates import RobustRule, Rows
from talaria.aggregate.validation import check_count, is_statistic
from talaria.errors import AggregationError
from talaria.tensors import Array, Tensors

_OVERLAP = 0.1
"""Two rows that share less than this part of all coordinates count as infinitely far apart."""


@dataclass(frozen=True, kw_only=True)
class Krum(RobustRule):
    """The one row with the lowest score, the sum of its ``n - f - 2`` smallest *squared* distances to the others.

    ``n >= 2f+3`` rows are needed (any number where ``f=0``).

    Under masks ``d2(i, k) = D/|O| * sum over O of (x_i - x_k)^2``, with ``O`` what both hold, and infinite where
    ``|O| < D/10``; a coordinate that none of the chosen holds stays, so prefer :class:`MultiKrum` with ``m >= 2f+1``:
    here every coordinate that the winner lacks stays stale. Equal scores go to the first client by name. Running
    statistics do not enter distances and take the coordinate median of all holders.

    Raises :class:`~talaria.errors.AggregationError` for too few rows, or too few with enough in common.
    """

    owner: ClassVar[str] = "krum"

    @property
    def least(self) -> int:
        """``2f+3``, or 1 where ``f=0``."""
        return 2 * self.f + 3 if self.f else 1

    def wanted(self, n: int) -> int:
        """How many of ``n`` rows are averaged."""
        return 1

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")
    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The mean of the chosen rows, float64; where none of them holds a coordinate, the old value."""
        chosen = self.choose(rows)
        out = {}
        for name in rows.names:
            if is_statistic(name):
                out[name] = median(rows, name)
                continue
            values, held = rows.values[name], rows.held[name]
            x, h = values[chosen].astype(np.float64), held[chosen]
            mean = np.where(h, x, 0.0).sum(0) / h.sum(0)
            old = 0.0 if rows.delta else shared[name].astype(np.float64)
            out[name] = np.where(h.any(0), mean, old)
        return out, dict(state)

    def choose(self, rows: Rows) -> list[int]:
        """Indices of the chosen rows, ascending."""
        n = len(rows)
        m = self.wanted(n)
        near = min(n - 1, max(1, n - self.f - 2))
        score = scores(squared_distances(rows), near)
        order = sorted(range(n), key=lambda i: (float(score[i]), i))[:m]
        if not all(score[i] < float("inf") for i in order):
            raise AggregationError(
                f"krum: fewer than {m} of {n} rows share enough coordinates with {near} others; "
                f"use a coordinate rule (median, trimmed_mean) for masks this different"
            )
        return sorted(order)


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the ``m`` rows with the lowest scores, by default ``n - f``; ``m=1`` is :class:`Krum`.

    ``n >= m+f`` rows are needed too: with more of them chosen, wrong ones could not be left out.
    """

    m: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m is not None:
            check_count("krum", "m", self.m, 1)

    @property
    def least(self) -> int:
        """``2f+3`` and ``m+f``, or ``m`` where ``f=0``."""
        return max(super().least, (self.m or 0) + self.f)

    def wanted(self, n: int) -> int:
        """``m``."""
        return n - self.f if self.m is None else self.m


def scores(squared: Array, near: int) -> Array:
    """Sum of each row's ``near`` smallest squared distances to the others: float64 (n,) of (n, n)."""
    if len(squared) == 1:
        return np.zeros(1)
    apart = squared.copy()
    np.fill_diagonal(apart, np.inf)
    return np.asarray(np.sort(apart, 1)[:, :near].sum(1))


@np.errstate(over="ignore", invalid="ignore")
def squared_distances(rows: Rows) -> Array:
    """Masked squared distances, float64 (n, n), scaled to all ``D`` coordinates of ``rows.weighty``."""
    n = len(rows)
    squared, shared, size = np.zeros((n, n)), np.zeros((n, n)), 0
    for name in rows.weighty:
        numel, both = rows.values[name][0].size, rows.held[name].reshape(n, -1).astype(np.float64)
        size += numel
        shared += both @ both.T * (numel / both.shape[1])
        for _, x, h in rows.slabs(name):
            # Differences, not the Gram matrix: equal rows are exactly 0 apart, so that ties are true ties.
            for i in range(n - 1):
                squared[i, i + 1 :] += np.square(np.where(h[i] & h[i + 1 :], x[i] - x[i + 1 :], 0.0)).sum(1)
    squared = squared + squared.T
    far = shared < max(1.0, _OVERLAP * size)
    return np.where(far, np.inf, squared * (size / np.maximum(shared, 1.0)))
