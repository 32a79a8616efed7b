"""FedRep: labels differ, the representation is common (Collins et al., ICML 2021).

Each round the device first fits its head to the received body, which stands perfectly still (A), then moves the body
by a few steps under the fixed head with a new optimizer (B), and uploads the body alone. Before it is served, every
device fits its head once more to the latest body. Confirmed from the paper and the authors' code.
All devices begin from the run's one initial head.

Both phases draw the same shuffles as plain training, so that each alone is Local or FedBABU bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import joined
from talaria.algorithms.hparams import Epochs, Weighed, check, off
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import ready, served, train, train_upper
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedRep:
    """``head_epochs`` and ``body_epochs`` stand in for the recipe's epochs and steps; ``final_epochs`` fit the head
    before it is served (a device that never took part takes ``head_epochs``). The authors weigh devices uniformly
    on CIFAR."""

    head_epochs: Annotated[Epochs, off(0, "never fits the head")] = 10
    body_epochs: Annotated[Epochs, off(0, "never learns a body")] = 1
    final_epochs: Epochs = 10
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="fedrep",
        title="FedRep",
        shares="body",
        keeps="adapters, head",
        serves="shared body with its own head, fitted once more",
        source="Collins et al., ICML 2021, arXiv:2102.07078",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = self._head_fitted(task, {**shared, **private}, self.head_epochs, "train")
        body = task.recipe.but(epochs=self.body_epochs, steps=None)
        state = train(task, state, only=task.split.of("body"), recipe=body)
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = {**shared, **private}
        if task.newcomer:
            return served(task, joined(task, state, self.head_epochs))
        return served(task, self._head_fitted(task, state, self.final_epochs, "tune"))

    def _head_fitted(self, task: Task, state: Tensors, epochs: int, purpose: str) -> Tensors:
        if not epochs:
            return state
        head = task.split.of("adapters", "head")
        # A frozen body needs statistics of this device's inputs: on the first day it has none.
        state = ready(task, state)
        recipe = task.recipe.but(epochs=epochs, steps=None)
        return train_upper(task, state, only=head, recipe=recipe, purpose=purpose)
