"""Runs a bundle with numpy and onnxruntime alone.

>>> predictor = Predictor("me.talaria")                      # doctest: +SKIP
>>> predictor(window).label                                  # doctest: +SKIP
'walk'
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from talaria import inputs
from talaria.errors import BundleError, ConfigError, DataError, StateError
from talaria.foreign import shown
from talaria.tensors import Array
from talaria_export.bundle.archive import Limits
from talaria_export.bundle.bundle import Bundle, open_bundle
from talaria_export.bundle.preprocess import Preprocessing, inputs_of
from talaria_export.runtime.session import CPU, Session, session_of

SHOWN = 6
"""Inputs whose answer a Prediction shows when it is printed."""
_ANSWERS = {"regression": "values", "multilabel": "said", "per_step": "steps"}
"""What a Prediction has of each task beside classification."""


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """The answer for a batch of N inputs; everything in it comes from one bundle."""

    logits: Array = field(repr=False)
    """float32 (N, classes)."""
    names: tuple[str, ...] = field(repr=False)
    """The label of each class."""
    bundle: str
    """Digest of the bundle that answered."""
    task: str = "classification"
    """What the model says of an input (:mod:`talaria.tasks`)."""

    def __repr__(self) -> str:
        """What was answered, of the first inputs."""
        what = _ANSWERS.get(self.task.partition(":")[0], "labels")
        found = getattr(self, what)
        first = found[:SHOWN].tolist() if isinstance(found, np.ndarray) else list(found[:SHOWN])
        more = f", ... of {len(found)}" if len(found) > SHOWN else ""
        return f"Prediction({what}={first}{more}, bundle={self.bundle[:12]!r})"

    @property
    def values(self) -> Array:
        """Of a regression, the numbers (N, targets), in the targets' own units."""
        self._require("values", "regression")
        return self.logits

    @property
    def said(self) -> tuple[tuple[str, ...], ...]:
        """Of several labels, those that each input has."""
        self._require("said", "multilabel")
        return tuple(tuple(name for name, on in zip(self.names, row, strict=True) if on) for row in self.logits > 0)

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """Of a sequence, the likeliest label of each step."""
        self._require("steps", "per_step")
        return tuple(tuple(self.names[i] for i in row) for row in self.logits.argmax(axis=-1))

    def _require(self, what: str, task: str) -> None:
        own = self.task.partition(":")[0]
        if own != task:
            raise ConfigError(f"{what}: this bundle's task is {self.task!r}; use {_ANSWERS.get(own, 'label, labels')}")

    @property
    def index(self) -> Array:
        """The likeliest class of each input, int64 (N,)."""
        self._require("index", "classification")
        return np.asarray(self.logits.argmax(axis=1))

    @property
    def labels(self) -> tuple[str, ...]:
        """The likeliest label of each input."""
        self._require("labels", "classification")
        return tuple(self.names[i] for i in self.index)

    @property
    def probabilities(self) -> Array:
        """Softmax of the logits, float32 (N, classes)."""
        self._require("probabilities", "classification")
        with np.errstate(under="ignore"):
            powers = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    @property
    def label(self) -> str:
        """The label of the only input; with more than one, a :class:`~talaria.errors.ConfigError`."""
        self._require("label", "classification")
        if len(self.logits) != 1:
            raise ConfigError(f"label: this prediction holds {len(self.logits)} inputs; use labels")
        return self.labels[0]


def _side_by_side(bundle: Bundle, given: Mapping[str, Any]) -> Array:
    if not bundle.parts:
        raise DataError(f"x: is {len(given)} named inputs, and the model takes one array {bundle.shape}; give that")
    return inputs.fitting(given, bundle.parts)


@dataclass(frozen=True)
class _Loaded:
    bundle: Bundle
    session: Session
    steps: Preprocessing


