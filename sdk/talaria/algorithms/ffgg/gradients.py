"""The gradient of the body over all local samples."""

import numpy as np

from talaria.tensors import Tensors, spread
from talaria.training import augment
from talaria.training.batching import at_once
from talaria.training.engine import gradient
from talaria.training.interface import Task
from talaria.training.objectives import Objective, share_of
from talaria.types import Samples

CHUNK = 1024
"""Samples whose gradient is taken at once, at most."""


def body_gradient(task: Task, state: Tensors, objective: Objective) -> Tensors:
    """g_i = ∇_θ f_i(θ, w_i): the mean over all training samples, each augmented by one draw; nothing of what the recipe
    freezes."""
    body = task.recipe.trained(task.split.keys, task.split.of("body")) or ()
    if not {*task.split.parameters("body")}.intersection(body):
        return {}
    change, draws = augment.get(task.recipe.augment), task.draws("gradient")
    total: Tensors = {}
    for index in spread(len(task.train), at_once(task, CHUNK)):
        piece = task.train.take(index)
        piece = Samples(change(piece.x, draws), piece.y)
        part = gradient(task, state, only=body, samples=piece, objective=objective)
        share = share_of(objective, piece.y, task.train.y)
        total = {k: np.asarray(share * g + total[k] if total else share * g) for k, g in part.items()}
    return total
