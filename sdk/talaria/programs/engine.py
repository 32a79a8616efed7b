"""Training by programs: what :mod:`talaria.training.loop` does in torch, done by ONNX graphs of the same model.

Each program is of the unpruned model and serves every mask and batch of it; a :class:`~talaria.programs.source.Source`
has it. SGD on cross-entropy is one program; any other objective is plain arithmetic between the two halves of a
derivative (:mod:`talaria.programs.derivatives`). The shuffles and augmentations are the loop's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from talaria import tasks
from talaria.errors import ConfigError
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model
from talaria.programs.derivatives import Derivatives, ProgramWalk
from talaria.programs.graph import size_of
from talaria.programs.program import Program
from talaria.programs.source import Need, Source
from talaria.programs.training import Training
from talaria.programs.vjp import Vjp
from talaria.tensors import Array, Tensors, spread
from talaria.training.batching import (
    LARGEST_CACHE,
    feed,
    kept,
    layer_draws,
    layer_of,
    of_features,
    orders,
    steps_of,
)
from talaria.training.interface import Task
from talaria.training.objectives import CrossEntropy, Curved, Objective, Pull
from talaria.types import Recipe, Samples

_AT_ONCE = 64
"""Samples whose features are computed together."""
_LOOKED_AT = 256
"""Samples whose logits are computed together."""
_KEPT = 2
"""Trainings whose buffers are kept for the next one of the same shapes: to bind them takes as long as some steps."""


class ProgramEngine:
    """The programs of one model; an :class:`~talaria.training.interface.Engine`."""

    def __init__(self, spec: ModelSpec, source: Source | None = None) -> None:
        """``source`` has the programs; None: they are made here, which takes torch."""
        self.spec = spec
        self.source = _maker(spec) if source is None else source
        self._others: dict[ModelSpec, ProgramEngine] = {}
        self._idle: dict[object, Training] = {}

    def train(
        self,
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
        """The whole state after training, as :func:`talaria.training.torch_engine.train` gives it up to rounding."""
        recipe = recipe or task.recipe
        samples = task.train if samples is None else samples
        if objective is not None or recipe.accumulate > 1 or not recipe.plain:
            aim = objective or CrossEntropy(recipe.smoothing)
            return self._derivatives.train(task, state, only, recipe, pull, aim, samples, purpose)
        trains = only is None or not self.source.parameters.isdisjoint(only)
        if not trains or steps_of(recipe, len(samples)) == 0:
            return dict(state)
        program = self.source.program(Need.of(recipe, only, pulled=pull is not None))
        return self._trained(program, task, state, recipe, pull, samples, purpose)

    def train_upper(
        self,
        task: Task,
        state: Tensors,
        *,
        only: Collection[str],
        recipe: Recipe | None = None,
        samples: Samples | None = None,
        purpose: str = "train",
    ) -> Tensors:
        """As :meth:`train`; what the frozen layers below make of each sample is computed once, where it is read more
        than once and fits in memory."""
        recipe = recipe or task.recipe
        samples = task.train if samples is None else samples
        if self.source.parameters.isdisjoint(only):
            return dict(state)
        cached = recipe.augment == "none" and recipe.accumulate == 1 and recipe.plain
        lower = self.source.lower(frozenset(only)) if cached else None
        once = steps_of(recipe, len(samples)) * recipe.batch < 2 * len(samples)
        if once or lower is None or lower.bytes_each * len(samples) > LARGEST_CACHE:
            return self.train(task, state, only=only, recipe=recipe, samples=samples, purpose=purpose)
        parts = [samples.x[begin : begin + _AT_ONCE] for begin in range(0, len(samples), _AT_ONCE)]
        look = lower.look.held(state, parts[0])
        kept = np.concatenate([look({"x": part}, state)["features"] for part in parts])
        program = self.source.program(Need.of(recipe, only, upper=True))
        return self._trained(program, task, state, recipe, None, of_features(kept, samples.y), purpose)

    def _trained(
        self,
        program: Program,
        task: Task,
        state: Tensors,
        recipe: Recipe,
        pull: Pull | None,
        samples: Samples,
        purpose: str,
    ) -> Tensors:
        how: dict[str, Any] = {} if pull is None else {"anchor": pull.anchor, "pull": pull.strength}
        shapes = program.digest, tuple((key, value.shape) for key, value in state.items())
        training = self._idle.pop(shapes, None)  # nobody else has it then
        if training is None:
            training = Training(program, state, program.momentum(state), **how)
        else:
            training.begin(state, **how)
        if recipe.augment == "none" and not program.draws:
            training.follow(samples.x, samples.y, orders(task, recipe, len(samples), purpose), lr=recipe.lr)
        else:
            draws = _Draws(program, self.source.falls, state, task, purpose, samples.x.shape)
            for x, y in feed(task, recipe, samples, purpose):
                training.step(np.ascontiguousarray(x), y, lr=recipe.lr, draws=draws.next(len(y)))
        after = training.weights
        self._idle[shapes] = training
        while len(self._idle) > _KEPT:
            self._idle.pop(next(iter(self._idle)), None)
        return {key: after.get(key, value) for key, value in state.items()}

    def gradient(
        self,
        task: Task,
        state: Tensors,
        *,
        only: Collection[str] | None = None,
        samples: Samples | None = None,
        objective: Objective | None = None,
        purpose: str = "gradient",
    ) -> Tensors:
        """The mean gradient over ``samples``, see :func:`talaria.training.engine.gradient`."""
        samples = task.train if samples is None else samples
        return self._derivatives.gradient(task, state, only, samples, objective, purpose)

    def looking(self, task: Task, state: Tensors, taps: Sequence[str]) -> Callable[[Array], Tensors]:
        """What the model at ``state`` makes of inputs at ``taps``, see :func:`talaria.training.engine.looking`."""
        return self._derivatives.looking(state, taps)

    def walk(
        self,
        task: Task,
        state: Tensors,
        recipe: Recipe,
        purpose: str = "train",
        objective: Curved | None = None,
        only: Collection[str] | None = None,
    ) -> ProgramWalk:
        """A walk of one step at a time, see :func:`talaria.training.engine.walk`."""
        return ProgramWalk(self._derivatives, task, state, recipe, purpose, objective, only)

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None = None, batch: int = 256) -> Tensors:
        """BatchNorm statistics estimated anew, as :func:`talaria.training.loop.calibrate` does."""
        samples = task.train if samples is None else samples
        still = task.still.intersection(self.source.statistics)
        fresh = {key: _fresh(key, state[key]) for key in self.source.statistics if key not in still}
        if not fresh or len(samples) < 2:
            return dict(state)
        now = {**state, **fresh}
        for done, index in enumerate(spread(len(samples), batch), 1):
            found = self.source.calibration(still)({"x": samples.x[index], "rate": np.array(1 / done, np.float32)}, now)
            found = {name.removeprefix("next/weight/"): value for name, value in found.items()}
            now |= {name: value for name, value in found.items() if name in fresh}
        return now

    def accuracy(self, task: Task, state: Tensors, samples: Samples) -> float:
        """Share of ``samples`` that ``state`` labels right; 0.0 without samples."""
        if not len(samples):
            return 0.0
        look = self.source.forward().held(state, samples.x[:_LOOKED_AT])
        parts = (samples.x[begin : begin + _LOOKED_AT] for begin in range(0, len(samples), _LOOKED_AT))
        logits = np.concatenate([look({"x": part}, state)["features"] for part in parts])
        return tasks.of(tasks.CLASSIFICATION).measured(logits, samples.y)[0]

    def served(self, task: Task, state: Tensors) -> Model:
        """What is run: the module with ``state`` where torch made the programs, else weights and a graph."""
        return self.source.served(task, state)

    def another(self, spec: ModelSpec, like: Model) -> tuple[Model, ProgramEngine]:
        """Another model, which is trained beside this one, and its programs, which are made once."""
        if spec not in self._others:
            self._others[spec] = type(self)(spec, self.source.beside(spec))
        return self._others[spec].source.first(), self._others[spec]

    @cached_property
    def _derivatives(self) -> Derivatives:
        def streams(vjp: Vjp, state: Mapping[str, Array], task: Task, purpose: str) -> _Draws:
            return _Draws(vjp, self.source.falls, state, task, purpose)

        def derivative(only: Collection[str] | None, taps: Sequence[str]) -> Vjp:
            return self.source.derivative(None if only is None else frozenset(only), tuple(taps))

        def twice(only: Collection[str] | None) -> Vjp:
            return self.source.twice(None if only is None else frozenset(only))

        return Derivatives(derivative, twice, streams)


def _maker(spec: ModelSpec) -> Source:
    try:
        from talaria.programs.making import Maker
    except ImportError as error:
        raise ConfigError(
            f"engine='onnx' makes its programs with torch, which is not here ({error}); give the device the run's kit "
            "([device] kit in device.toml, made by `talaria programs kit`), or pip install 'talaria[torch]'"
        ) from error
    return Maker(spec)


class _Draws:
    """Dropout's draws of one training, each layer's from a stream of its own."""

    def __init__(
        self,
        program: Program | Vjp,
        falls: Mapping[str, float],
        state: Mapping[str, Array],
        task: Task,
        purpose: str,
        fed: Sequence[int] = (),
    ) -> None:
        """``fed`` is the shape of features, which tells a width that no weight may have."""
        ports = {port.name: port for port in program.graph.inputs}
        sizes = {
            label: size
            for name, port in ports.items()
            if name.startswith("weight/")
            for label, size in zip(port.shape, state[name.removeprefix("weight/")].shape, strict=True)
            if isinstance(label, str)
        }
        sizes |= {label: size for label, size in zip(ports["x"].shape, fed, strict=False) if isinstance(label, str)}
        self._shapes: dict[str, tuple[int | None, ...]] = {}
        self._layers: dict[str, str] = {}
        self._falls = falls
        for name in (name.removeprefix("draw/") for name in ports if name.startswith("draw/")):
            self._layers[name] = layer_of(name, falls)
            labels = ports[f"draw/{name}"].shape
            self._shapes[name] = tuple(None if label == "N" else size_of(label, sizes) for label in labels)
        self._streams = {layer: layer_draws(task, purpose, layer) for layer in self._layers.values()}

    def copy(self) -> _Draws:
        """The same draws once more, from where these stand."""
        again = copy(self)
        again._streams = {name: stream.copy() for name, stream in self._streams.items()}
        return again

    def next(self, count: int) -> dict[str, Array]:
        """The draws of each call for a batch of ``count``: 0 where a value falls away, else 1/(1-p)."""
        return {
            name: kept(self._streams[layer], self._falls[layer], *(n or count for n in self._shapes[name]))
            for name, layer in self._layers.items()
        }


def _fresh(key: str, old: Array) -> Array:
    return np.ones_like(old) if key.endswith("running_var") else np.zeros_like(old)
