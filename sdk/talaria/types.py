"""The frozen vocabulary: what travels between the parts. Values are valid from birth."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from talaria import inputs, recorded, tasks, valid
from talaria.errors import ConfigError, DataError, some_of
from talaria.foreign import shown
from talaria.model.masks import ChannelMask
from talaria.tensors import Array, Tensors, difference
from talaria.valid import BELOW_ONE


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled samples: ``x`` float32 (N, ...), ``y`` the targets of a task (:mod:`talaria.tasks`): int64 (N,) classes
    in 0..classes-1, int64 (N, labels) or (N, steps), or float32 (N,) or (N, targets)."""

    x: Array
    y: Array
    parts: inputs.Parts | None = field(default=None, repr=False, kw_only=True)
    """The shapes of the named inputs side by side in ``x``; None: it is one input, or nobody knows their names."""

    def __post_init__(self) -> None:
        for name, value in (("x", self.x), ("y", self.y)):
            if not isinstance(value, np.ndarray):
                raise DataError(
                    f"samples: {name} is a {type(value).__name__}; Samples.of(x, y) takes tensors and lists"
                )
        fits = self.y.dtype in (np.int64, np.float32) and self.y.ndim in (1, 2)
        if self.x.dtype != np.float32 or not fits or self.x.ndim < 1:
            raise DataError(
                f"samples: need x float32 (N, ...) and y int64 (N,), or a task's targets, got x {self.x.dtype} "
                f"{self.x.shape} and y {self.y.dtype} {self.y.shape}; Samples.of(x, y) converts what can be"
            )
        if len(self.x) != len(self.y):
            raise DataError(f"samples: {len(self.x)} inputs but {len(self.y)} labels; give one label per input")
        if not np.isfinite(self.x).all():
            bad = int(np.flatnonzero(~np.isfinite(self.x.reshape(len(self.x), -1)).all(1))[0])
            raise DataError(f"samples: x[{bad}] holds NaN or infinity; drop or repair that window")
        if self.y.dtype == np.float32 and not np.isfinite(self.y).all():
            bad = int(np.flatnonzero(~np.isfinite(self.y.reshape(len(self.y), -1)).all(1))[0])
            raise DataError(f"samples: y[{bad}] holds NaN or infinity; drop that sample, for nothing is known of it")

    @staticmethod
    def of(x: Any, y: Any, task: str = "classification") -> Samples:
        """Samples of tensors, numpy arrays or lists: numbers become float32, and whole labels int64; with
        ``task="regression"`` targets are float32. Of several named inputs ``x`` is a dict of arrays
        (:mod:`talaria.inputs`).

        Raises :class:`DataError` for what is no array of numbers, and for targets that are no classes.
        """
        numbers = tasks.of(task).name == "regression"
        named, parts = inputs.joined(x, "x") if isinstance(x, Mapping) else (x, None)
        values, given = inputs_of(named, "x"), inputs.array_of(y, "y")
        labels = given.astype(np.float32) if numbers else recorded.whole(given, "y")
        return Samples(values, np.array(labels, order="C"), parts=parts)

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        """How many there are, and of which shape: what was recorded is long, and its owner's."""
        return f"Samples({len(self)} of {self.x.shape[1:]})"

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """The samples of all ``parts``, at least one, in that order."""
        x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
        return Samples(x, y, parts=parts[0].parts)

    def take(self, index: Array) -> Samples:
        """The samples at ``index`` (int64), in that order."""
        return Samples(self.x[index], self.y[index], parts=self.parts)


