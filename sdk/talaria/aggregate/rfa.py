"""RFA: the geometric median of the rows by smoothed Weiszfeld steps (Pillutla et al., IEEE TSP 2022)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.aggregate.checks import Weighting, check_count, check_range, check_weighting
from talaria.aggregate.coordinatewise import median
from talaria.aggregate.rows import Keep, Rows, check_rule, settle
from talaria.types import Tensors, Update


@dataclass(frozen=True, kw_only=True)
class RFA:
    """``argmin_z sum_i a_i |M_i (x_i - z)|``, from the coordinate median, by at most ``steps`` Weiszfeld steps.

    - ``nu``: smoothing radius as a part of the median distance to the start. It is relative because an absolute one
      turns the rule into the mean once updates are smaller than it.
    - ``tol``: stop where a step lowers the objective by less than this part of it.
    - ``f``, ``weighting``, ``min_holders``, ``keep``: as for
      :class:`~talaria.aggregate.coordinatewise.Median`; ``a_i`` are the weights.

    The smoothed objective never rises. Running statistics do not enter distances and take the coordinate median.
    """

    f: int = 1
    steps: int = 32
    nu: float = 1e-6
    tol: float = 1e-6
    weighting: Weighting = "uniform"
    min_holders: int | None = None
    keep: Keep = "holders"

    def __post_init__(self) -> None:
        check_rule("rfa", self.f, self.min_holders, self.keep)
        check_weighting("rfa", self.weighting)
        check_count("rfa", "steps", self.steps, 1)
        check_range("rfa", "nu", self.nu, 0, 1, "(]")
        check_range("rfa", "tol", self.tol, 0, 1, "[)")

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
        """The geometric median, float64."""
        weights = rows.weights if self.weighting == "samples" else torch.ones(len(rows), dtype=torch.float64)
        z = {k: median(rows.values[k], rows.held[k]) for k in rows.names}
        far = distances(rows, z)
        nu = self.nu * float(far.median())
        if nu == 0:
            # Half of the rows or more lie on the start, which is then a geometric median itself.
            return z, dict(state)
        best = objective(far, weights, nu)
        for _ in range(self.steps):
            pull = weights / far.clamp(min=nu)
            z |= {k: _weighted(rows.values[k], rows.held[k], pull) for k in rows.weighty}
            far = distances(rows, z)
            now = objective(far, weights, nu)
            if best - now <= self.tol * best:
                break
            best = now
        return z, dict(state)


def distances(rows: Rows, z: Tensors) -> Tensor:
    """``|M_i (x_i - z)|`` over the weights of each row: float64 (n,)."""
    squared = torch.zeros(len(rows), dtype=torch.float64)
    for name in rows.weighty:
        # Row by row, so that the float64 scratch is one model and not n.
        for i, (x, h) in enumerate(zip(rows.values[name], rows.held[name], strict=True)):
            squared[i] += torch.where(h, x - z[name], 0.0).square().sum()
    return squared.sqrt()


def objective(far: Tensor, weights: Tensor, nu: float) -> float:
    """The smoothed sum of distances: quadratic within ``nu``."""
    return float((weights * torch.where(far > nu, far, (far.square() / nu + nu) / 2)).sum())


def _weighted(values: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    share = torch.zeros(held.shape[1:], dtype=torch.float64)
    for x, h, w in zip(values, held, weights.tolist(), strict=True):
        total += torch.where(h, x, 0.0).to(torch.float64) * w
        share += h * w
    return torch.where(share > 0, total / share, 0.0)
