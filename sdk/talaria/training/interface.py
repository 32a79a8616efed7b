"""What an engine is given, and what it is: a task, the methods that torch's and the programs' have, and the walk that
both make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from talaria import seeds
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.planning.plan import Plan
from talaria.seeds import Draws
from talaria.tasks.base import Scale
from talaria.tensors import Array, Tensors
from talaria.training.objectives import Curved, Objective, Pull
from talaria.types import Recipe, Samples


@dataclass(frozen=True)
class Task:
    """What one device works on in one round.

    ``model`` is one scratch module, already as small as ``mask`` says: it is loaded before each use, never deep-copied;
    where there is no torch, it is the model's weights alone (:class:`talaria.model.weights.Weights`). All tensors given
    to an algorithm beside this task are compact in the same way.
    """

    model: Model = field(repr=False)
    split: Split = field(repr=False)
    train: Samples = field(repr=False)
    val: Samples = field(repr=False)
    recipe: Recipe
    classes: int
    seed: int = 0
    client: str = "device"
    round: int = 0
    mask: ChannelMask | None = field(default=None, repr=False)
    plan: Plan | None = None
    engine: Engine | None = field(default=None, repr=False)
    """Who trains; None for torch."""
    goal: str = "classification"
    """What is learned, a text for :func:`talaria.tasks.of`."""
    scale: Scale | None = field(default=None, repr=False)
    """What the targets of ``train`` and ``val`` were scaled by."""
    newcomer: bool = False
    """True where this device has learned nothing in this run yet: in its first ``fit``, and where it is served without
    ever having taken part."""
    unlabelled: Array | None = field(default=None, repr=False)
    """Inputs float32 (N, ...) of this device that nobody has labelled: BatchNorm is calibrated on them, too."""

    @property
    def still(self) -> frozenset[str]:
        """The keys that the recipe freezes, statistics among them."""
        return self.recipe.still(self.split.keys)

    def draws(self, purpose: str) -> Draws:
        """Draws of their own for each (seed, client, round, purpose)."""
        return seeds.draws(self.seed, self.client, self.round, purpose)

    def but(self, **changes: Any) -> Task:
        """A changed copy."""
        return replace(self, **changes)


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
        stand still. ``draws`` is what dropout draws from (default: the walk's own). Weights without influence may be
        left out.
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
