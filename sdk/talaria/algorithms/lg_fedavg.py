"""LG-FedAvg: each device learns its own representation, the small top is shared (Liang et al., 2020).

The mirror image of FedPer: body and adapters never leave the device, the head is averaged, both are trained together
in one joint step per batch. Confirmed from the paper and the authors' code (whose CIFAR-10 split is reversed).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from talaria.aggregate.base import Aggregator
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.base import Card
from talaria.algorithms.hparams import Epochs, Weighed, check
from talaria.algorithms.sharing import parted, update
from talaria.errors import ModelError
from talaria.model.split import Split
from talaria.tensors import Tensors, only
from talaria.training.loop import ready, served, train
from talaria.types import Task, Update


@dataclass(frozen=True, kw_only=True)
class LGFedAvg:
    """``join_epochs`` train a body of its own under the frozen head on a device that never took part.

    The authors weigh devices uniformly. Where inputs come from an unknown device, serve :func:`ensemble`.
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

    def init(self, model: Module, split: Split) -> tuple[Tensors, Tensors]:
        return parted(model, split, "head")

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        state = train(task, {**shared, **private})
        return update(task, state, shared), only(state, private)

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Module:
        state = {**shared, **private}
        if task.newcomer:
            recipe = task.recipe.but(epochs=self.join_epochs, steps=None)
            own = task.split.of("body", "adapters")
            state = train(task, ready(task, state), only=own, recipe=recipe, purpose="join")
        return served(task, state)


class Ensemble(Module):
    """Log of the mean class probability of its members: inputs (N, ...) to (N, classes)."""

    def __init__(self, members: Iterable[Module]) -> None:
        super().__init__()
        self.members = ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([member(x).log_softmax(1) for member in self.members])
        return each.logsumexp(0) - math.log(len(self.members))


def ensemble(models: Iterable[Module]) -> Module:
    """One model from many, in eval mode: the mean of their class probabilities, given as logits (their logarithm).

    For inputs of an unknown device (section 3 of the paper). Raises :class:`ModelError` without any model.
    """
    out = Ensemble(models)
    if not out.members:
        raise ModelError("ensemble: no models; give at least one personal model")
    return out.eval()
