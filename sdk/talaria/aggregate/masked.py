"""The mean under channel masks: over those who kept a coordinate, or only where all did.

Li et al., Hermes (MobiCom 2021), and Li et al., LotteryFL (2020), for the holders' rule.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from talaria import tensors
from talaria.aggregate.arithmetic import cast, lerp
from talaria.aggregate.masked_sum import Counters, Fold, Kept
from talaria.aggregate.row_sums import RowSums
from talaria.aggregate.validation import (
    Weighting,
    check_count,
    check_weighting,
    checked,
    is_finite,
    is_variance,
    not_below,
    trained,
    weight_of,
)
from talaria.errors import AggregationError, ConfigError
from talaria.tensors import Array, Tensors
from talaria.types import Update


@dataclass(frozen=True)
class _Rows:
    """Some rows of a tensor: the sums, what they are divided by, the shared values before, where these stay, and the
    memory of the new ones; (rows, columns, width), or (rows, columns) and (1, 1) for weight and stays."""

    total: Array
    weight: Array
    old: Array
    stays: Array
    new: Array


@dataclass(frozen=True, kw_only=True)
class MaskedMean:
    """``G[j] = sum_h n_k x_k[j] / sum_h n_k`` over the holders ``h`` of ``j``; with none, ``G[j]`` stays.

    - ``mode="holders"``: the rule above. ``"intersection"``: only coordinates that every client of this fold kept
      change.
    - ``weighting``: ``"samples"`` (``Update.weight``) or ``"uniform"``.
    - ``min_holders``: a coordinate with fewer holders stays.
    - ``blend``: move only by the holders' share of the weight, ``G + kappa (mean - G)`` with
      ``kappa = sum_h n / sum n``; it damps coordinates that few hold.

    A rule that so leaves coordinates with some holders says in the new shared state which channels enough clients of
    this fold kept, as ``mask/<group>`` (uint8, one per channel), so that devices keep their own values elsewhere.

    A client without a mask keeps everything. Updates of kind ``"delta"`` are added to the shared state. Integer
    tensors take the largest value seen. Values are summed in float64, so that clients who agree, or one client
    alone, give back their float32 (or narrower) values bit for bit. Memory is O(model).

    Raises :class:`~talaria.errors.ConfigError` on unknown options, and what
    :class:`~talaria.aggregate.base.Aggregator` names for updates that do not fit.
    """

    mode: Literal["holders", "intersection"] = "holders"
    weighting: Weighting = "samples"
    min_holders: int = 1
    blend: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("holders", "intersection"):
            raise ConfigError(f"masked mean: mode={self.mode!r} is unknown; use 'holders' or 'intersection'")
        check_weighting("masked mean", self.weighting)
        check_count("masked mean", "min_holders", self.min_holders, 1)

    @property
    def leaves(self) -> bool:
        """Whether coordinates that some hold may stay."""
        return self.mode == "intersection" or self.min_holders > 1

    def init(self, shared: Tensors) -> Tensors:
        """No state."""
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; see the class."""
        leaves = self.leaves
        fold = Fold(shared, trained(shared), count=leaves)
        most = Counters(shared)
        kept = Kept()
        delta = False
        for update in checked(shared, updates, finite=False):  # the fold looks at its sums instead
            fold.add(update, weight_of(update, self.weighting))
            most.add(update)
            if leaves:
                kept.add(update.mask)
            delta = update.kind == "delta"
        if not fold.clients:
            return tensors.copied(shared), tensors.copied(state)
        if not 0 < fold.total < float("inf"):
            raise AggregationError(f"the weights of {fold.clients} updates sum to {fold.total}; send smaller weights")
        means = {name: self._mean(fold, name, delta) for name in fold.names}
        new = {k: means[k] if k in means else np.array(v, order="C") for k, v in shared.items()} | most.values
        if leaves:
            new |= kept.bitmaps(shared, self._need(fold))
        return new, tensors.copied(state)

    def _need(self, fold: Fold) -> int:
        """Holders that a coordinate needs to move."""
        return max(fold.clients if self.mode == "intersection" else 1, self.min_holders)

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")
    def _mean(self, fold: Fold, name: str, delta: bool) -> Array:
        old, view = fold.shared[name], fold.view(name)
        new = np.empty_like(old, order="C")
        whole, before = (np.ascontiguousarray(v).reshape(view.rows, view.columns, view.width) for v in (new, old))
        for tile in fold.tiles(name):
            stays = tile.holders < self._need(fold) if fold.count else tile.weight == 0
            of = _Rows(tile.sums, tile.weight, before[tile.rows], stays, whole[tile.rows])
            if self.blend or (delta and is_variance(name)):
                finite = self._blend(fold, name, of, delta)
            else:
                finite = _divide(fold.loops, of, delta)
            if not finite:
                fold.blame(name)
                if not is_finite(of.new):
                    raise AggregationError(
                        f"tensor {name!r}: the aggregate left the range of {old.dtype}; clip the updates"
                    )
        return new

    def _blend(self, fold: Fold, name: str, of: _Rows, delta: bool) -> bool:
        """The new values of a tile; whether the sums and they are finite."""
        finite = is_finite(of.total)
        mean = np.divide(of.total, of.weight[..., None], out=of.total)
        if delta:
            mean = not_below(name, np.add(mean, of.old, out=mean))
        if self.blend:
            # lerp is exact at 1, so that a coordinate which all hold is the plain mean.
            mean = lerp(of.old.astype(np.float64), mean, of.weight[..., None] / fold.total)
        of.new[...] = cast(mean, of.old.dtype)
        if of.stays.any():
            np.copyto(of.new, of.old, where=of.stays[..., None])
        return finite and is_finite(of.new)


def _divide(loops: RowSums, of: _Rows, delta: bool) -> bool:
    """The quotient, column by column of each row, or all at once where one value divides all; whether the sums and it
    are finite."""
    rows = (of.weight.size, of.total.size // max(1, of.weight.size))
    weight, stays = of.weight.reshape(-1), of.stays.reshape(-1)
    total, old, new = (value.reshape(rows) for value in (of.total, of.old, of.new))
    return loops.mean_rows(total, weight, old, stays, delta, new)
