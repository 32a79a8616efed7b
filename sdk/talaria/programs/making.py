"""A source that makes what an engine needs of the torch module, when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import Module, MultiheadAttention, RNNBase

from talaria.inputs import Parts
from talaria.model import recurrent, zoo
from talaria.model.batch_norm import tracked
from talaria.model.several import Several
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model
from talaria.programs import differentiate
from talaria.programs.build import packed
from talaria.programs.graph import Size
from talaria.programs.layers.base import Whole
from talaria.programs.look import Look
from talaria.programs.program import Program
from talaria.programs.source import Lower, Need, derivative_name, twice_name
from talaria.programs.step import answers_of, features_of, statistics_of
from talaria.programs.vjp import Vjp
from talaria.tensors import Tensors
from talaria.training import loop
from talaria.training.frozen_features import halve
from talaria.training.interface import Task
from talaria.training.layer_draws import draws
from talaria.types import Recipe

_FED = "fed"
"""The width of what the upper part is fed, where a mask may narrow it."""


@dataclass(frozen=True)
class _Halves:
    """``upper`` trains on what ``lower`` makes, features of ``shape`` for one sample; ``widths`` are the unpruned sizes
    of the names in it."""

    lower: Lower
    upper: Module
    shape: tuple[Size, ...]
    widths: Mapping[str, int]


class Maker:
    """The programs of one model, made here; a :class:`~talaria.programs.source.Source`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.programs: dict[Need, tuple[bytes, Program]] = {}
        """What was made so far, and its files."""
        self.derivatives: dict[str, tuple[bytes, Vjp]] = {}
        """Likewise, by the names of their files."""
        self.others: dict[ModelSpec, Maker] = {}
        """What was asked of :meth:`beside` so far."""
        self._halves: dict[frozenset[str], _Halves | None] = {}
        self._calibrations: dict[frozenset[str], Look] = {}

    @property
    def cuts(self) -> dict[frozenset[str], Lower | None]:
        """What was asked of :meth:`lower` so far."""
        return {only: None if found is None else found.lower for only, found in self._halves.items()}

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(key for key, _ in self._module.named_parameters())

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        norms = tracked(self._module).items()
        return tuple(f"{name}.{key}" for name, layer in norms for key, _ in layer.named_buffers(recurse=False))

    @cached_property
    def falls(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, layer in self._module.named_modules():
            share: Any = getattr(layer, "dropout" if isinstance(layer, MultiheadAttention | RNNBase) else "p", None)
            if isinstance(share, int | float):  # of other layers p may be anything, as the power of a mean
                found |= dict.fromkeys([name] if draws(layer) else recurrent.places(layer, name), float(share))
        return found

    @property
    def parts(self) -> Parts:
        """The model's named inputs, where it has several."""
        return self._module.parts if isinstance(self._module, Several) else {}

    def program(self, need: Need) -> Program:
        """The program, made when it is first asked for. Raises as :func:`talaria.programs.build.packed` does."""
        if need not in self.programs:
            halves = self._cut(need.only) if need.upper and need.only is not None else None
            module = zoo.build(self.spec) if halves is None else halves.upper
            fed: dict[str, Any] = {} if halves is None else {"features": halves.shape, "widths": halves.widths}
            recipe = Recipe(
                momentum=need.momentum,
                weight_decay=need.weight_decay,
                smoothing=need.smoothing,
                accumulate=need.accumulate,
            )
            label = "all" if need.only is None else "some"
            data = packed(self.spec, module, need.only, label, recipe, pulled=need.pulled, **fed)
            self.programs[need] = data, Program(data)
        return self.programs[need][1]

    def derivative(self, only: frozenset[str] | None, taps: tuple[str, ...]) -> Vjp:
        """The derivative, made when it is first asked for, as :func:`talaria.programs.differentiate.packed` does."""
        name = f"derivative/{derivative_name(only, taps)}"
        return self._derivative(name, lambda: differentiate.packed(self.spec, only, taps))

    def twice(self, only: frozenset[str] | None) -> Vjp:
        """See :func:`talaria.programs.differentiate.curved`."""
        return self._derivative(twice_name(only), lambda: differentiate.curved(self.spec, only))

    def _derivative(self, name: str, make: Callable[[], bytes]) -> Vjp:
        if name not in self.derivatives:
            data = make()
            self.derivatives[name] = data, Vjp.read(data)
        return self.derivatives[name][1]

    def lower(self, only: frozenset[str]) -> Lower | None:
        """The frozen layers, cut off when they are first asked for."""
        halves = self._cut(only)
        return None if halves is None else halves.lower

    def calibration(self, still: frozenset[str] = frozenset()) -> Look:
        """The pass of :func:`talaria.programs.step.statistics_of`, made when it is first asked for."""
        if still not in self._calibrations:
            module = zoo.build(self.spec).requires_grad_(False).eval()
            for layer in tracked(module, still).values():
                layer.training = True
            self._calibrations[still] = Look(statistics_of(module, *self._entrance))
        return self._calibrations[still]

    def forward(self) -> Look:
        """The whole model as :func:`talaria.programs.step.answers_of` writes it."""
        return self._forward

    def served(self, task: Task, state: Tensors) -> Model:
        """The module with ``state``: what is run and exported is the same on both engines."""
        return loop.served(task, state)

    def first(self) -> Model:
        """A module of its own."""
        return zoo.build(self.spec)

    def beside(self, spec: ModelSpec) -> Maker:
        """The programs of another model, made likewise."""
        return self.others.setdefault(spec, Maker(spec))

    @cached_property
    def _module(self) -> Module:
        return zoo.build(self.spec)

    @property
    def _entrance(self) -> tuple[str, tuple[int, ...], Whole]:
        """The head's name, the shape of a sample, and the layers of which no mask takes an output."""
        return zoo.head(self.spec), self.spec.input_shape, partial(zoo.whole, self.spec)

    @cached_property
    def _forward(self) -> Look:
        module = zoo.build(self.spec).requires_grad_(False).eval()
        return Look(answers_of(module, *self._entrance))

    def _cut(self, only: frozenset[str]) -> _Halves | None:
        """The model above the lowest layer that trains and below it, or None where it cannot be cut there."""
        if only not in self._halves:
            self._halves[only] = self._halved(only)
        return self._halves[only]

    def _halved(self, only: frozenset[str]) -> _Halves | None:
        halves = halve(zoo.build(self.spec), only)
        if isinstance(halves, str):
            return None
        with torch.no_grad():
            made = halves.lower(zoo.example(self.spec))
        if made.dtype != torch.float32 or len(made) > 1:  # tokens, or parts of a sample, which features are not
            return None
        lower, full = features_of(halves.lower, *self._entrance), made.shape[1:]
        if lower is None:
            return None
        channels = lower.outputs[0].shape[1]
        named = {} if isinstance(channels, int) else {_FED: int(full[0])}
        shape = (_FED if named else full[0], *full[1:])
        return _Halves(Lower(Look(lower), 4 * int(full.numel())), halves.upper, shape, named)
