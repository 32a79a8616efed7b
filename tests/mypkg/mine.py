"""An algorithm and a server rule that Talaria does not have."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, ClassVar

import numpy as np
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import check, within
from talaria.algorithms.local_only import LocalOnly
from talaria.algorithms.sharing import WHOLE, parted, update
from talaria.errors import ConfigError
from talaria.model import masks
from talaria.model.split import Split
from talaria.tensors import Tensors, is_float, only
from talaria.training.engine import ready, served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedHalf:
    """FedAvg whose devices go only the share ``pull`` of the way that they trained."""

    pull: Annotated[float, within("(0, 1]")] = 0.5

    card: ClassVar[Card] = Card(
        name="fedhalf",
        title="FedHalf",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model",
        source="this test",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean()

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, *WHOLE)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        state |= {k: np.asarray(state[k] - (1 - self.pull) * (state[k] - v)) for k, v in shared.items() if is_float(v)}
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        return served(task, ready(task, {**shared, **private}))


@dataclass(frozen=True, kw_only=True)
class Hermit(LocalOnly):
    """Another that shares nothing."""

    card: ClassVar[Card] = replace(LocalOnly.card, name="hermit")


@dataclass(frozen=True, kw_only=True)
class First:
    """The mean of the first ``f`` updates."""

    f: int = 1

    def __post_init__(self) -> None:
        if self.f < 1:
            raise ConfigError(f"first: f={self.f!r} must be at least 1")

    def init(self, shared: Tensors) -> Tensors:
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        return MaskedMean().apply(shared, state, islice(updates, self.f))


class NoFit:
    """Not an algorithm: it cannot fit."""

    card = FedHalf.card
    aggregator = MaskedMean()
    init = FedHalf.init
    personal = FedHalf.personal


class NoCard:
    """Not an algorithm: nobody knows what it shares."""

    aggregator = MaskedMean()
    init, fit, personal = FedHalf.init, FedHalf.fit, FedHalf.personal


class Forgetful(NoCard):
    """Not an algorithm: it could keep state."""

    card = FedHalf.card


HALF = FedHalf(pull=0.25)
borrowed = masks
