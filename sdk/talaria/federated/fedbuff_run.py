"""Asynchronous runs: the rule that makes a version of the global model from a buffer of updates, and who cannot learn
so.

A device trains from the global model it has, while others make newer ones; when ``buffer`` updates are there, one of
each device, they are folded into the next version (:class:`~talaria.aggregate.fedbuff.FedBuff`). An update says by its
``base_version`` which version it started from. Its values travel as differences to that version, so that an old update
adds what its device learned, and takes nothing back of what others did meanwhile.
"""

from dataclasses import dataclass, replace
from typing import Literal

from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import PooledStatistics
from talaria.aggregate.distill import Distilled
from talaria.aggregate.fedbuff import FedBuff, least
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.validation import check_count, check_range
from talaria.aggregate.wrappers import chain
from talaria.errors import ConfigError
from talaria.federated.rounds import rule_of
from talaria.federated.run import Run
from talaria.federated.run_model import algorithm_of


@dataclass(frozen=True, kw_only=True)
class Buffering:
    """``buffer`` updates make a version; one made ``s`` versions ago counts ``(1 + s)^-damping``, and none where ``s``
    is above ``max_staleness``. ``normalise`` as in :class:`~talaria.aggregate.fedbuff.FedBuff`."""

    buffer: int = 10
    max_staleness: int = 20
    damping: float = 0.5
    normalise: Literal["damped", "convex"] = "damped"

    def __post_init__(self) -> None:
        check_count("asynchronous run", "buffer", self.buffer, 1)
        check_range("asynchronous run", "damping", self.damping, 0, 10)
        if not isinstance(self.max_staleness, int) or self.max_staleness < 1:
            raise ConfigError(
                f"asynchronous run: max_staleness={self.max_staleness!r} must be at least 1: with 0 nothing may be "
                "late, which is what rounds in step are for"
            )
        if self.normalise not in ("damped", "convex"):
            raise ConfigError(f"asynchronous run: normalise={self.normalise!r} is unknown; use 'damped' or 'convex'")

    def require(self, members: int) -> None:
        """Raise :class:`ConfigError` where ``members`` devices can never fill the buffer."""
        if self.buffer > members:
            raise ConfigError(
                f"asynchronous run: buffer={self.buffer} never fills with {members} members, each of which has one "
                "place in it; take fewer, and leave room for devices that are away"
            )


def buffered(run: Run, buffering: Buffering, inner: Aggregator | None = None) -> FedBuff:
    """The rule of an asynchronous ``run``: a buffer around ``inner``, or around the algorithm's own rule.

    Raises :class:`ConfigError`, with the reason, where the algorithm or the rule needs all devices in step.
    """
    if inner is not None and any(isinstance(rule, FedBuff) for rule in chain(inner)):
        raise ConfigError(
            "asynchronous run: aggregator 'fedbuff' is the buffer that the run makes itself; name the rule within it, "
            "such as median, and set buffer, max_staleness and damping beside it"
        )
    rule = rule_of(replace(run, asynchronous=False), inner)
    _require_asynchronous(run, rule)
    if buffering.buffer < least(rule):
        raise ConfigError(
            f"asynchronous run: buffer={buffering.buffer} must be at least {least(rule)}, the fewest updates that the "
            "rule folds; take more, or lower its f, min_holders or m"
        )
    return FedBuff(
        inner=rule,
        capacity=buffering.buffer,
        a=buffering.damping,
        normalise=buffering.normalise,
        max_staleness=buffering.max_staleness,
    )


def _require_asynchronous(run: Run, rule: Aggregator) -> None:
    for one in chain(rule):
        reason = _against(one)
        if reason:
            raise ConfigError(f"{run.algorithm}: cannot learn asynchronously: {reason}; use rounds in step")
    if algorithm_of(run).card.shares == "nothing":
        raise ConfigError(f"{run.algorithm}: shares nothing, so that there are no versions to make; use rounds in step")


def _against(rule: Aggregator) -> str:
    match rule:
        case PooledStatistics():
            return "its class statistics are taken and pooled around one and the same global model"
        case Distilled():
            return "its distillation needs the clients' whole models, all trained from one version"
        case MaskedMean(mode="intersection"):
            return "mode='intersection' needs the masks of all devices together to know what every one kept"
        case _:
            return ""
