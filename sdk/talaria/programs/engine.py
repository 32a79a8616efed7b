"""Training by programs: what :mod:`talaria.training.loop` does in torch, done by ONNX graphs of the same model.

A program is made when it is first needed, from the unpruned model, and serves every mask and batch of it. SGD on
cross-entropy is one program; any other objective is plain arithmetic between the two halves of a derivative
(:mod:`talaria.programs.derivatives`). The shuffles and augmentations are the loop's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs import differentiate, onnx_file
from talaria.programs.build import packed
from talaria.programs.derivatives import Derivatives, ProgramWalk
from talaria.programs.graph import Graph, Size, held
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.programs.shapes import Limits, Value, measure
from talaria.programs.step import features_of, statistics_of
from talaria.programs.training import Training
from talaria.programs.vjp import Vjp
from talaria.tensors import Array, Tensors
from talaria.training import loop
from talaria.training.batching import cut, feed, kept, layer_draws, steps_of
from talaria.training.engine import Objective, Pull
from talaria.training.frozen_features import LARGEST_CACHE, halve
from talaria.training.objectives import CrossEntropy
from talaria.types import Recipe, Samples, Task

_AT_ONCE = 64
"""Samples whose features are computed together."""
_WORTH_HOLDING = 10**9
"""Multiply-adds of a batch from which on a pass holds its weights as constants."""
_FED = "fed"
"""The width of what the upper part is fed, where a mask may narrow it."""


class ProgramEngine:
    """The programs of one model; an :class:`~talaria.training.engine.Engine`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._made: dict[object, Program] = {}
        self._uppers: dict[frozenset[str], _Upper | None] = {}
        self._derived: dict[object, Vjp] = {}
        self._others: dict[ModelSpec, ProgramEngine] = {}

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
        if objective is not None or recipe.accumulate > 1:
            aim = objective or CrossEntropy(recipe.smoothing)
            return self._derivatives.train(task, state, only, recipe, pull, aim, samples, purpose)
        trains = only is None or any(key in only for key, _ in self._module.named_parameters())
        if not trains or steps_of(recipe, len(samples)) == 0:
            return dict(state)
        return self._trained(self._program(recipe, only, pull is not None), task, state, recipe, pull, samples, purpose)

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
        upper = self._upper(frozenset(only)) if recipe.augment == "none" and recipe.accumulate == 1 else None
        once = steps_of(recipe, len(samples)) * recipe.batch < 2 * len(samples)
        if once or upper is None or upper.bytes_each * len(samples) > LARGEST_CACHE:
            return self.train(task, state, only=only, recipe=recipe, samples=samples, purpose=purpose)
        parts = [samples.x[begin : begin + _AT_ONCE] for begin in range(0, len(samples), _AT_ONCE)]
        lower = upper.lower.held(state, parts[0])
        kept = np.concatenate([lower({"x": part}, state)["features"] for part in parts])
        program = self._program(recipe, only, pulled=False, upper=upper)
        return self._trained(program, task, state, recipe, None, Samples(kept, samples.y), purpose)

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
        training = Training(program, state, program.momentum(state), **how)
        draws = _Draws(program, self._module, state, task, purpose)
        for x, y in feed(task, recipe, samples, purpose):
            training.step(np.ascontiguousarray(x), y, lr=recipe.lr, draws=draws.next(len(y)))
        after = training.weights
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

    def walk(self, task: Task, state: Tensors, recipe: Recipe, purpose: str = "train") -> ProgramWalk:
        """A walk of one step at a time, see :func:`talaria.training.engine.walk`."""
        return self._derivatives.walk(task, state, recipe, purpose)

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None = None, batch: int = 256) -> Tensors:
        """BatchNorm statistics estimated anew, as :func:`talaria.training.loop.calibrate` does."""
        samples = task.train if samples is None else samples
        fresh = {key: _fresh(key, state[key]) for key in self._statistics}
        if not fresh or len(samples) < 2:
            return dict(state)
        now = {**state, **fresh}
        for done, index in enumerate(cut(np.arange(len(samples)), batch), 1):
            found = self._calibration({"x": samples.x[index], "rate": np.array(1 / done, np.float32)}, now)
            now |= {name.removeprefix("next/weight/"): value for name, value in found.items()}
        return now

    def served(self, task: Task, state: Tensors) -> Module:
        """The module with ``state``: what is run and exported is the same on both engines."""
        return loop.served(task, state)

    def another(self, spec: ModelSpec) -> ProgramEngine:
        """The programs of another model, which is trained beside this one; made once."""
        return self._others.setdefault(spec, ProgramEngine(spec))

    @cached_property
    def _module(self) -> Module:
        return zoo.build(self.spec)

    @cached_property
    def _statistics(self) -> tuple[str, ...]:
        every = self._module.named_modules()
        norms = {name: m for name, m in every if isinstance(m, _BatchNorm) and m.track_running_stats}
        return tuple(f"{name}.{key}" for name, layer in norms.items() for key, _ in layer.named_buffers(recurse=False))

    @cached_property
    def _calibration(self) -> _Pass:
        module = zoo.build(self.spec).requires_grad_(False).eval()
        for layer in module.modules():
            layer.training = isinstance(layer, _BatchNorm) and layer.track_running_stats
        return _Pass(statistics_of(module, zoo.head(self.spec), self.spec.input_shape))

    def _program(
        self, recipe: Recipe, only: Collection[str] | None, pulled: bool, upper: _Upper | None = None
    ) -> Program:
        known = None if only is None else frozenset(only)
        how = (recipe.momentum, recipe.weight_decay, recipe.smoothing, recipe.accumulate)
        key = (known, how, pulled, upper is not None)
        if key not in self._made:
            module = zoo.build(self.spec) if upper is None else upper.module
            fed: dict[str, Any] = {} if upper is None else {"features": upper.shape, "widths": upper.widths}
            label = "all" if known is None else "some"
            self._made[key] = Program(packed(self.spec, module, known, label, recipe, pulled=pulled, **fed))
        return self._made[key]

    @cached_property
    def _derivatives(self) -> Derivatives:
        def streams(vjp: Vjp, state: Mapping[str, Array], task: Task, purpose: str) -> _Draws:
            return _Draws(vjp, self._module, state, task, purpose)

        return Derivatives(self._vjp, self._twice, streams)

    def _twice(self) -> Vjp:
        if "twice" not in self._derived:
            self._derived["twice"] = Vjp.read(differentiate.curved(self.spec))
        return self._derived["twice"]

    def _vjp(self, only: Collection[str] | None, taps: Sequence[str]) -> Vjp:
        known = None if only is None else frozenset(only)
        key = (known, tuple(taps))
        if key not in self._derived:
            self._derived[key] = Vjp.read(differentiate.packed(self.spec, known, taps))
        return self._derived[key]

    def _upper(self, only: frozenset[str]) -> _Upper | None:
        if only not in self._uppers:
            self._uppers[only] = self._cut(only)
        return self._uppers[only]

    def _cut(self, only: frozenset[str]) -> _Upper | None:
        """The model above the lowest layer that trains, or None where it cannot be cut there."""
        halves = halve(zoo.build(self.spec), only)
        if isinstance(halves, str):
            return None
        lower = features_of(halves.lower, zoo.head(self.spec), self.spec.input_shape)
        with torch.no_grad():
            full = halves.lower(zoo.example(self.spec)).shape[1:]
        channels = lower.outputs[0].shape[1]
        named = {} if isinstance(channels, int) else {_FED: int(full[0])}
        shape = (_FED if named else full[0], *full[1:])
        return _Upper(_Pass(lower), halves.upper, shape, named, 4 * int(full.numel()))


