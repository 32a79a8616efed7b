"""FedBABU: the body is learned under one random head that nobody ever trains (Oh, Kim, Yun, ICLR 2022).

In the rounds only the body (with its adapters) is trained and travels. The head is part of the run's common initial
weights, so it is the same on every device and costs no byte. After the last round each device fine-tunes for itself.
Confirmed from the paper and the authors' code.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.validation import Weighting, check_weighting
from talaria.algorithms.card import Card
from talaria.algorithms.parts import parted, refuse_neutral, require, update
from talaria.algorithms.tuning import TUNES, tuned
from talaria.tensors import only
from talaria.training.loop import ready, served, train
from talaria.types import Split, Task, Tensors, Update


@dataclass(frozen=True, kw_only=True)
class FedBABU:
    """``tune`` names what is fine-tuned, for ``tune_epochs`` at ``tune_rate`` times the recipe's learning rate.

    The authors weigh devices uniformly.
    """

    tune: str = "full"
    tune_epochs: int = 5
    tune_rate: float = 0.01
    weighting: Weighting = "samples"
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
        check_weighting("fedbabu", self.weighting)
        require(
            "fedbabu",
            tune=(self.tune in TUNES, self.tune, f"must be one of {sorted(TUNES)}"),
            tune_epochs=(self.tune_epochs >= 0, self.tune_epochs, "must be at least 0"),
            tune_rate=(0 < self.tune_rate < float("inf"), self.tune_rate, "must be finite and above 0"),
        )
        tunes = self.tune_epochs > 0 or self.allow_degenerate
        refuse_neutral("fedbabu", "tune_epochs", self.tune_epochs, "serves a head that was never trained", tunes)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body", "adapters")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private}, only=task.split.of("body", "adapters"))
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state = ready(task, {**shared, **private})
        return served(task, tuned(task, state, self.tune, self.tune_epochs, self.tune_rate * task.recipe.lr))
