"""FedBuff: asynchronous training with a buffer (Nguyen et al., AISTATS 2022)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from talaria import tensors
from talaria.aggregate.arithmetic import cast
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import ANSWERED
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed
from talaria.aggregate.robust.stacked_updates import RowRule
from talaria.aggregate.validation import check, check_count, check_range, is_finite, not_below, trained
from talaria.aggregate.wrappers import INNER, Wrapper, check_inner, innermost
from talaria.errors import AggregationError, ConfigError
from talaria.model import masks
from talaria.tensors import Array, Tensors, is_float
from talaria.types import Update, as_delta

VERSION = "version"
"""Name of the counter of changes to the shared state, int64."""


@dataclass(frozen=True, kw_only=True)
class FedBuff:
    """What a full buffer makes: ``inner`` folds the updates of ``capacity`` clients into one step. Who keeps the buffer
    (a coordinator, or a simulation) decides what is in it, one update of each client, and says when it is full.

    - ``a``: an update that trained ``late`` versions ago counts ``s = (1 + late)^-a``; 0 turns that off.
    - ``normalise``: ``"damped"``, as in the paper, ``sum(s n D) / sum(n)``, so that an old buffer moves less; or
      ``"convex"``, ``sum(s n D) / sum(s n)``. Under a robust ``inner``, damped scales the rows and convex the weights,
      which only a rule with ``weighting="samples"`` uses (RFA wants that form).
    - ``max_staleness``: an update further behind is refused.
    - ``lr``: server learning rate; the step of ``inner`` times it.

    Updates are differences to the version that the device had downloaded
    (:func:`~talaria.types.as_delta`); values are taken only from clients at the present version.

    State: ``version`` (changes of the shared state so far, 0 at first; a client's ``base_version`` is the version that
    it downloaded), and ``inner``'s under ``inner/``.

    Raises :class:`~talaria.errors.ConfigError` where ``capacity`` is smaller than ``inner``'s ``f`` or
    ``min_holders`` need: fast attackers fill a buffer first.
    """

    inner: Aggregator = field(default_factory=MaskedMean)
    capacity: int = 10
    a: float = 0.5
    normalise: Literal["damped", "convex"] = "damped"
    max_staleness: int = 20
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_inner("fedbuff", self.inner)
        check_count("fedbuff", "capacity", self.capacity, 1)
        check_range("fedbuff", "a", self.a, 0, 10)
        check_count("fedbuff", "max_staleness", self.max_staleness, 0)
        check_range("fedbuff", "lr", self.lr, 0, float("inf"), "()")
        if self.normalise not in ("damped", "convex"):
            raise ConfigError(f"fedbuff: normalise={self.normalise!r} is unknown; use 'damped' or 'convex'")
        rule = innermost(self.inner)
        if self.normalise == "convex" and self.a > 0 and getattr(rule, "weighting", None) != "samples":
            raise ConfigError(
                f"fedbuff with normalise='convex': inner={type(rule).__name__} ignores weights, so that old updates "
                "would count in full; use one with weighting='samples'"
            )
        need = least(self.inner)
        if self.capacity < need:
            raise ConfigError(
                f"fedbuff: capacity={self.capacity} must be at least {need}, which inner's f or min_holders needs"
            )

    def init(self, shared: Tensors) -> Tensors:
        """Version 0."""
        return {VERSION: np.array(0, np.int64)} | tensors.prefixed(self.inner.init(shared), INNER)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """One step from what the buffer holds, in order of clients, one update of each; one update is in memory at a
        time where ``inner`` allows it.

        Raises :class:`~talaria.errors.AggregationError` for a second update of a client, for one too old, and where
        there is none at all: a version must come of it.
        """
        version, count, last = int(state[VERSION]), 0, ""

        def rows() -> Iterator[Update]:
            nonlocal count, last
            for update in updates:
                check(shared, update)
                late = staleness(update, version)
                if late > self.max_staleness:
                    raise AggregationError(
                        f"update of client {update.client!r}: {late} versions behind; "
                        f"at most {self.max_staleness} count"
                    )
                if count and update.client <= last:
                    raise AggregationError(
                        f"update of client {update.client!r} came after {last!r}; sort them, one of each client"
                    )
                count, last = count + 1, update.client
                yield self._weighed(_compared(shared, update, version), late)

        new, inner = self.inner.apply(shared, tensors.under(state, INNER), rows())
        if not count:
            raise AggregationError("fedbuff: no update to fold; wait until the buffer holds some")
        kept = tensors.without(dict(state), INNER) | {VERSION: np.array(version + 1, np.int64)}
        return self._paced(shared, new), kept | tensors.prefixed(inner, INNER)

    def _paced(self, shared: Tensors, new: Tensors) -> Tensors:
        if self.lr == 1.0:
            return new
        return new | {k: _scaled(k, shared[k], new[k], self.lr) for k in trained(shared)}

    def _weighed(self, update: Update, late: int) -> Update:
        s = discount(late, self.a)
        if self.normalise == "convex":
            return update.but(weight=update.weight * s)
        floats = {k: np.asarray(v * s) for k, v in update.tensors.items() if is_float(v)}
        return update.but(tensors=update.tensors | floats)


def least(aggregator: Aggregator) -> int:
    """The fewest updates that ``aggregator`` folds without an error, and of which a coordinate can move."""
    if isinstance(aggregator, Bucketed):
        return (least(aggregator.inner) - 1) * aggregator.size + 1
    if isinstance(aggregator, Wrapper):
        return least(aggregator.inner)
    if isinstance(aggregator, RowRule):
        return max(aggregator.least, aggregator.min_holders or 1)
    return aggregator.min_holders if isinstance(aggregator, MaskedMean) else 1


def discount(late: int, a: float) -> float:
    """``(1 + late)^-a``: 1 for a fresh update."""
    return float((1.0 + late) ** -a)


def staleness(update: Update, version: int) -> int:
    """Versions between what the update trained on and ``version``."""
    if not 0 <= update.base_version <= version:
        raise AggregationError(
            f"update of client {update.client!r}: base_version={update.base_version} must be a version within "
            f"0..{version}, the shared state's; send the version that was downloaded"
        )
    return version - update.base_version


def _compared(shared: Tensors, update: Update, version: int) -> Update:
    """The update as a difference to what the device had downloaded."""
    if update.kind == "value" and update.base_version != version:
        raise AggregationError(
            f"update of client {update.client!r}: values of version {update.base_version} cannot be compared with "
            f"version {version}; send kind='delta', the difference to what was downloaded"
        )
    return as_delta(
        update, masks.gathered(shared, update.tensors, update.mask) if update.kind == "value" else {}, ANSWERED
    )


@np.errstate(over="ignore", invalid="ignore")
def _scaled(name: str, old: Array, new: Array, lr: float) -> Array:
    moved = cast(not_below(name, np.asarray(old + lr * (new.astype(np.float64) - old))), old.dtype)
    if not is_finite(moved):
        raise AggregationError(f"tensor {name!r}: the step left the range of {old.dtype}; lower lr")
    return np.where(new == old, old, moved)
