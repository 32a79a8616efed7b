"""Wrappers that change the updates on their way into another aggregator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from talaria.aggregate.arithmetic import cast
from talaria.aggregate.base import Aggregator
from talaria.aggregate.validation import check, check_range, is_statistic
from talaria.errors import ConfigError
from talaria.model import masks
from talaria.tensors import Tensors, is_float
from talaria.types import Update

INNER = "inner/"
"""Prefix of the wrapped aggregator's state."""


@runtime_checkable
class Wrapper(Protocol):
    """An aggregator around another."""

    @property
    def inner(self) -> Aggregator:
        """The aggregator that does the folding."""
        ...


def chain(aggregator: Aggregator) -> Iterator[Aggregator]:
    """The aggregator and all within it, from the outermost."""
    yield aggregator
    while isinstance(aggregator, Wrapper):
        aggregator = aggregator.inner
        yield aggregator


def innermost(aggregator: Aggregator) -> Aggregator:
    """The aggregator within all wrappers."""
    *_, last = chain(aggregator)
    return last


def check_inner(owner: str, inner: object) -> None:
    """Refuse what is no aggregator."""
    if isinstance(inner, type) or not isinstance(inner, Aggregator):
        raise ConfigError(f"{owner}: inner={inner!r} is not an aggregator; give one, such as MaskedMean()")


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """Each update is pulled towards the shared state until its step has an L2 norm of at most ``norm``.

    The norm is over the weights that the client sent; running statistics do not count, but shrink alike. An update
    within the bound passes bit for bit.
    """

    inner: Aggregator
    norm: float

    def __post_init__(self) -> None:
        check_inner("clipped", self.inner)
        check_range("clipped", "norm", self.norm, 0, float("inf"), "()")

    def init(self, shared: Tensors) -> Tensors:
        """The state of ``inner``."""
        return self.inner.init(shared)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """What ``inner`` makes of the clipped updates."""
        return self.inner.apply(shared, state, (clipped(shared, u, self.norm) for u in updates))


@np.errstate(over="ignore", invalid="ignore")
def clipped(shared: Tensors, update: Update, norm: float) -> Update:
    """The update with its step scaled down to ``norm``, where it is longer."""
    check(shared, update)
    base = {} if update.kind == "delta" else masks.gathered(shared, update.tensors, update.mask)
    steps = {
        k: v.astype(np.float64) - base[k] if base else v.astype(np.float64)
        for k, v in update.tensors.items()
        if is_float(v)
    }
    length = sum(float(np.square(v).sum()) for k, v in steps.items() if not is_statistic(k)) ** 0.5
    if length <= norm:
        return update
    short = {k: v * (norm / length) for k, v in steps.items()}
    tensors = {k: cast(v + base[k] if base else v, update.tensors[k].dtype) for k, v in short.items()}
    return update.but(tensors=update.tensors | tensors)