class Predictor:
    """Serves one bundle at a time, from any number of threads.

    ``variant`` names another than the bundle's default; ``threads`` is the number of cores that one call may use (1 is
    the best choice on a machine with other work); ``providers`` are ONNX Runtime's, in order of preference; ``trust``
    is the public key that must have signed every bundle. Raises :class:`~talaria.errors.BundleError` on a bundle that
    is not sound and :class:`~talaria.errors.ConfigError` on options that this machine cannot serve.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        variant: str | None = None,
        threads: int = 1,
        providers: Sequence[str] = (CPU,),
        trust: str | bytes | None = None,
        limits: Limits = Limits(),
    ) -> None:
        chosen = (providers,) if isinstance(providers, str) else providers
        if not isinstance(chosen, Sequence) or not all(isinstance(name, str) for name in chosen):
            raise ConfigError(f"providers={shown(providers)} must be names of ONNX Runtime's, such as [{CPU!r}]")
        self._options: dict[str, Any] = {"threads": threads, "providers": tuple(chosen)}
        self._variant = variant
        self._trust = trust
        self._limits = limits
        self._swapping = threading.Lock()
        self._previous: _Loaded | None = None
        self._current = self._load(path)

    def __call__(self, x: Any) -> Prediction:
        """Classifies one input of the bundle's shape, or a batch of them (N, ...), given as numbers of any type.

        A bundle of several named inputs takes a dict of arrays, by their names. A bundle that cuts recordings
        (``steps.windows``) takes one recording (time, channels) and gives an answer per window. Raises
        :class:`~talaria.errors.DataError` on an input that does not fit or is not finite.
        """
        loaded = self._current  # read once: a swap in between cannot mix two bundles
        given = inputs_of(loaded.steps, _side_by_side(loaded.bundle, x) if isinstance(x, Mapping) else x)
        return Prediction(loaded.session(given), loaded.bundle.labels, loaded.bundle.digest, loaded.bundle.task)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input of the model."""
        return self._current.bundle.shape

    @property
    def steps(self) -> Preprocessing:
        """What is done to an input before the model: normalization, and cutting into windows."""
        return self._current.steps

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each class."""
        return self._current.bundle.labels

    @property
    def card(self) -> Mapping[str, Any]:
        """The model card of the bundle being served."""
        card: Mapping[str, Any] = self._current.bundle.manifest["card"]
        return card

    @property
    def digest(self) -> str:
        """Digest of the bundle being served."""
        return self._current.bundle.digest

    def swap(self, path: str | os.PathLike[str]) -> None:
        """Serves another bundle from now on. It is checked and warmed up first: if that fails, nothing changes.

        Calls that are under way finish on the bundle they began with. A bundle that takes other inputs is refused
        with a :class:`~talaria.errors.ConfigError`: its callers would send it the wrong thing.
        """
        loaded = self._load(path)
        with self._swapping:
            old, new = self._current.steps, loaded.steps
            if self._current.bundle.task != loaded.bundle.task:
                raise ConfigError(
                    f"swap: {os.fspath(path)} is for {loaded.bundle.task}, this predictor serves "
                    f"{self._current.bundle.task}; make a new Predictor"
                )
            here, there = dict(self._current.bundle.parts), dict(loaded.bundle.parts)
            if here != there:
                raise ConfigError(
                    f"swap: {os.fspath(path)} takes the inputs {inputs.told(there) or 'of one array'}, this predictor "
                    f"serves {inputs.told(here) or 'one array'}; make a new Predictor"
                )
            if (old.shape, old.windows, bool(old.mean)) != (new.shape, new.windows, bool(new.mean)):
                raise ConfigError(
                    f"swap: {os.fspath(path)} takes {_taken(new)}, this predictor serves {_taken(old)}; "
                    "make a new Predictor"
                )
            self._previous, self._current = self._current, loaded

    def rollback(self) -> None:
        """Goes back to the bundle before the last swap; a second rollback returns to the swapped one.

        Raises :class:`~talaria.errors.StateError` where there was no swap.
        """
        with self._swapping:
            if self._previous is None:
                raise StateError("rollback: no bundle was swapped in yet, so there is none to go back to")
            self._previous, self._current = self._current, self._previous

    def _load(self, path: str | os.PathLike[str]) -> _Loaded:
        bundle = open_bundle(path, self._limits, trust=self._trust)
        session, steps = session_of(bundle, self._variant, **self._options), bundle.steps
        answer = session(np.zeros(steps.inputs(1), np.float32))  # warms up, and proves that the shapes fit
        if len(answer) != 1 or answer.ndim > 3 or answer.shape[-1] != len(bundle.labels):
            raise BundleError(f"{bundle.path}: its model gives {answer.shape} for {len(bundle.labels)} labels")
        return _Loaded(bundle, session, steps)


def _taken(steps: Preprocessing) -> str:
    what = f"{'raw' if steps.mean else 'plain'} inputs of shape {steps.shape}"
    return what if steps.stride is None else f"{what} from recordings, one every {steps.stride} steps"
