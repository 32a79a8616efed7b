"""FedAvg-FT: FedAvg, then each device fine-tunes the shared model once on its own data; the result stays there.

Two variants that must be named: ``tune="full"`` trains everything, ``tune="head"`` freezes the body (the form in
the tables of Collins et al., ICML 2021). The shared model is never changed by fine-tuning.

``mix`` below 1 serves a point on the way from the shared model to the tuned one (Wortsman et al., CVPR 2022,
arXiv:2109.01903): with few labels fine-tuning learns their noise too, and half of the way has less of it.

Tuning the body moves BatchNorm to the few labelled samples. Where a newcomer has unlabelled ones and statistics of its
own, they are estimated anew on all of them before it is served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.finetune import TUNES, Tune, TuneOn, between, labelled, tuned
from talaria.algorithms.hparams import Epochs, Rate, check, within
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors
from talaria.training.engine import calibrate, ready, served
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedAvgFT:
    """FedAvg in the rounds; ``tune_epochs`` of SGD at ``tune_lr`` (0: the recipe's) in ``personal``."""

    tune: Tune = "full"
    tune_epochs: Epochs = 5
    tune_lr: Rate = 0.0
    """0 takes the recipe's learning rate."""
    tune_on: TuneOn = "train"
    """"all" learns from the validation samples too."""
    mix: Annotated[float, within("[0, 1]", ": the share of the way to the tuned model")] = 1.0
    """0 serves the shared model, 1 the tuned one."""
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
        own = tuned(task, state, self.tune, self.tune_epochs, self.tune_lr, self.tune_on)
        own = own if self.mix == 1 else between(state, own, self.mix)
        moved = task.split.buffers == "local" and "body" in TUNES[self.tune]
        if task.newcomer and moved and task.unlabelled is not None and len(task.unlabelled):
            own = calibrate(task, own, labelled(task, self.tune_on))
        return served(task, own)
