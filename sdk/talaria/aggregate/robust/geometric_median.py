"""RFA: the geometric median of the rows by smoothed Weiszfeld steps (Pillutla et al., IEEE TSP 2022)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from talaria.aggregate.arithmetic import lerp
from talaria.aggregate.robust.median import median
from talaria.aggregate.robust.stacked_updates import RobustRule, Rows
from talaria.aggregate.validation import Weighting, check_count, check_range, check_weighting
from talaria.tensors import Array, Tensors


@dataclass(frozen=True, kw_only=True)
class RFA(RobustRule):
    """``argmin_z sum_i a_i |M_i (x_i - z)|``, from the coordinate median, by at most ``steps`` Weiszfeld steps.

    - ``nu``: smoothing radius as a part of the median distance to the start. It is relative because an absolute one
      turns the rule into the mean once updates are smaller than it.
    - ``tol``: stop where a step lowers the objective by less than this part of it.
    - ``weighting``: as for :class:`~talaria.aggregate.robust.median.Median`; ``a_i`` are the weights.

    The smoothed objective never rises. Running statistics do not enter distances and take the coordinate median.
    """

    owner: ClassVar[str] = "rfa"
    steps: int = 32
    nu: float = 1e-6
    tol: float = 1e-6
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weighting("rfa", self.weighting)
        check_count("rfa", "steps", self.steps, 1)
        check_range("rfa", "nu", self.nu, 0, 1, "(]")
        check_range("rfa", "tol", self.tol, 0, 1, "[)")

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """The geometric median, float64."""
        claimed = rows.weights if self.weighting == "samples" else None
        weights = np.ones(len(rows)) if claimed is None else claimed
        z = {k: median(rows, k, claimed) for k in rows.names}
        far = distances(rows, z)
        typical = middle(far)
        nu = self.nu * typical
        if nu == 0:
            # Half of the rows or more lie on the start, which is then a geometric median itself.
            return z, dict(state)
        if float(far.min()) <= nu:
            z = _off_a_row(rows, z, weights, nu, typical)
            far = distances(rows, z)
        best = objective(far, weights, nu)
        for _ in range(self.steps):
            pull = weights / np.maximum(far, nu)
            z |= _weighted(rows, pull)
            far = distances(rows, z)
            now = objective(far, weights, nu)
            if best - now <= self.tol * best:
                break
            best = now
        return z, dict(state)


@np.errstate(over="ignore", invalid="ignore")
def distances(rows: Rows, z: Tensors) -> Array:
    """``|M_i (x_i - z)|`` over the weights of each row: float64 (n,)."""
    squared = np.zeros(len(rows))
    for name in rows.weighty:
        flat = z[name].reshape(-1)
        for part, x, h in rows.slabs(name):
            squared += np.square(np.where(h, x - flat[part], 0.0)).sum(1)
    return np.sqrt(squared)


def middle(far: Array) -> float:
    """The median distance; for an even count, the mean of the two in the middle."""
    ordered = np.sort(far).tolist()
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@np.errstate(over="ignore", invalid="ignore")
def objective(far: Array, weights: Array, nu: float) -> float:
    """The smoothed sum of distances: quadratic within ``nu``."""
    return float((weights * np.where(far > nu, far, (np.square(far) / nu + nu) / 2)).sum())


def _off_a_row(rows: Rows, z: Tensors, weights: Array, nu: float, reach: float) -> Tensors:
    """Where ``z`` lies on a row, Weiszfeld steps stick to it: go down from there by bisection, where down exists."""
    far = distances(rows, z)
    start, there = objective(far, weights, nu), _weighted(rows, weights / np.maximum(far, reach))
    for halvings in range(12):
        trial = z | {k: lerp(z[k], v, 0.5**halvings) for k, v in there.items()}
        if objective(distances(rows, trial), weights, nu) < start:
            return trial
    return z


def _weighted(rows: Rows, weights: Array) -> Tensors:
    def mean(x: Array, held: Array) -> Array:
        share = weights[:, None] * held
        return np.asarray((x * share).sum(0) / share.sum(0))

    return {k: rows.by_column(k, mean) for k in rows.weighty}
