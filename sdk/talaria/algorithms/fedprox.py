"""FedProx: FedAvg whose local steps are pulled back to the received model (Li et al., MLSys 2020).

min F_k(w) + μ/2 ‖w − wᵗ‖²: the step is w ← w − η (∇F_k(w) + μ (w − wᵗ)), where wᵗ is what was received, detached.
The pull is added to the gradient, so that momentum sees it. Confirmed from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.hparams import Weighed, at_least, check, off
from talaria.algorithms.sharing import update
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors, only
from talaria.training.engine import train
from talaria.training.interface import Task
from talaria.training.objectives import Pull
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class FedProx:
    """``mu`` is the strength of the pull; 0 would be FedAvg. The paper draws devices in proportion to their samples and
    averages them uniformly (``weighting="uniform"``); here all are as likely to be drawn, and weighed by samples."""

    mu: Annotated[float, at_least(0), off(0, "makes it FedAvg")] = 0.1
    weighting: Weighed = "samples"
    allow_degenerate: bool = False

    card: ClassVar[Card] = Card(
        name="fedprox",
        title="FedProx",
        shares="body, adapters, head",
        keeps="nothing",
        serves="the shared model",
        source="Li et al., MLSys 2020, arXiv:1812.06127",
        evidence="confirmed",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def aggregator(self) -> Aggregator:
        return MaskedMean(weighting=self.weighting)

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        return FedAvg().init(model, split)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        pull = Pull(shared, self.mu) if self.mu else None
        state = train(task, {**shared, **private}, pull=pull)
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        return FedAvg().personal(task, shared, private)
