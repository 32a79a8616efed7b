"""FedAvg-FT: FedAvg, then each device fine-tunes the shared model once on its own data; the result stays there.

Two variants that must be named: ``tune="full"`` trains everything, ``tune="head"`` freezes the body (the form in
the tables of Collins et al., ICML 2021). The shared model is never changed by fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.finetune import Tune, TuneOn, tuned
from talaria.algorithms.hparams import Epochs, Rate, check
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors
from talaria.training.engine import ready, served
from talaria.types import Task, Update


@dataclass(frozen=True, kw_only=True)
class FedAvgFT:
    """FedAvg in the rounds; ``tune_epochs`` of SGD at ``tune_lr`` (0: the recipe's) in ``personal``."""

    tune: Tune = "full"
    tune_epochs: Epochs = 5
    tune_lr: Rate = 0.0
    """0 takes the recipe's learning rate."""
    tune_on: TuneOn = "train"
    """"all" learns from the validation samples too."""
    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="fedavg_ft",
        title="FedAvg with fine-tuning",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model after local fine-tuning",
        source="Collins et al., ICML 2021, arXiv:2102.07078, section 6 (baseline)",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return FedAvg().init(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        return FedAvg().fit(task, shared, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        state = ready(task, {**shared, **private})
        return served(task, tuned(task, state, self.tune, self.tune_epochs, self.tune_lr, self.tune_on))
