"""What an engine is: the methods that torch's and the programs' have, and the walk that both make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from talaria.model.spec import ModelSpec
from talaria.model.weights import Model
from talaria.tensors import Array, Tensors
from talaria.training.objectives import Curved, Objective, Pull
from talaria.types import Recipe, Samples, Task


class LayerStreams(Protocol):
    """What the dropout layers of one training draw from; it goes on where it stopped."""

    def copy(self) -> Any:
        """The same draws once more, from where these stand."""
        ...


class Walk(Protocol):
    """Weights under a recipe's SGD, one step at a time, for methods that need gradients at more than one point of a
    batch (APFL, Per-FedAvg)."""

    @property
    def weights(self) -> Tensors:
        """The weights that are trained, by state-dict key, as they are now; read them before the next :meth:`step`, and
        do not write."""
        ...

    def draws(self, purpose: str) -> LayerStreams:
        """Draws of dropout for one purpose."""
        ...

    def gradient(
        self, x: Array, y: Array, *, at: Tensors | None = None, keep: bool = False, draws: Any = None
    ) -> Tensors:
        """The gradient of the batch's loss, that of the task, at ``at`` (default: the walk's own weights).

        BatchNorm that is trained normalizes by the batch; with ``keep`` its statistics move as in training, else they
        stand still.
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


class Engine(Protocol):
    """Trains one model; the functions of :mod:`talaria.training.engine` say what each method does."""

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

    def walk(
        self,
        task: Task,
        state: Tensors,
        recipe: Recipe,
        purpose: str,
        objective: Curved | None = None,
        only: Collection[str] | None = None,
    ) -> Walk: ...

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None) -> Tensors: ...

    def accuracy(self, task: Task, state: Tensors, samples: Samples) -> float: ...

    def served(self, task: Task, state: Tensors) -> Model: ...

    def another(self, spec: ModelSpec, like: Model) -> tuple[Model, Engine]: ...
