"""FedPer: base layers are shared, personal top layers never leave the device (Arivazhagan et al., 2019).

Both are trained together by one optimizer; the device stores its head and uploads the base. A device that did not
take part pairs the fresh base with its old head. Confirmed from the paper, but for the head's start: all devices begin
from the run's one initial head, where the paper's draw their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.finetune import joined
from talaria.algorithms.hparams import Epochs, check
from talaria.algorithms.sharing import parted, update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import served, train
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedPer:
    """``join_epochs`` train the head alone, body frozen, on a device that never took part before it is served."""

    join_epochs: Epochs = 10
    aggregator: Aggregator = field(default_factory=MaskedMean, repr=False)

    card: ClassVar[Card] = Card(
        name="fedper",
        title="FedPer",
        shares="body",
        keeps="adapters, head",
        serves="shared body with its own head",
        source="Arivazhagan et al., 2019, arXiv:1912.00818",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "body")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        return served(task, joined(task, {**shared, **private}, self.join_epochs))
