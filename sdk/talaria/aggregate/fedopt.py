"""An optimizer on the server: the step that ``inner`` would take is a pseudo-gradient (Reddi et al., ICLR 2021).

Coordinates that ``inner`` leaves exactly as they were (pruned away by all, too few holders, an unfilled buffer) stay,
and so do their moments: a sparse optimizer, so that "nobody held it: unchanged" survives the wrapping. Running
statistics and counters take ``inner``'s value.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from talaria import tensors
from talaria.aggregate.arithmetic import cast, lerp
from talaria.aggregate.base import Aggregator
from talaria.aggregate.validation import check_range, is_finite, is_statistic, trained
from talaria.aggregate.wrappers import INNER, check_inner
from talaria.errors import AggregationError
from talaria.tensors import Array, Tensors
from talaria.types import Update

MOMENTUM, VARIANCE = "momentum/", "variance/"


@dataclass(frozen=True, kw_only=True)
class ServerMomentum:
    """FedAvgM (Hsu et al., 2019): ``m <- beta m + step;  G <- G + lr m``."""

    inner: Aggregator
    beta: float = 0.9
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_inner("server momentum", self.inner)
        check_range("server momentum", "beta", self.beta, 0, 1, "()")
        check_range("server momentum", "lr", self.lr, 0, float("inf"), "()")

    def init(self, shared: Tensors) -> Tensors:
        """``momentum/<name>``, zero and of the tensor's dtype, and the state of ``inner`` under ``inner/``."""
        own = {MOMENTUM + k: np.zeros_like(shared[k]) for k in _stepped(shared)}
        return own | tensors.prefixed(self.inner.init(shared), INNER)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state and moments."""

        def step(own: Tensors, name: str, delta: Array) -> tuple[Array, Tensors]:
            m = own[MOMENTUM + name].astype(np.float64) * self.beta + delta
            return self.lr * m, {MOMENTUM + name: m}

        return _stepping(self.inner, shared, state, updates, step)


@dataclass(frozen=True, kw_only=True)
class ServerAdam:
    """FedAdam: ``m <- b1 m + (1-b1) d;  v <- b2 v + (1-b2) d^2;  G <- G + lr m / (sqrt(v) + tau)``, with step ``d``.

    ``v`` starts at ``tau^2`` and there is no bias correction, as in the paper; ``tau`` bounds how much a small step
    is magnified.
    """

    inner: Aggregator
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_inner("server adam", self.inner)
        check_range("server adam", "lr", self.lr, 0, float("inf"), "()")
        check_range("server adam", "beta1", self.beta1, 0, 1, "[)")
        check_range("server adam", "beta2", self.beta2, 0, 1, "[)")
        check_range("server adam", "tau", self.tau, 0, float("inf"), "()")

    def init(self, shared: Tensors) -> Tensors:
        """``momentum/<name>``, ``variance/<name>``, of the tensor's dtype, and the state of ``inner``."""
        own = {}
        for k in _stepped(shared):
            own[MOMENTUM + k] = np.zeros_like(shared[k])
            own[VARIANCE + k] = np.full_like(shared[k], self.tau**2)
        return own | tensors.prefixed(self.inner.init(shared), INNER)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state and moments."""

        def step(own: Tensors, name: str, delta: Array) -> tuple[Array, Tensors]:
            m = lerp(own[MOMENTUM + name].astype(np.float64), delta, 1 - self.beta1)
            v = lerp(own[VARIANCE + name].astype(np.float64), np.square(delta), 1 - self.beta2)
            return self.lr * m / (np.sqrt(v) + self.tau), {MOMENTUM + name: m, VARIANCE + name: v}

        return _stepping(self.inner, shared, state, updates, step)


def _stepped(shared: Tensors) -> tuple[str, ...]:
    return tuple(k for k in trained(shared) if not is_statistic(k))


def _stepping(
    inner: Aggregator,
    shared: Tensors,
    state: Tensors,
    updates: Iterable[Update],
    step: Callable[[Tensors, str, Array], tuple[Array, Tensors]],
) -> tuple[Tensors, Tensors]:
    new, kept = inner.apply(shared, tensors.under(state, INNER), updates)
    out = tensors.copied(tensors.without(state, INNER)) | tensors.prefixed(kept, INNER)
    for name in _stepped(shared):
        old = shared[name]
        moved = new[name] != old
        if not np.any(moved):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.asarray(new[name].astype(np.float64) - old)
            move, moments = step(state, name, delta)
            new[name] = np.where(moved, cast(old + move, old.dtype), old)
        if not is_finite(new[name]):
            raise AggregationError(f"tensor {name!r}: the step left the range of {old.dtype}; lower lr")
        out |= {k: np.where(moved, cast(v, out[k].dtype), out[k]) for k, v in moments.items()}
    return new, out
