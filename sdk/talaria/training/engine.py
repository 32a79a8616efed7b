"""What an algorithm asks of whoever computes: train, differentiate, calibrate, serve.

Arrays go in and arrays come out. A task names its engine; torch is the one of a task that names none, and is imported
when it is first asked, so that a coordinator, which folds and never trains, imports an algorithm without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from talaria import tasks
from talaria.errors import ModelError
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model, Served, Weights
from talaria.tensors import Array, Tensors
from talaria.training.batching import AT_ONCE
from talaria.types import Recipe, Samples, Task

LOGITS, INTO, MEAN = "logits", "into ", "mean "
"""Names of taps, the places where an objective looks at a model: ``"logits"``, what the model gives, (N, outputs) or
(N, steps, outputs); ``"into LAYER"``, what enters the module of that dotted name (N, ...); ``"mean LAYER"``, what
leaves it, averaged over all its places (N, channels): those behind the channels, of a sequence those before."""


def uncalled(tap: str) -> ModelError:
    """The error for a tap at a layer that no pass calls."""
    layer = tap.partition(" ")[2]
    return ModelError(f"layer {layer!r} is looked at, but no pass calls it; call it, or take it out of the model")


def of_parts(tap: str) -> ModelError:
    """The error for a tap at what reads a batch of parts of samples."""
    layer = tap.partition(" ")[2]
    what = f"layer {layer!r} reads several parts of each sample one by one, and what enters it is looked at"
    return ModelError(f"{what}; part the batch before it, as in x.view(batch, -1, width).mean(1)")


@dataclass(frozen=True)
class Slopes:
    """A loss of one batch and its gradients: by what a model had at its ``taps``, and by an objective's ``own``
    tensors, by name."""

    loss: float
    taps: Tensors
    own: Tensors = field(default_factory=dict)


class Objective(Protocol):
    """What is minimized, in plain arrays, so that any engine can: it looks at the model at ``taps`` (:data:`LOGITS` and
    what follows there), and may have tensors of its ``own`` in the state beside the model's, which are trained too."""

    @property
    def taps(self) -> Sequence[str]: ...

    @property
    def own(self) -> Sequence[str]: ...

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        """The loss of a batch ``x`` (N, ...), ``y`` (N,), as a mean over its samples, at what the model made of it."""
        ...


class LayerStreams(Protocol):
    """What the dropout layers of one training draw from; it goes on where it stopped."""

    def copy(self) -> Any:
        """The same draws once more, from where these stand."""
        ...


class Walk(Protocol):
    """Weights under a recipe's SGD, one step at a time, for methods that need gradients at more than one point of a
    batch (APFL, Per-FedAvg). All parameters are trained."""

    @property
    def weights(self) -> Tensors:
        """The weights by state-dict key as they are now; read them before the next :meth:`step`, and do not write."""
        ...

    def draws(self, purpose: str) -> LayerStreams:
        """Draws of dropout for one purpose."""
        ...

    def gradient(
        self, x: Array, y: Array, *, at: Tensors | None = None, keep: bool = False, draws: Any = None
    ) -> Tensors:
        """The gradient of the batch's mean cross-entropy at ``at`` (default: the walk's own weights).

        BatchNorm normalizes by the batch; with ``keep`` its statistics move as in training, else they stand still.
        ``draws`` is what dropout draws from (default: the walk's own). Weights without influence may be left out.
        """
        ...

    def curved(self, x: Array, y: Array, along: Tensors, draws: Any) -> Tensors:
        """The Hessian of the batch's loss at the walk's weights times ``along``."""
        ...

    def step(self, slopes: Tensors, *, at: Tensors | None = None, scale: float = 1.0) -> None:
        """One optimizer step along ``scale`` times ``slopes``; the recipe's weight decay acts on ``at``, also scaled
        (default: on the weights)."""
        ...

    def state(self) -> Tensors:
        """Copies of all weights and buffers under the state-dict's names."""
        ...


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

    def looking(self, task: Task, state: Tensors, taps: Sequence[str]) -> Callable[[Array], Tensors]: ...

    def walk(self, task: Task, state: Tensors, recipe: Recipe, purpose: str) -> Walk: ...

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None) -> Tensors: ...

    def accuracy(self, task: Task, state: Tensors, samples: Samples) -> float: ...

    def served(self, task: Task, state: Tensors) -> Model: ...

    def another(self, spec: ModelSpec, like: Model) -> tuple[Model, Engine]: ...


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
    objective = objective or _aim(task)
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
    objective = objective or _aim(task)
    return _engine(task).gradient(task, state, only=only, samples=samples, objective=objective, purpose=purpose)


def looking(task: Task, state: Tensors, taps: Sequence[str]) -> Callable[[Array], Tensors]:
    """``x (N, ...) -> by tap what the model of the task at ``state`` makes of it``, in eval mode, also while the task
    trains."""
    return _engine(task).looking(task, state, taps)


def walk(task: Task, state: Tensors, recipe: Recipe, purpose: str = "train") -> Walk:
    """A walk from ``state``; ``purpose`` names its draws of dropout."""
    return _engine(task).walk(task, state, recipe, purpose)


def calibrate(task: Task, state: Tensors, samples: Samples | None = None) -> Tensors:
    """BatchNorm statistics estimated anew by one pass over ``samples``, the training ones by default, and over what the
    device has unlabelled; everything else stays as it is."""
    if task.unlabelled is not None and len(task.unlabelled):
        samples = task.train if samples is None else samples
        ignored = np.zeros((len(task.unlabelled), *samples.y.shape[1:]), samples.y.dtype)
        samples = Samples.joined([samples, Samples(task.unlabelled, ignored)])
    return _engine(task).calibrate(task, state, samples)


def never_trained(task: Task, state: Tensors) -> bool:
    """True where private BatchNorm statistics have not seen a single batch."""
    split = task.split
    batches = [
        key for key in split.counters if key.endswith("num_batches_tracked")
    ]  # others are a network's own tables
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


def _aim(task: Task) -> Objective | None:
    """What a task minimizes where nothing else is asked; None for cross-entropy, which engines have themselves."""
    if task.goal == tasks.CLASSIFICATION:
        return None
    from talaria.training.objectives import Aimed

    return Aimed(tasks.of(task.goal).fitted(task.train.y))


def _engine(task: Task) -> Engine:
    if task.engine is not None:
        return task.engine
    from talaria.training import torch_engine

    return torch_engine
