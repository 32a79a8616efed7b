"""Three disjoint batches (D, D', D'') per step, from one device's training samples."""

from collections.abc import Iterator

import numpy as np

from talaria.seeds import Draws
from talaria.tensors import Array
from talaria.training import augment
from talaria.training.batching import batches, steps_of
from talaria.training.interface import Task

Batch = tuple[Array, Array]
"""Inputs (B, ...) and labels (B,)."""


def triples(task: Task) -> Iterator[tuple[Batch, Batch, Batch]]:
    """``(D, D', D'')`` for each step of the recipe. D' is the batch that plain training would take; each of the three
    draws its samples and their augmentation by draws of its own."""
    inner, outer, curve = task.draws("train/inner"), task.draws("train"), task.draws("train/curve")
    change, count, size = augment.get(task.recipe.augment), len(task.train), task.recipe.batch
    for second in batches(count, third(count, size), steps_of(task.recipe, count), outer):
        first, last = apart(count, second, size, inner)
        one, two, three = (
            (change(task.train.x[index], draws), task.train.y[index])
            for index, draws in ((first, inner), (second, outer), (last, curve))
        )
        yield one, two, three


def third(count: int, size: int) -> int:
    """The batch size that leaves room for two more such batches beside it."""
    return min(size, max(1, count // 3))


def apart(count: int, taken: Array, size: int, draws: Draws) -> tuple[Array, Array]:
    """Two more index batches of at most ``size``, disjoint from each other and from ``taken``.

    With one sample left both are that one; with none, both are ``taken``.
    """
    rest = np.ones(count, bool)
    rest[taken] = False
    left = np.flatnonzero(rest)
    if len(left) < 2:
        lone = left if len(left) else taken
        return lone, lone
    left = left[draws.order(len(left))]
    half = min(size, len(left) // 2)
    return left[:half], left[half : 2 * half]
