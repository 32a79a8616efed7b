"""Local: each device learns alone from the common start; nothing travels. The baseline that others must beat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.tensors import Tensors
from talaria.training.engine import served, train
from talaria.types import Task, Update

if TYPE_CHECKING:
    from torch.nn import Module


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

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, ()), state

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        return served(task, {**shared, **private})
