"""One model from many, for inputs of an unknown device (section 3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from talaria.errors import ModelError
from talaria.model.weights import Model, Served
from talaria.tensors import Array
from talaria.training.objectives import log_softmax


def ensemble(models: Iterable[Model]) -> Model:
    """One model from many, in eval mode: the mean of their class probabilities, given as logits (their logarithm); of
    modules a module, of what is served where there is no torch its like.

    For inputs of an unknown device (section 3 of the paper). Raises :class:`ModelError` without any model.
    """
    members = list(models)
    if not members:
        raise ModelError("ensemble: no models; give at least one personal model")
    if not all(isinstance(one, Served) for one in members):
        from talaria.algorithms.lg_fedavg.module import Ensemble

        return Ensemble(members).eval()

    def logits(x: Array) -> Array:
        each = np.stack([log_softmax(one.logits(x)) for one in members])
        top = each.max(0)
        found: Array = top + np.log(np.exp(each - top).sum(0)) - np.float32(math.log(len(members)))
        return found

    state = {f"members.{i}.{key}": value for i, one in enumerate(members) for key, value in one.state.items()}
    learned = frozenset(f"members.{i}.{key}" for i, one in enumerate(members) for key in one.parameters)
    return Served(state, logits, learned)
