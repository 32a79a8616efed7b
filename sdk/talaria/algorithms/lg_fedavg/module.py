"""The ensemble in torch, as one network that can be exported."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module, ModuleList


class Ensemble(Module):
    """Log of the mean class probability of its members: inputs (N, ...) to (N, classes)."""

    def __init__(self, members: Iterable[Module]) -> None:
        super().__init__()
        self.members = ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([member(x).log_softmax(1) for member in self.members])
        return each.logsumexp(0) - math.log(len(self.members))
