"""A source of programs that were made elsewhere: what a device trains with where torch is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from talaria.errors import ConfigError, WireError
from talaria.inputs import Parts
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model, Served, Weights
from talaria.programs.look import Look
from talaria.programs.program import Program
from talaria.programs.shapes import Limits
from talaria.programs.source import Lower, Need, derivative_name, model_name, name_of, twice_name
from talaria.programs.vjp import Vjp
from talaria.tensors import Array, Tensors
from talaria.training.interface import Task


@dataclass(frozen=True)
class Given:
    """Programs by the names of their needs, opened when they are first asked for, and within ``limits``; a
    :class:`~talaria.programs.source.Source`.

    ``files`` are named ``program/...``, ``derivative/...``, ``twice`` (where some is frozen ``twice/...``),
    ``lower/...``, ``forward`` and ``calibration``.
    ``cuts`` has the bytes of one sample's features, or None where the model cannot be cut, by
    :func:`~talaria.programs.source.name_of` what trains.
    """

    parameters: frozenset[str]
    statistics: tuple[str, ...]
    falls: Mapping[str, float]
    cuts: Mapping[str, int | None]
    files: Mapping[str, bytes] = field(repr=False)
    limits: Limits = field(default_factory=Limits)
    others: Mapping[str, Given] = field(default_factory=dict, repr=False)
    """The models that an algorithm trains beside this one, by :func:`~talaria.programs.source.model_name`."""
    state: Tensors = field(default_factory=dict, repr=False)
    """The model's first weights, where it is one of these."""
    parts: Parts = field(default_factory=dict, repr=False)
    """The model's named inputs, where it has several."""
    _programs: dict[Need, Program] = field(default_factory=dict, repr=False)
    _derivatives: dict[str, Vjp] = field(default_factory=dict, repr=False)
    _lowers: dict[frozenset[str], Lower | None] = field(default_factory=dict, repr=False)

    def program(self, need: Need) -> Program:
        """The program of this need. Raises :class:`~talaria.errors.ConfigError` where none was given."""
        if need not in self._programs:
            self._programs[need] = Program(self._file(f"program/{need.name}"), self.limits)
        return self._programs[need]

    def derivative(self, only: frozenset[str] | None, taps: tuple[str, ...]) -> Vjp:
        """The derivative of this trained part and these taps. Raises as :meth:`program`."""
        return self._derivative(f"derivative/{derivative_name(only, taps)}")

    def twice(self, only: frozenset[str] | None) -> Vjp:
        """See :class:`~talaria.programs.source.Source`."""
        return self._derivative(twice_name(only))

    def _derivative(self, name: str) -> Vjp:
        if name not in self._derivatives:
            self._derivatives[name] = Vjp.read(self._file(name), self.limits)
        return self._derivatives[name]

    def lower(self, only: frozenset[str]) -> Lower | None:
        """What feeds the part that trains ``only``."""
        if only not in self._lowers:
            name = name_of(only)
            if name not in self.cuts:
                raise self._lacks(f"lower/{name}")
            each = self.cuts[name]
            self._lowers[only] = None if each is None else Lower(self._features(f"lower/{name}"), each)
        return self._lowers[only]

    def calibration(self, still: frozenset[str] = frozenset()) -> Look:
        """That of the run that the kit is for; see :class:`~talaria.programs.source.Source`."""
        return self._calibration

    def forward(self) -> Look:
        """See :class:`~talaria.programs.source.Source`."""
        return self._forward

    def served(self, task: Task, state: Tensors) -> Served:
        """The weights and the graph that gives their logits."""
        return self.whole(state)

    def whole(self, state: Tensors) -> Served:
        """As :meth:`served`, of the weights alone."""
        looks = list[Look]()

        def logits(x: Array) -> Array:
            if not looks:
                looks.append(self._forward.held(state, x))
            return looks[0]({"x": x}, state)["features"]

        return Served(state, logits, self.parameters, lambda: self._forward.fixed(state), self.parts)

    @cached_property
    def _calibration(self) -> Look:
        return self._look("calibration")

    @cached_property
    def _forward(self) -> Look:
        return self._features("forward")

    def first(self) -> Model:
        """The first weights."""
        return Weights(self.state)

    def beside(self, spec: ModelSpec) -> Given:
        """See :class:`~talaria.programs.source.Source`."""
        name = model_name(spec)
        if name not in self.others:
            raise self._lacks(f"beside/{name}")
        return self.others[name]

    def _look(self, name: str) -> Look:
        return Look.read(self._file(name), self.limits)

    def _features(self, name: str) -> Look:
        look = self._look(name)
        if [port.name for port in look.graph.outputs] != ["features"]:
            raise WireError(f"graph: {name[:24]!r} gives no features, or more; make the kit again")
        return look

    def _file(self, name: str) -> bytes:
        if name not in self.files:
            raise self._lacks(name)
        return self.files[name]

    def _lacks(self, name: str) -> ConfigError:
        return ConfigError(
            f"kit: holds no {name[:24]!r}, which this device's plan or samples need; make it again with "
            "`talaria programs kit`, or install talaria[torch]"
        )
