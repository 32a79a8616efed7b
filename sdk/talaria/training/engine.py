"""What an algorithm asks of whoever computes: train, differentiate, calibrate, serve.

Arrays go in and arrays come out. A task names its engine; torch is the one of a task that names none, and is imported
when it is first asked, so that a coordinator, which folds and never trains, imports an algorithm without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from talaria.tensors import Array, Tensors
from talaria.types import Recipe, Samples, Task

if TYPE_CHECKING:
    from torch.nn import Module

Objective = Callable[[Any, Any, Any], Any]
"""``(module, x, y) -> scalar loss`` on one batch, written in torch."""

LOGITS, INTO, MEAN = "logits", "into ", "mean "
"""Names of taps, the places where an objective looks at a model: ``"logits"``, what the model gives (N, classes);
``"into LAYER"``, what enters the module of that dotted name (N, ...); ``"mean LAYER"``, what leaves it, averaged over
all dimensions behind the channels (N, channels)."""


@dataclass(frozen=True)
class Pull:
    """The gradient ``strength * (w - anchor)`` of a proximal term ``strength/2 * ||w - anchor||²``."""

    anchor: Tensors
    strength: float


class Engine(Protocol):
    """Trains one model; the functions of this module say what each method does."""

    def train(
        self,
        task: Task,
        state: Tensors,
        *,
        only: Collection[str] | None,
        recipe: Recipe | None,
        pull: Pull | None,
        objective: Objective | None,
        samples: Samples | None,
        purpose: str,
    ) -> Tensors: ...

    def train_upper(
        self,
        task: Task,
        state: Tensors,
        *,
        only: Collection[str],
        recipe: Recipe | None,
        samples: Samples | None,
        purpose: str,
    ) -> Tensors: ...

    def gradient(
        self,
        task: Task,
        state: Tensors,
        *,
        only: Collection[str] | None,
        samples: Samples | None,
        objective: Objective | None,
        purpose: str,
    ) -> Tensors: ...

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None) -> Tensors: ...

    def served(self, task: Task, state: Tensors) -> Module: ...


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
    branches with different purposes do not disturb each other.
    """
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
    """The mean gradient over ``samples`` (default: all training samples) at ``state``, which does not move."""
    return _engine(task).gradient(task, state, only=only, samples=samples, objective=objective, purpose=purpose)


def calibrate(task: Task, state: Tensors, samples: Samples | None = None) -> Tensors:
    """BatchNorm statistics estimated anew by one unlabelled pass; everything else stays as it is."""
    return _engine(task).calibrate(task, state, samples)


def never_trained(task: Task, state: Tensors) -> bool:
    """True where private BatchNorm statistics have not seen a single batch."""
    split = task.split
    return split.buffers == "local" and any(int(state[k]) == 0 for k in split.counters)


def ready(task: Task, state: Tensors) -> Tensors:
    """``state`` fit to be run: BatchNorm calibrated on this device's inputs if it never trained here."""
    return calibrate(task, state) if never_trained(task, state) else state


def served(task: Task, state: Tensors) -> Module:
    """A module of its own with ``state``, in eval mode: what a device runs and exports."""
    return _engine(task).served(task, state)


def predict(module: Module, x: Array) -> Array:
    """Logits float32 (N, classes) of a module that is served."""
    from talaria.training import loop

    return loop.predict(module, x)


def accuracy(task: Task, state: Tensors, samples: Samples) -> float:
    """Share of ``samples`` that ``state`` labels right; 0.0 without samples."""
    from talaria.training import loop

    return loop.accuracy(task, state, samples)


def state_of(model: Module) -> Tensors:
    """Copies of all parameters and buffers of ``model``."""
    from talaria.model import state

    return state.state_of(model)


def _engine(task: Task) -> Engine:
    if task.engine is not None:
        return task.engine
    from talaria.training import torch_engine

    return torch_engine
