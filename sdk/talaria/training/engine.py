"""What an algorithm asks of whoever computes: train, differentiate, calibrate, serve.

Arrays go in and arrays come out. A task names its engine; torch is the one of a task that names none, and is imported
when it is first asked, so that a coordinator, which folds and never trains, imports an algorithm without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from talaria import tasks
from talaria.errors import ModelError
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model, Served, Weights
from talaria.tensors import Array, Tensors
from talaria.training.batching import AT_ONCE
from talaria.training.interface import Engine, Task, Walk
from talaria.training.objectives import LOGITS, Aimed, CrossEntropy, Curved, Objective, Pull
from talaria.types import Recipe, Samples


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
    """SGD from ``state`` on the task's training samples; the whole new state.

    ``only`` names what is trained (parameters and the buffers that follow them; default: everything). ``pull`` is
    added to the gradient before the optimizer's step, so momentum sees it. ``purpose`` names the random draws:
    branches with different purposes do not disturb each other. ``objective`` is what is minimized (default: the
    loss of the task's goal; of classification, the cross-entropy with the recipe's label smoothing).
    """
    objective = _known(objective, state) or _aim(task)
    only = (recipe or task.recipe).trained((*task.split.keys, *(objective.own if objective else ())), only)
    return _engine(task).train(
        task, state, only=only, recipe=recipe, pull=pull, objective=objective, samples=samples, purpose=purpose
    )


def train_upper(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str],
    recipe: Recipe | None = None,
    samples: Samples | None = None,
    purpose: str = "train",
) -> Tensors:
    """As :func:`train`, where what the frozen layers below compute may be computed once and kept."""
    if _aim(task) is not None:
        return train(task, state, only=only, recipe=recipe, samples=samples, purpose=purpose)
    only = (recipe or task.recipe).trained(task.split.keys, only) or ()
    return _engine(task).train_upper(task, state, only=only, recipe=recipe, samples=samples, purpose=purpose)


def gradient(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str] | None = None,
    samples: Samples | None = None,
    objective: Objective | None = None,
    purpose: str = "gradient",
) -> Tensors:
    """The mean gradient over ``samples`` (default: all training samples) at ``state``, which does not move.

    ``objective`` is what is differentiated (default: the goal's loss). BatchNorm normalizes as in training where its
    layer is in ``only``, but its statistics are not kept.
    """
    objective = _known(objective, state) or _aim(task)
    return _engine(task).gradient(task, state, only=only, samples=samples, objective=objective, purpose=purpose)


def _known(objective: Objective | None, state: Tensors) -> Objective | None:
    """Raises :class:`ModelError` where ``state`` lacks what the objective has of its own."""
    for name in () if objective is None else objective.own:
        if name not in state:
            what = f"objective {type(objective).__name__}: its own {name!r}"
            raise ModelError(f"{what} is not in the state that is trained; put it there, beside the model's")
    return objective


def looking(task: Task, state: Tensors, taps: Sequence[str]) -> Callable[[Array], Tensors]:
    """``x (N, ...) -> by tap what the model of the task at ``state`` makes of it``, in eval mode, also while the task
    trains."""
    return _engine(task).looking(task, state, taps)


def walk(task: Task, state: Tensors, recipe: Recipe, purpose: str = "train") -> Walk:
    """A walk from ``state`` down the loss of the task's goal, of all but what the recipe freezes; ``purpose`` names its
    draws of dropout."""
    return _engine(task).walk(task, state, recipe, purpose, _aim(task), recipe.trained(task.split.keys, None))


def calibrate(task: Task, state: Tensors, samples: Samples | None = None) -> Tensors:
    """BatchNorm statistics estimated anew by one pass over ``samples``, the training ones by default, and over what the
    device has unlabelled; everything else stays as it is, and so do those of layers that the recipe freezes."""
    if task.unlabelled is not None and len(task.unlabelled):
        samples = task.train if samples is None else samples
        ignored = np.zeros((len(task.unlabelled), *samples.y.shape[1:]), samples.y.dtype)
        samples = Samples.joined([samples, Samples(task.unlabelled, ignored)])
    return _engine(task).calibrate(task, state, samples)


def never_trained(task: Task, state: Tensors) -> bool:
    """True where private BatchNorm statistics that may move have not seen a single batch."""
    split, still = task.split, task.still
    batches = (
        key for key in split.counters if key.endswith("num_batches_tracked") and key not in still
    )  # others are a network's own tables
    return split.buffers == "local" and any(int(state[key]) == 0 for key in batches)


def ready(task: Task, state: Tensors) -> Tensors:
    """``state`` fit to be run: BatchNorm calibrated on this device's inputs if it never trained here."""
    return calibrate(task, state) if never_trained(task, state) else state


def served(task: Task, state: Tensors) -> Model:
    """What a device runs, with ``state``: a module of its own in eval mode, or weights and their graph where there is
    no torch."""
    return _engine(task).served(task, state)


def another(task: Task, spec: ModelSpec) -> tuple[Model, Engine]:
    """Another model with its first weights, that of ``spec``, which an algorithm trains beside the task's own, and the
    task's engine for it."""
    return _engine(task).another(spec, task.model)


def predict(model: Model, x: Array, batch: int = AT_ONCE) -> Array:
    """Logits float32 (N, classes) of what is served."""
    if isinstance(model, Served):
        return model.predict(x, batch)
    if isinstance(model, Weights):
        raise ModelError("model: these are weights alone, which nothing here can run; give what is served")
    from talaria.training import loop

    return loop.predict(model, x, batch)


def accuracy(task: Task, state: Tensors, samples: Samples) -> float:
    """The score of ``state`` on ``samples``, of which more is better: in classification the share labelled right
    (:mod:`talaria.tasks` has the others); 0.0 without samples."""
    if _aim(task) is None or not len(samples):
        return _engine(task).accuracy(task, state, samples)
    out = looking(task, state, (LOGITS,))(samples.x)[LOGITS]
    return tasks.of(task.goal).measured(out, samples.y)[0]


def state_of(model: Model) -> Tensors:
    """Copies of all parameters and buffers of ``model``."""
    if isinstance(model, Weights):
        return {key: value.copy() for key, value in model.state.items()}
    from talaria.model import state

    return state.state_of(model)


def aim_of(task: Task) -> CrossEntropy | Aimed:
    """What ``task`` minimizes: the loss of its goal, in classification with the recipe's label smoothing."""
    if task.goal == tasks.CLASSIFICATION:
        return CrossEntropy(task.recipe.smoothing)
    return Aimed(tasks.of(task.goal).fitted(task.train.y))


def _aim(task: Task) -> Curved | None:
    """What a task minimizes where nothing else is asked; None for cross-entropy, which engines have themselves."""
    return None if task.goal == tasks.CLASSIFICATION else aim_of(task)


def _engine(task: Task) -> Engine:
    if task.engine is not None:
        return task.engine
    from talaria.training import torch_engine

    return torch_engine
