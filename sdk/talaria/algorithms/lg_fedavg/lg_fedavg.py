"""LG-FedAvg: each device learns its own representation, the small top is shared (Liang et al., 2020).

The mirror image of FedPer: body and adapters never leave the device, the head is averaged, both are trained together
in one joint step per batch. Confirmed from the paper and the authors' code (whose CIFAR-10 split is reversed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import Epochs, Weighed, check
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import ready, served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class LGFedAvg:
    """``join_epochs`` train a body of its own under the frozen head on a device that never took part.

    The authors weigh devices uniformly. Where inputs come from an unknown device, serve their
    :func:`~talaria.algorithms.lg_fedavg.ensemble.ensemble`.
    """

    join_epochs: Epochs = 10
    weighting: Weighed = "samples"

    card: ClassVar[Card] = Card(
        name="lg_fedavg",
        title="LG-FedAvg",
        shares="head",
        keeps="body, adapters",
        serves="its own body with the shared head",
        source="Liang et al., 2020, arXiv:2001.01523",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "head")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = {**shared, **private}
        if task.newcomer:
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            own = task.split.of("body", "adapters")
            state = train(task, ready(task, state), only=own, recipe=recipe, purpose="join")
        return served(task, state)