def inputs_of(x: Any, name: str) -> Array:
    """Inputs float32 (N, ...) of tensors, numpy arrays, lists, or a dict of several named ones. Raises
    :class:`DataError`, beginning with ``name``, for what is no array of numbers."""
    values = inputs.joined(x, name)[0] if isinstance(x, Mapping) else inputs.array_of(x, name)
    with inputs.narrowing():
        return np.array(values, np.float32, order="C")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a device trains locally: by SGD or another optimizer, a new one in every round and phase.

    What is left out here is what a run trains with where nothing is known of its data, in Python, in ``talaria
    simulate`` and under ``[run.recipe]`` of fleet.toml alike; :mod:`talaria.data.presets` has the datasets' own.
    """

    epochs: int = 2
    batch: int = 16
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 0.0
    smoothing: float = 0.0
    steps: int | None = None
    """Optimizer steps instead of epochs, where given."""
    most_steps: int | None = None
    """Steps that one training takes at most, however many epochs or steps are asked for; None for no limit."""
    accumulate: int = 1
    """Slices that a batch is cut into when it does not fit in memory; the step is the same."""
    augment: str = "none"
    """Name of an input augmentation in :mod:`talaria.training.augment`."""
    optimizer: str = "sgd"
    """``"sgd"``, ``"nesterov"``, ``"adam"`` (D. P. Kingma and J. Ba, 2015; its first decay is
    ``momentum``, its second .999, and 1e-8 stands beside the root) or ``"adamw"`` (I. Loshchilov and F. Hutter, 2019:
    weight decay apart from the slopes)."""
    schedule: str = "constant"
    """The rate over rounds: ``"constant"``, ``"cosine"`` down towards 0, or ``"step"``, a tenth after half of the
    rounds and a hundredth after three quarters. What a device trains to be served has the rate itself, and rates that
    an algorithm has as options of its own stand as they are given."""
    warmup: int = 0
    """First rounds in which the rate grows in equal steps to its own; the schedule goes over the rounds after them."""
    clip: float = 0.0
    """Largest L2 norm of all slopes of a step together, which are shortened to it; 0 for no limit."""
    freeze: tuple[str, ...] = ()
    """Dotted names of layers that are not trained, nor what they hold, BatchNorm's statistics among it; a pattern
    (``layer*``) may stand for names."""

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch", 1), ("accumulate", 1)):
            valid.whole("recipe", name, getattr(self, name), low)
        valid.whole("recipe", "steps", self.steps, 0, none=True)
        valid.whole("recipe", "most_steps", self.most_steps, 1, none=True)
        valid.number("recipe", "lr", self.lr, "above 0, such as 0.02", low=5e-324)
        valid.number("recipe", "momentum", self.momentum, "in [0, 1)", low=0, high=BELOW_ONE)
        valid.number("recipe", "weight_decay", self.weight_decay, "at least 0", low=0)
        valid.number("recipe", "smoothing", self.smoothing, "in [0, 1)", low=0, high=BELOW_ONE)
        valid.among("recipe", "optimizer", self.optimizer, ("sgd", "nesterov", "adam", "adamw"))
        valid.among("recipe", "schedule", self.schedule, ("constant", "cosine", "step"))
        valid.whole("recipe", "warmup", self.warmup, 0)
        valid.number("recipe", "clip", self.clip, "at least 0, such as 1.0; 0 for no limit", low=0)
        if self.optimizer == "nesterov" and not self.momentum:
            raise ConfigError("recipe: momentum=0 leaves nesterov nothing to look ahead by; set it above 0, or sgd")
        freeze = self.freeze if not isinstance(self.freeze, str) else self.freeze.split(",") if self.freeze else ()
        if not isinstance(freeze, tuple | list) or not all(isinstance(name, str) and name.strip() for name in freeze):
            raise ConfigError(f"recipe: freeze={shown(self.freeze)} must be a list of dotted names of layers")
        object.__setattr__(self, "freeze", tuple(name.strip() for name in freeze))
        if not isinstance(self.augment, str):
            raise ConfigError(f"recipe: augment={shown(self.augment)} must be the name of an augmentation")

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        """The recipe whose fields ``data`` names; the others are as they stand here."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"recipe: need a table of settings such as lr = 0.02, got {shown(data)}")
        valid.only("recipe", data, [f.name for f in fields(Recipe)])
        return Recipe(**data)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what came later than the first devices only where it is not as they train."""
        plain = {f.name: getattr(self, f.name) for f in fields(Recipe)}
        later = ("optimizer", "schedule", "warmup", "clip", "freeze")
        kept = {name: value for name, value in plain.items() if name not in later or value != _LATER[name]}
        return kept | ({"freeze": list(self.freeze)} if self.freeze else {})

    @property
    def plain(self) -> bool:
        """Whether its steps are those of SGD with momentum, of any length."""
        return self.optimizer == "sgd" and not self.clip

    def at(self, round: int, rounds: int) -> Recipe:
        """The recipe of ``round``, from 1, of ``rounds``: a constant rate, the schedule's."""
        if self.schedule == "constant" and not self.warmup:
            return self
        if round <= self.warmup:
            share = round / (self.warmup + 1)
        else:
            gone = (round - 1 - self.warmup) / max(1, rounds - self.warmup)
            step = 1.0 if gone < 0.5 else 0.1 if gone < 0.75 else 0.01
            share = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * gone)) / 2, "step": step}[self.schedule]
        return self.but(lr=self.lr * max(share, 1e-6), schedule="constant", warmup=0)

    def trained(self, names: Sequence[str], only: Collection[str] | None) -> Collection[str] | None:
        """What of ``names`` is trained: those in ``only`` (None: all) that are not frozen. Raises
        :class:`~talaria.errors.ConfigError` where nothing has a name that is to be frozen."""
        if not self.freeze:
            return only
        stopped: set[str] = set()
        for pattern in self.freeze:
            own = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
            if not own:
                layers = sorted({name.rpartition(".")[0] for name in names})
                raise ConfigError(f"recipe: freeze={pattern!r} names no layer; the model has {some_of(layers, 20)}")
            stopped |= own
        return [name for name in (names if only is None else only) if name not in stopped]

    def still(self, names: Sequence[str]) -> frozenset[str]:
        """What of ``names`` is frozen. Raises as :meth:`trained`."""
        learned = self.trained(names, None)
        return frozenset() if learned is None else frozenset(names).difference(learned)

    def but(self, **changes: Any) -> Recipe:
        """A changed copy."""
        return replace(self, **changes)


