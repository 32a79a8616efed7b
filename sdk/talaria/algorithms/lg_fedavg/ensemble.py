"""One model from many, for inputs of an unknown device (section 3 of the paper)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from talaria.errors import ModelError


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
