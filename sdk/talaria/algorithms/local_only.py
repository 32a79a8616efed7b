"""Local: each device learns alone from the common start; nothing travels. The baseline that others must beat.

A device that took part in no round (a newcomer, or one that was never drawn) trains before it is served as all rounds
would have trained it: the same model to the bit, under a constant rate, as that of a member that every round asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors
from talaria.training.engine import served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class LocalOnly:
    """θ_k ← SGD(θ_k; D_k, E) in every round, with as many local steps as the federated runs take."""

    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="local",
        title="Local only",
        shares="nothing",
        keeps="body, adapters, head",
        serves="its own model",
        source="baseline",
        evidence="confirmed",
    )

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, ()), state

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = {**shared, **private}
        for number in range(1, task.round + 1) if task.newcomer else ():
            state = train(task.but(round=number), state)
        return served(task, state)
