"""FedBABU: the body is learned under one random head that nobody ever trains (Oh, Kim, Yun, ICLR 2022).

In the rounds only the body (with its adapters) is trained and travels. The head is part of the run's common initial
weights, so it is the same on every device and costs no byte. After the last round each device fine-tunes for itself.
Confirmed from the paper and the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import Tune, tuned
from talaria.algorithms.hparams import Epochs, Weighed, above, check, off
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import ready, served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedBABU:
    """``tune`` names what is fine-tuned, for ``tune_epochs`` at ``tune_rate`` times the recipe's learning rate.

    The authors weigh devices uniformly.
    """

    tune: Tune = "full"
    tune_epochs: Annotated[Epochs, off(0, "serves a head that was never trained")] = 5
    tune_rate: Annotated[float, above(0)] = 0.01
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="fedbabu",
        title="FedBABU",
        shares="body, adapters",
        keeps="the common head, untouched",
        serves="the shared body and the common head after local fine-tuning",
        source="Oh et al., ICLR 2022, arXiv:2106.06042",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body", "adapters")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private}, only=task.split.of("body", "adapters"))
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = ready(task, {**shared, **private})
        return served(task, tuned(task, state, self.tune, self.tune_epochs, self.tune_rate * task.recipe.lr))