@dataclass(frozen=True)
class _Pass:
    """A graph that only looks: run on some inputs and a state, it gives its outputs by name."""

    graph: Graph

    def __call__(self, given: Mapping[str, Array], state: Tensors) -> dict[str, Array]:
        names = [port.name for port in self.graph.outputs]
        weights = {name: state[name.removeprefix("weight/")] for name in self._weights}
        return dict(zip(names, self._session(names, {**weights, **given}), strict=True))

    def held(self, state: Tensors, x: Array) -> _Pass:
        """This graph for one state: with its weights as constants where batches like ``x`` are work enough to repay
        ONNX Runtime's preparing of them, and at the widths of its depthwise convolutions in any case."""
        weights = {name: state[name.removeprefix("weight/")] for name in self._weights}
        sizes = {name: Value(value.shape, value.dtype.name) for name, value in {**weights, "x": x}.items()}
        graph = held(self.graph, weights)
        given = {port.name: sizes[port.name] for port in graph.inputs}
        large = measure(graph, given, Limits()).multiply_adds > _WORTH_HOLDING
        grouped = any(node.get("group", 1) > 1 for node in graph.nodes)
        return _Pass(graph) if large or grouped else self

    @cached_property
    def _weights(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.graph.inputs if port.name.startswith("weight/"))

    @cached_property
    def _session(self) -> Session:
        return Session(onnx_file.write(self.graph, ""))


@dataclass(frozen=True)
class _Upper:
    """What trains of a model, and what feeds it: ``lower`` makes the features, of ``shape`` for one sample; ``widths``
    are the unpruned sizes of the names in it."""

    lower: _Pass
    module: Module
    shape: tuple[Size, ...]
    widths: Mapping[str, int]
    bytes_each: int


class _Draws:
    """Dropout's draws of one training, each layer's from a stream of its own."""

    def __init__(
        self, program: Program | Vjp, module: Module, state: Mapping[str, Array], task: Task, purpose: str
    ) -> None:
        ports = {port.name: port for port in program.graph.inputs}
        sizes = {
            label: size
            for name, port in ports.items()
            if name.startswith("weight/")
            for label, size in zip(port.shape, state[name.removeprefix("weight/")].shape, strict=True)
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._falls: dict[str, float] = {}
        for name in (name.removeprefix("draw/") for name in ports if name.startswith("draw/")):
            layer = module.get_submodule(name)
            self._falls[name] = float(layer.p)  # type: ignore[arg-type]  # of dropout, and of whole branches
            self._shapes[name] = tuple(_size(label, sizes) for label in ports[f"draw/{name}"].shape[1:])
        self._streams = {name: layer_draws(task, purpose, name) for name in self._shapes}

    def copy(self) -> _Draws:
        """The same draws once more, from where these stand."""
        again = copy(self)
        again._streams = {name: stream.copy() for name, stream in self._streams.items()}
        return again

    def next(self, count: int) -> dict[str, Array]:
        """The draws (N, ...) of each layer for a batch of ``count``: 0 where a value falls away, else 1/(1-p)."""
        return {
            name: kept(self._streams[name], self._falls[name], count, *shape) for name, shape in self._shapes.items()
        }


def _size(label: int | str, sizes: Mapping[Any, int]) -> int:
    if isinstance(label, int):
        return label
    if label in sizes:
        return sizes[label]
    name, _, times = label.rpartition("*")
    return sizes[name] * int(times)


def _fresh(key: str, old: Array) -> Array:
    return np.ones_like(old) if key.endswith("running_var") else np.zeros_like(old)
