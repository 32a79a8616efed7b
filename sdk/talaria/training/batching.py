"""What a training loop is fed: batches in a seeded order, augmented, and the draws of dropout."""

from collections.abc import Iterator
from copy import copy

import numpy as np
import torch
from torch import Generator, Tensor

from talaria.model.state import array_of, tensor_of
from talaria.tensors import Array
from talaria.training import augment
from talaria.types import Recipe, Samples, Task


def feed(task: Task, recipe: Recipe, samples: Samples, purpose: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
    """The batches ``(x, y)`` of one training: shuffled and augmented by the draws of ``purpose``, as many as the
    recipe says."""
    draws = task.generator(purpose)
    change, where = augment.get(recipe.augment), next(iter(task.model.parameters()), torch.empty(0)).device
    for index in batches(len(samples), recipe.batch, steps_of(recipe, len(samples)), draws):
        x = change(tensor_of(samples.x[index]), draws)
        yield x.to(where), tensor_of(samples.y[index]).to(where)


def steps_of(recipe: Recipe, count: int) -> int:
    """Optimizer steps that the recipe takes on ``count`` samples; none without samples."""
    if not count:
        return 0
    wanted = recipe.steps if recipe.steps is not None else recipe.epochs * len(cut(np.arange(count), recipe.batch))
    return wanted if recipe.most_steps is None else min(wanted, recipe.most_steps)


def batches(count: int, size: int, steps: int, draws: Generator) -> Iterator[Array]:
    """``steps`` index batches, a new shuffle each epoch. The last, smaller batch of an epoch is kept; a single
    sample left over joins the batch before it, because a batch of one has no variance for BatchNorm."""
    done = 0
    while done < steps and count:
        order = array_of(torch.randperm(count, generator=draws))
        for index in cut(order, size):
            yield index
            done += 1
            if done == steps:
                return


def cut(order: Array, size: int) -> list[Array]:
    """``order`` in pieces of ``size``; the last is smaller, and never a single sample beside others."""
    pieces = [order[start : start + size] for start in range(0, len(order), size)]
    if size > 1 and len(pieces) > 1 and len(pieces[-1]) == 1:
        pieces[-2:] = [np.concatenate(pieces[-2:])]
    return pieces


class LayerDraws:
    """Dropout and the like draw from torch's global generator: inside this context from a stream of its own, seeded
    for one purpose, which goes on where it stopped; outside, the global stream is as it was."""

    def __init__(self, task: Task, purpose: str) -> None:
        self.stream = task.generator(purpose + "/layers").get_state()

    def copy(self) -> "LayerDraws":
        """The same draws once more, from where this stream stands."""
        return copy(self)

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.stream)

    def __exit__(self, *_: object) -> None:
        self.stream = torch.get_rng_state()
        torch.set_rng_state(self.outside)
