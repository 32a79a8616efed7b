"""Where an engine has its programs from: they are made of the module where torch is, or given as files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from talaria.model.spec import ModelSpec
from talaria.model.weights import Model
from talaria.programs.look import Look
from talaria.programs.program import Program
from talaria.programs.vjp import Vjp
from talaria.tensors import Tensors
from talaria.training.interface import Task
from talaria.types import Recipe


@dataclass(frozen=True)
class Need:
    """Which program is needed: one that trains the keys ``only`` (None: all) by SGD with these settings, ``pulled``
    towards an anchor or not, on inputs or, where it is the ``upper`` part alone, on features."""

    only: frozenset[str] | None
    momentum: float
    weight_decay: float
    smoothing: float
    accumulate: int
    pulled: bool = False
    upper: bool = False

    @classmethod
    def of(cls, recipe: Recipe, only: Collection[str] | None, *, pulled: bool = False, upper: bool = False) -> Need:
        """What ``recipe`` needs to train ``only``."""
        numbers = (float(recipe.momentum), float(recipe.weight_decay), float(recipe.smoothing))
        return cls(None if only is None else frozenset(only), *numbers, recipe.accumulate, pulled, upper)

    @property
    def name(self) -> str:
        """Hex sha256 of all that it says: equal needs, equal names."""
        return _digest(asdict(self) | {"only": None if self.only is None else sorted(self.only)})


def name_of(only: Iterable[str]) -> str:
    """Hex sha256 of some keys, in whatever order."""
    return _digest(sorted(only))


def derivative_name(only: Iterable[str] | None, taps: Iterable[str]) -> str:
    """Hex sha256 of a trained part and some taps."""
    return _digest([None if only is None else sorted(only), list(taps)])


def twice_name(only: Iterable[str] | None) -> str:
    """The file of a trained part's derivative with its own derivative."""
    return "twice" if only is None else f"twice/{name_of(only)}"


def model_name(spec: ModelSpec) -> str:
    """Hex sha256 of a model's specification."""
    return _digest(spec.to_json())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Lower:
    """The frozen layers below all that trains: ``look`` makes ``features`` of inputs, ``bytes_each`` of one sample in
    the unpruned model."""

    look: Look
    bytes_each: int


class Source(Protocol):
    """The programs and facts of one model."""

    @property
    def parameters(self) -> frozenset[str]:
        """The keys that training may change."""
        ...

    @property
    def statistics(self) -> tuple[str, ...]:
        """The keys of BatchNorm's statistics and counters."""
        ...

    @property
    def falls(self) -> Mapping[str, float]:
        """The share of values that falls away, by dropout layer."""
        ...

    def program(self, need: Need) -> Program:
        """The program of this need. Raises :class:`~talaria.errors.ConfigError` where there is none."""
        ...

    def derivative(self, only: frozenset[str] | None, taps: tuple[str, ...]) -> Vjp:
        """The model's derivative at what ``only`` trains (None: all) and ``taps``. Raises as :meth:`program`."""
        ...

    def twice(self, only: frozenset[str] | None) -> Vjp:
        """The derivative of what ``only`` trains (None: all) at the logits, with its own derivative. Raises as
        :meth:`program`."""
        ...

    def lower(self, only: frozenset[str]) -> Lower | None:
        """What feeds the part that trains ``only``, or None where the model cannot be cut below it."""
        ...

    def calibration(self, still: frozenset[str] = frozenset()) -> Look:
        """One batch's part in the estimate of BatchNorm's statistics, all but those that are ``still``."""
        ...

    def forward(self) -> Look:
        """The model in eval mode: ``features`` are its answers of ``x``, (N, outputs) or (N, steps, outputs)."""
        ...

    def served(self, task: Task, state: Tensors) -> Model:
        """What a device runs."""
        ...

    def first(self) -> Model:
        """The model with its first weights."""
        ...

    def beside(self, spec: ModelSpec) -> Source:
        """Those of another model, which an algorithm trains beside this one. Raises as :meth:`program`."""
        ...
