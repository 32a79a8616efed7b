"""Torch as the engine of a task: the loop, kept features where only upper layers train, and objectives over arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from talaria.model import zoo
from talaria.model.batch_norm import lone_sample_in_eval
from talaria.model.cloning import clone
from talaria.model.spec import ModelSpec
from talaria.model.state import array_of, beside, load, state_of
from talaria.model.weights import Model
from talaria.tensors import Array, Tensors
from talaria.training import loop
from talaria.training.batching import steps_of
from talaria.training.frozen_features import train as train_upper
from talaria.training.functional_sgd import FunctionalSGD
from talaria.training.interface import Engine, Task, Walk
from talaria.training.layer_draws import LayerDraws
from talaria.training.loop import accuracy, served
from talaria.training.objectives import Curved, Objective, Pull, share_of, slopes_of
from talaria.training.sgd import SGD
from talaria.training.taps import Taps
from talaria.types import Recipe, Samples

__all__ = ["accuracy", "another", "calibrate", "gradient", "looking", "served", "train", "train_upper", "walk"]


@torch.enable_grad()
def train(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str] | None = None,
    recipe: Recipe | None = None,
    pull: Pull | None = None,
    objective: Objective | None = None,
    samples: Samples | None = None,
    purpose: str = "train",
) -> Tensors:
    """See :func:`talaria.training.engine.train`. With an ``objective``, a tensor of the model that ``state`` lacks has
    the value that the scratch module has: something that the objective does not look at."""
    if objective is None:
        return loop.train(task, state, only=only, recipe=recipe, pull=pull, samples=samples, purpose=purpose)
    recipe, samples = recipe or task.recipe, task.train if samples is None else samples
    module = _loaded(task, state)
    own = {k: beside(module, np.array(state[k])).requires_grad_() for k in objective.own if only is None or k in only}
    trained = {**loop.freeze_but(module, only), **own}
    if not trained or steps_of(recipe, len(samples)) == 0:
        return dict(state)
    anchors = {} if pull is None else {k: beside(module, pull.anchor[k]) for k in trained if k in pull.anchor}
    fixed = {k: beside(module, state[k]) for k in objective.own if k not in own}
    optimizer, draws = SGD(trained, recipe), LayerDraws(task, purpose)
    with Taps(module, objective.taps) as taps:
        for x, y in loop.feed(task, recipe, samples, purpose):
            with draws:  # between batches other threads have torch's generator
                optimizer.zero_grad()
                _backward(taps, objective, {**fixed, **own}, x, y, recipe.accumulate)
                for name, anchor in anchors.items():
                    loop.add_pull(trained[name], anchor, pull.strength if pull else 0.0)
                optimizer.step()
    after = {**state_of(module), **{name: array_of(tensor) for name, tensor in own.items()}}
    return {name: after.get(name, value) for name, value in state.items()}


@torch.enable_grad()
def gradient(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str] | None = None,
    samples: Samples | None = None,
    objective: Objective | None = None,
    purpose: str = "gradient",
) -> Tensors:
    """See :func:`talaria.training.engine.gradient`."""
    if objective is None:
        return loop.gradient(task, state, only=only, samples=samples, purpose=purpose)
    samples = task.train if samples is None else samples
    module = _loaded(task, state)
    loop.freeze_but(module, only)
    own = {k: beside(module, np.array(state[k])).requires_grad_() for k in objective.own}
    module.zero_grad()
    with LayerDraws(task, purpose), Taps(module, objective.taps) as taps:
        _backward(taps, objective, own, beside(module, samples.x), beside(module, samples.y), 1)
    return loop.gradients_of(
        {**loop.learning(module), **{k: one for k, one in own.items() if only is None or k in only}}
    )


def looking(task: Task, state: Tensors, taps: Sequence[str], batch: int = 256) -> Callable[[Array], Tensors]:
    """See :func:`talaria.training.engine.looking`; on a copy of the scratch module."""
    module = clone(_loaded(task, state)).requires_grad_(False).eval()

    def look(x: Array) -> Tensors:
        parts: dict[str, list[Array]] = {tap: [] for tap in taps}
        with torch.no_grad(), Taps(module, taps) as opened:
            for begin in range(0, max(1, len(x)), batch):
                module(beside(module, x[begin : begin + batch]))
                for tap, value in opened.seen.items():
                    parts[tap].append(array_of(value))
        return {tap: np.concatenate(found) for tap, found in parts.items()}

    return look


def calibrate(task: Task, state: Tensors, samples: Samples | None = None) -> Tensors:
    """See :func:`talaria.training.engine.calibrate`; what of the module ``state`` lacks is not read by it."""
    own = task.model.state_dict(keep_vars=True)
    if own.keys() == state.keys():
        return loop.calibrate(task, state, samples)
    after = loop.calibrate(task, state_of(_loaded(task, state)), samples)
    return {name: after.get(name, value) for name, value in state.items()}


def another(spec: ModelSpec, like: Module) -> tuple[Model, Engine]:
    """Another module, where ``like`` lies, and torch itself, which trains whatever module a task has."""
    own = next(like.parameters(), None)
    made = zoo.build(spec)
    return made if own is None else made.to(own.device), cast(Engine, sys.modules[__name__])


def walk(
    task: Task,
    state: Tensors,
    recipe: Recipe,
    purpose: str = "train",
    objective: Curved | None = None,
    only: Collection[str] | None = None,
) -> Walk:
    """See :func:`talaria.training.engine.walk`; ``only`` names what is trained (None: everything)."""
    return FunctionalSGD(task, state, recipe, purpose, objective, only)


def _loaded(task: Task, state: Tensors) -> Module:
    own = task.model.state_dict(keep_vars=True)
    given = {name: state[name] for name in own if name in state}
    return load(task.model, given if len(given) == len(own) else {**state_of(task.model), **given})


def _backward(taps: Taps, objective: Objective, own: dict[str, Tensor], x: Tensor, y: Tensor, slices: int) -> None:
    """Add the gradient of the batch's loss to those of all that is trained."""
    pieces, values = min(slices, len(y)), {name: array_of(tensor) for name, tensor in own.items()}
    for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
        with lone_sample_in_eval(taps.module, len(ys)):
            taps.module(xs)
        seen, share = taps.seen, share_of(objective, array_of(ys), array_of(y))
        given = {tap: array_of(value) for tap, value in seen.items()}
        found = slopes_of(objective, given, values, array_of(xs), array_of(ys))
        reached = [tap for tap in found.taps if seen[tap].requires_grad]
        slopes = [beside(taps.module, found.taps[tap]) * share for tap in reached]
        torch.autograd.backward([seen[tap] for tap in reached], slopes)
        for name, slope in found.own.items():
            tensor, more = own[name], beside(taps.module, slope) * share
            if tensor.requires_grad:
                tensor.grad = more if tensor.grad is None else tensor.grad + more
