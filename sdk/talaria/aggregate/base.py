"""The server half of an algorithm: a pair shaped like an optimizer, so that combinations are wrappers."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from talaria.tensors import Tensors
from talaria.types import Update


@runtime_checkable
class Aggregator(Protocol):
    """Folds updates into the shared state. Pure: nothing is kept in ``self``."""

    def init(self, shared: Tensors) -> Tensors:
        """The aggregator's own state for this shared state (momentum, a centre); ``{}`` where it has none."""
        ...

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """New ``(shared, state)``. Inputs stay untouched; the order of ``updates`` is the order of folding.

        ``shared`` is dense (global coordinates). Raises :class:`~talaria.errors.AggregationError` on unknown,
        missing or misshapen tensors and on values that are not finite.
        """
        ...
