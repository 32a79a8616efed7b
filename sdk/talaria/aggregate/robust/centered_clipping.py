"""Centered clipping: move to where the rows point, but no row by more than a radius (Karimireddy et al., ICML 2021)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from talaria import tensors
from talaria.aggregate.robust.geometric_median import distances, middle
from talaria.aggregate.robust.median import median
from talaria.aggregate.robust.stacked_updates import RobustRule, Rows
from talaria.aggregate.validation import check_count, check_range, trained
from talaria.errors import ConfigError
from talaria.tensors import Array, Tensors

CENTRE = "centre/"


@dataclass(frozen=True, kw_only=True)
class CenteredClip(RobustRule):
    """``passes`` times ``v += mean_i (x_i - v) min(1, radius / |x_i - v|)``; under masks the mean is over holders.

    - ``radius``: fixed, or None for the median distance to ``v`` in each pass. A fixed one leaves an error in
      proportion to it, so it would have to shrink with the updates; the median does so by itself.
    - ``start``: ``"median"``, the coordinate median, keeps no state; ``"previous"`` is the paper's, the last
      aggregated step, kept in the state under ``centre/``.

    Norms are scaled by ``sqrt(D / |M_i|)`` under masks. Running statistics take the coordinate median.
    """

    owner: ClassVar[str] = "centered clip"
    radius: float | None = None
    passes: int = 1
    start: Literal["median", "previous"] = "median"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("centered clip", "passes", self.passes, 1)
        if self.radius is not None:
            check_range("centered clip", "radius", self.radius, 0, float("inf"), "()")
        if self.start not in ("median", "previous"):
            raise ConfigError(f"centered clip: start={self.start!r} is unknown; use 'median' or 'previous'")

    def init(self, shared: Tensors) -> Tensors:
        """The last step, zero, under ``centre/<name>`` in float64 where ``start="previous"``; else nothing."""
        if self.start == "median":
            return {}
        return {CENTRE + k: np.zeros(shared[k].shape) for k in trained(shared)}

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The clipped centre, float64."""
        v = {k: median(rows, k) for k in rows.names}
        origin = {k: 0.0 if rows.delta else shared[k].astype(np.float64) for k in rows.weighty}
        if self.start == "previous":
            v |= {k: np.asarray(state[CENTRE + k] + origin[k]) for k in rows.weighty}
        stretch = _stretch(rows)
        for _ in range(self.passes):
            far = distances(rows, v) * stretch
            radius = middle(far) if self.radius is None else self.radius
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.where(far > radius, radius / far, 1.0)
            v |= {k: np.asarray(v[k] + _step(rows, k, v[k], factor)) for k in rows.weighty}
        kept = tensors.copied(state)
        if self.start == "previous":
            for k in rows.weighty:
                moved = rows.held[k].any(0)
                kept[CENTRE + k] = np.where(moved, v[k] - origin[k], state[CENTRE + k])
        return v, kept


def _stretch(rows: Rows) -> Array:
    size, held = 0, np.zeros(len(rows))
    for name in rows.weighty:
        numel, h = rows.values[name][0].size, rows.held[name].reshape(len(rows), -1)
        size += numel
        held += h.sum(1) * (numel / h.shape[1])
    return np.sqrt(size / np.maximum(held, 1.0))


@np.errstate(over="ignore", invalid="ignore")
def _step(rows: Rows, name: str, v: Array, factor: Array) -> Array:
    flat = v.reshape(-1)
    out = np.zeros_like(flat)
    for part, x, h in rows.slabs(name):
        short = np.where(h, x - flat[part], 0.0) * factor[:, None]
        out[part] = short.sum(0) / np.maximum(h.sum(0), 1)
    return out.reshape(v.shape)
