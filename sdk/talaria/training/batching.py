"""What a training loop is fed: batches in a seeded order, augmented, and the draws of dropout."""

import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from talaria.errors import ModelError, TalariaError
from talaria.seeds import Draws
from talaria.tensors import Array
from talaria.training import augment
from talaria.training.interface import Task
from talaria.types import Recipe, Samples

AT_ONCE = 100
"""Samples that a model is measured on together: maps of small images then stay in a processor's cache."""
LARGEST_CACHE = 512 << 20
"""Most bytes of features that are kept."""
_WANTED: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


def of_features(features: Array, y: Array) -> Samples:
    """Samples of what frozen layers make of others. Raises :class:`~talaria.errors.ModelError` where that is not
    finite: no sample is to blame."""
    if not np.isfinite(features).all():
        raise ModelError(
            "the model's frozen layers make NaN or infinity of the samples: its weights or statistics are too large; "
            "lower the learning rate"
        )
    return Samples(features, y)


class CalledOff(TalariaError):  # noqa: N818 - it says what is
    """What is learned is not wanted any more."""


@contextmanager
def while_wanted(asked: Callable[[], bool]) -> Iterator[None]:
    """Whatever learns within ends with :class:`CalledOff` before it begins, and before its next batch, once ``asked``
    says false: a training of very many epochs would hold its thread for ever."""
    token = _WANTED.set(asked)
    try:
        _require(asked)
        yield
    finally:
        _WANTED.reset(token)


def _require(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise CalledOff("called off: another run is to be learned by now")


def feed(task: Task, recipe: Recipe, samples: Samples, purpose: str = "train") -> Iterator[tuple[Array, Array]]:
    """The batches ``(x, y)`` of one training: shuffled and augmented by the draws of ``purpose``, as many as the
    recipe says."""
    draws, change = task.draws(purpose), augment.get(recipe.augment)
    for index in batches(len(samples), recipe.batch, steps_of(recipe, len(samples)), draws):
        yield change(samples.x.take(index, 0), draws), samples.y.take(index, 0)


def steps_of(recipe: Recipe, count: int) -> int:
    """Optimizer steps that the recipe takes on ``count`` samples; none without samples."""
    if not count:
        return 0
    full, left = divmod(count, recipe.batch)
    once = full + (left > (full > 0 and recipe.batch > 1))  # as cut has it
    wanted = recipe.steps if recipe.steps is not None else recipe.epochs * once
    return wanted if recipe.most_steps is None else min(wanted, recipe.most_steps)


def at_once(task: Task, most: int) -> int:
    """Samples that a pass with slopes over all of a device's samples holds: ``most``, or no more than a step of
    training where these had to fit in memory, by the device's plan or by slices of the recipe's."""
    planned = task.plan is not None and "train_memory_mb" in task.plan.predicted
    if not planned and task.recipe.accumulate == 1:
        return most
    return min(most, slice_of(task.recipe))


def slice_of(recipe: Recipe) -> int:
    """Samples that one pass of a step holds, at most."""
    return math.ceil(recipe.batch / recipe.accumulate)


def orders(task: Task, recipe: Recipe, count: int, purpose: str = "train") -> Iterator[Array]:
    """The rows (int64) of each batch of :func:`feed` over ``count`` samples, where nothing is augmented."""
    return batches(count, recipe.batch, steps_of(recipe, count), task.draws(purpose))


def batches(count: int, size: int, steps: int, draws: Draws) -> Iterator[Array]:
    """``steps`` index batches, a new shuffle each epoch. The last, smaller batch of an epoch is kept; a single
    sample left over joins the batch before it, because a batch of one has no variance for BatchNorm."""
    done, wanted = 0, _WANTED.get()
    while done < steps and count:
        for index in cut(draws.order(count), size):
            _require(wanted)
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


def layer_draws(task: Task, purpose: str, layer: str) -> Draws:
    """What the dropout layer ``layer`` draws from in one training: each layer has draws of its own, so that who runs
    the layers in another order, or not all of them, draws the same."""
    return task.draws(f"{purpose}/layers/{layer}")


def layer_of(place: str, layers: Container[str]) -> str:
    """The layer from whose stream a program's draws at a ``place`` come: ``layer#2`` is the second call of ``layer`` in
    a pass, which goes on where the first one stopped."""
    return place if place in layers else place.rpartition("#")[0]


def kept(draws: Draws, share: float, *shape: int) -> Array:
    """Dropout's factors, float32: 1/(1 - share) where a value stays, 0 where it falls away, a ``share`` of them."""
    stays = 1 - share
    factor = np.float32(0 if stays == 0 else 1 / stays)
    return (draws.uniform(*shape) < stays).astype(np.float32) * factor