_LATER = {f.name: f.default for f in fields(Recipe)}


LONGEST_NAME = 64
"""Characters of a client's name."""


@dataclass(frozen=True)
class Update:
    """What one device sends: arrays under names of the shared state, compact where ``mask`` is given.

    ``base_version`` is the version of the shared state that the device downloaded, 0 for the first
    (:func:`talaria.federated.rounds.participate` sets it). ``kind="value"`` holds new values, ``"delta"`` the
    difference to that version.
    """

    tensors: Tensors = field(repr=False)
    weight: float
    client: str = "device"
    base_version: int = 0
    kind: Literal["value", "delta"] = "value"
    mask: ChannelMask | None = field(default=None, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float | np.number) or not 0 < self.weight <= sys.float_info.max:
            raise ConfigError(f"update of {self.client!r}: weight={shown(self.weight)} must be finite and above 0")
        if not isinstance(self.metrics, Mapping) or not all(isinstance(name, str) for name in self.metrics):
            raise ConfigError(
                f"update of {self.client!r}: metrics={shown(self.metrics)} must be numbers by their names"
            )
        if self.kind not in ("value", "delta"):
            raise ConfigError(f"update of {self.client!r}: kind={self.kind!r} must be 'value' or 'delta'")
        for name, value in self.tensors.items():
            if not isinstance(value, np.ndarray):
                raise ConfigError(
                    f"update of {self.client!r}: {name!r} is a {type(value).__name__}, need a numpy array; "
                    "talaria.model.state.to_arrays makes them of torch's tensors"
                )

    def but(self, **changes: Any) -> Update:
        """A changed copy."""
        return replace(self, **changes)


def as_delta(update: Update, downloaded: Tensors, answered: Collection[str] = ()) -> Update:
    """The same update as a difference to the (compact) shared tensors that the device had downloaded.

    What only the server says, ``answered``, comes back as zeros, also here: less what was downloaded, it would be
    beyond any bound."""
    if update.kind == "delta":
        return update
    steps = {k: np.zeros_like(v) if k in answered else difference(v, downloaded[k]) for k, v in update.tensors.items()}
    return update.but(tensors=steps, kind="delta")
