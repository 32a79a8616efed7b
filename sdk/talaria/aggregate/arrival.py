"""What a rule would refuse of one update, asked before any fold: the same checks, by the same functions."""

from __future__ import annotations

from talaria.aggregate import class_statistics
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import PooledStatistics
from talaria.aggregate.validation import check
from talaria.aggregate.wrappers import chain
from talaria.errors import AggregationError
from talaria.tensors import Tensors
from talaria.types import Update


def require(rule: Aggregator, shared: Tensors, update: Update) -> None:
    """Raise :class:`~talaria.errors.AggregationError`, naming the client, where ``rule`` cannot fold ``update`` into
    ``shared``. Costs one pass over the values."""
    for one in chain(rule):
        if isinstance(one, PooledStatistics):
            _require_statistics(shared, update)
            update = class_statistics.bare(update)
    check(shared, update)


def _require_statistics(shared: Tensors, update: Update) -> None:
    """All of them, and counts of no more samples than the update weighs."""
    count, _, _ = class_statistics.require(shared, update)
    for name in class_statistics.ALL:
        value = update.tensors.get(name)
        if value is None or value.shape != shared[name].shape:
            raise AggregationError(
                f"update of client {update.client!r}: tensor {name!r} is missing or not of shape "
                f"{shared[name].shape}; send all class statistics"
            )
    if update.kind == "value" and float(count.sum()) > update.weight:
        raise AggregationError(
            f"update of client {update.client!r}: its classes count {float(count.sum()):g} samples, but it was made "
            f"from {update.weight:g}"
        )
