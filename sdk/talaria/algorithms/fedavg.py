"""FedAvg: every device trains the shared model, the coordinator averages (McMahan et al., AISTATS 2017).

w_k ← SGD(w; D_k, E);  w ← Σ n_k w_k / Σ n_k. Confirmed from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.sharing import WHOLE, parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import ready, served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """One model for all. With ``buffers="local"`` each device keeps its own BatchNorm statistics (FedBN)."""

    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="fedavg",
        title="FedAvg",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model",
        source="McMahan et al., AISTATS 2017, arXiv:1602.05629",
        evidence="confirmed",
    )

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, *WHOLE)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        return served(task, ready(task, {**shared, **private}))
