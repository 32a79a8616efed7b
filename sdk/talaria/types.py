"""The frozen vocabulary: what travels between the parts. Values are valid from birth."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import Module

from talaria import recorded, seeds, valid
from talaria.errors import ConfigError, DataError, ModelError
from talaria.foreign import shown

Tensors = dict[str, Tensor]
"""A flat dict of named tensors. Every state is one, and so is one safetensors file."""

BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""

Part = Literal["body", "adapters", "head"]
Buffers = Literal["local", "aggregate"]


@dataclass(frozen=True)
class Split:
    """Which part of a model each state-dict key belongs to; exact keys, disjoint, covering all.

    ``statistics`` are the floating-point buffers (BatchNorm running mean and variance) among those keys:
    they stay on the device under ``buffers="local"``. ``counters`` are the integer buffers: they never travel.
    """

    body: tuple[str, ...]
    adapters: tuple[str, ...]
    head: tuple[str, ...]
    statistics: frozenset[str] = frozenset()
    counters: frozenset[str] = frozenset()
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        keys = [*self.body, *self.adapters, *self.head]
        if len(keys) != len(set(keys)):
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise ModelError(f"split: {twice} belong to more than one part; give each key to one part")
        stray = (self.statistics | self.counters) - set(keys)
        if stray:
            raise ModelError(f"split: buffers {sorted(stray)} belong to no part; give each key to one part")
        if self.buffers not in ("local", "aggregate"):
            raise ConfigError(f"buffers={self.buffers!r} is unknown; use 'local' or 'aggregate'")

    @property
    def keys(self) -> tuple[str, ...]:
        """All state-dict keys, body first."""
        return (*self.body, *self.adapters, *self.head)

    def of(self, *parts: Part) -> tuple[str, ...]:
        """All keys of the named parts, buffers included."""
        return tuple(k for part in parts for k in getattr(self, part))

    def parameters(self, *parts: Part) -> tuple[str, ...]:
        """The trainable keys of the named parts."""
        return tuple(k for k in self.of(*parts) if k not in self.statistics and k not in self.counters)

    def travels(self, *parts: Part) -> tuple[str, ...]:
        """The keys of the named parts that may leave the device under the buffer policy."""
        kept_home = self.counters if self.buffers == "aggregate" else self.counters | self.statistics
        return tuple(k for k in self.of(*parts) if k not in kept_home)

    def stays(self, *parts: Part) -> tuple[str, ...]:
        """Every key that does not travel when the named parts are shared."""
        gone = set(self.travels(*parts))
        return tuple(k for k in self.keys if k not in gone)


Axis = tuple[tuple[str, int], ...]
"""One dimension of a tensor as segments ``(group, repeat)``: each channel of the group spans ``repeat``
neighbouring positions (a flattened map) and segments follow one another (a concatenation). ``()`` is a
dimension that no mask touches."""


@dataclass(frozen=True)
class ChannelLayout:
    """Which channel group rules each dimension of each tensor of the *unpruned* model.

    ``sizes[group]`` is the group's channel count; ``axes[key][d]`` is dimension ``d`` of tensor ``key``.
    Tensors without an entry are never masked.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, tuple[Axis, ...]]

    def full(self) -> ChannelMask:
        """The mask that keeps every channel."""
        return ChannelMask(self, {g: tuple(range(n)) for g, n in self.sizes.items()})


@dataclass(frozen=True)
class ChannelMask:
    """The kept channels of each group, as ascending indices into the unpruned model (global coordinates)."""

    layout: ChannelLayout = field(repr=False)
    kept: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if set(self.kept) != set(self.layout.sizes):
            odd = sorted(set(self.kept) ^ set(self.layout.sizes))
            raise ModelError(f"mask: groups {odd} do not match the model's; rebuild the mask from this model's layout")
        for group, kept in self.kept.items():
            size = self.layout.sizes[group]
            ascending = all(a < b for a, b in pairwise(kept))
            if not kept or not ascending or kept[0] < 0 or kept[-1] >= size:
                raise ModelError(
                    f"mask: group {group!r} must keep ascending channels within 0..{size - 1} and at least one, "
                    f"got {list(kept)[:8]}{'...' if len(kept) > 8 else ''}"
                )

    @cached_property
    def indices(self) -> dict[str, tuple[Tensor | None, ...]]:
        """Per masked tensor and dimension, the kept positions (int64, ascending), or None for all of them."""
        return {key: tuple(self._positions(axis) for axis in axes) for key, axes in self.layout.axes.items()}

    def _positions(self, axis: Axis) -> Tensor | None:
        if all(len(self.kept[g]) == self.layout.sizes[g] for g, _ in axis):
            return None
        out, offset = [], 0
        for group, repeat in axis:
            base = torch.tensor(self.kept[group], dtype=torch.int64) * repeat + offset
            out.append((base[:, None] + torch.arange(repeat)).flatten())
            offset += self.layout.sizes[group] * repeat
        return torch.cat(out)

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of the kept channels: equal masks, equal digests."""
        text = ";".join(f"{g}:{','.join(map(str, k))}" for g, k in sorted(self.kept.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_full(self) -> bool:
        return all(len(k) == self.layout.sizes[g] for g, k in self.kept.items())

    def within(self, other: ChannelMask) -> bool:
        """True where everything kept here is kept there."""
        return all(set(k) <= set(other.kept[g]) for g, k in self.kept.items())


@dataclass(frozen=True)
class Samples:
    """Labelled samples: ``x`` float32 (N, ...), ``y`` int64 (N,) in 0..classes-1."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        for name, value in (("x", self.x), ("y", self.y)):
            if not isinstance(value, Tensor):
                raise DataError(f"samples: {name} is a {type(value).__name__}; Samples.of(x, y) takes arrays and lists")
        if self.x.dtype != torch.float32 or self.y.dtype != torch.int64 or self.y.dim() != 1 or self.x.dim() < 1:
            raise DataError(
                f"samples: need x float32 (N, ...) and y int64 (N,), got x {self.x.dtype} {tuple(self.x.shape)} "
                f"and y {self.y.dtype} {tuple(self.y.shape)}; Samples.of(x, y) converts what can be"
            )
        if len(self.x) != len(self.y):
            raise DataError(f"samples: {len(self.x)} inputs but {len(self.y)} labels; give one label per input")
        if not bool(torch.isfinite(self.x).all()):
            bad = int((~torch.isfinite(self.x.flatten(1)).all(1)).nonzero()[0, 0])
            raise DataError(f"samples: x[{bad}] holds NaN or infinity; drop or repair that window")

    @staticmethod
    def of(x: Any, y: Any) -> Samples:
        """Samples of tensors, numpy arrays or lists: numbers become float32, and whole labels int64.

        Raises :class:`DataError` for what is no array of numbers, and for targets that are no classes.
        """
        values, labels = _array(x, "x"), recorded.whole(_array(y, "y"), "y")
        with np.errstate(over="ignore"):
            return Samples(torch.from_numpy(np.array(values, np.float32)), torch.from_numpy(np.array(labels)))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Samples:
        """The samples at ``index`` (int64), in that order."""
        return Samples(self.x[index], self.y[index])


def _array(values: Any, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().float() if values.dtype == torch.bfloat16 else values.detach().cpu()
    elif isinstance(values, list | tuple) and any(isinstance(value, Tensor) for value in values):
        values = [np.asarray(value) for value in values]
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{name}: is no array ({str(error)[:120]}); give samples of one shape") from None
    if found.dtype.kind not in "bfiu":
        raise DataError(f"{name}: holds {found.dtype}, need numbers; turn texts and categories into numbers first")
    return found


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a device trains locally: SGD, a new optimizer in every round and phase.

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

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch", 1), ("accumulate", 1)):
            valid.whole("recipe", name, getattr(self, name), low)
        valid.whole("recipe", "steps", self.steps, 0, none=True)
        valid.whole("recipe", "most_steps", self.most_steps, 1, none=True)
        valid.number("recipe", "lr", self.lr, "above 0, such as 0.02", low=5e-324)
        valid.number("recipe", "momentum", self.momentum, "in [0, 1)", low=0, high=BELOW_ONE)
        valid.number("recipe", "weight_decay", self.weight_decay, "at least 0", low=0)
        valid.number("recipe", "smoothing", self.smoothing, "in [0, 1)", low=0, high=BELOW_ONE)
        if not isinstance(self.augment, str):
            raise ConfigError(f"recipe: augment={shown(self.augment)} must be the name of an augmentation")

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        """The recipe whose fields ``data`` names; the others are as they stand here."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"recipe: need a table of settings such as lr = 0.02, got {shown(data)}")
        valid.only("recipe", data, [f.name for f in fields(Recipe)])
        return Recipe(**data)

    def but(self, **changes: Any) -> Recipe:
        """A changed copy."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the planner chose for one device. Data that travels and is stored in the bundle.

    ``widths[group]`` is the number of channels to keep per group (groups not named keep all). ``reasons`` say in
    words why each choice was made, by the name of the choice; ``predicted`` are figures by name with their unit.
    """

    widths: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    adapter: str | None = None
    """Kind of adapter beside frozen layers, or None for none."""
    rank: int | None = None
    """Rank of the adapters, or None for their full width."""
    trained: tuple[Part, ...] = ("body", "adapters", "head")
    """Parts of the model that train, and so travel; the rest is frozen."""
    batch: int | None = None
    """Samples per optimizer step, or None for the recipe's own."""
    accumulate: int = 1
    """Slices that a batch is cut into so that it fits in memory; never fewer than the recipe's own."""
    steps: int | None = None
    """Optimizer steps that fit into one training of a round, or None for no limit. What asks for fewer takes fewer."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """How the bundle stores weights; int8 is only ever chosen by measuring the exported model."""
    codec: str = "raw"
    """How updates travel, unless the run's own codec is smaller."""
    accuracy_drop: float | None = None
    """Share of accuracy, such as 0.01 for one point, that may be lost against the unpruned model; None sets no limit.
    It is measured on held-out samples where the model is made, not predicted."""
    model: Mapping[str, Any] | None = None
    """The model that the plan is for, as :meth:`talaria.model.spec.ModelSpec.to_json` gives it, or None for any."""
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "steps", "rank"):
            valid.whole("plan", name, getattr(self, name), 1, none=name != "accumulate")
        for name in ("widths", "reasons", "predicted"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"plan: {name}={shown(getattr(self, name))} must be a table")
        for group, width in self.widths.items():
            valid.whole("plan", f"widths[{shown(group)}]", width, 1)
        for name, number in self.predicted.items():
            valid.number("plan", f"predicted[{shown(name)}]", number, "a finite number", low=-1e300)
        for name in ("adapter", "codec"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "adapter"):
                raise ConfigError(f"plan: {name}={shown(value)} must be text")
        if self.model is not None and not isinstance(self.model, Mapping):
            raise ConfigError(f"plan: model={shown(self.model)} must be what ModelSpec.to_json() gives")
        valid.among("plan", "precision", self.precision, ("fp32", "fp16"))
        parts = ("body", "adapters", "head")
        if not self.trained or not all(isinstance(part, str) and part in parts for part in self.trained):
            raise ConfigError(f"plan: trained={shown(self.trained)} must name parts among body, adapters and head")
        if self.accuracy_drop is not None:
            rule = "in [0, 1), such as 0.01 for one point"
            valid.number("plan", "accuracy_drop", self.accuracy_drop, rule, low=0, high=BELOW_ONE)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse. Equal plans, equal text."""
        return {
            "widths": dict(sorted(self.widths.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "adapter": self.adapter,
            "rank": self.rank,
            "trained": list(self.trained),
            "batch": self.batch,
            "accumulate": self.accumulate,
            "steps": self.steps,
            "precision": self.precision,
            "codec": self.codec,
            "accuracy_drop": self.accuracy_drop,
            "model": None if self.model is None else dict(self.model),
            "predicted": dict(sorted(self.predicted.items())),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote, or the whole document that ``talaria plan --json`` prints around it.

        Raises :class:`ConfigError` on an unknown field or a wrong value.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"plan: need an object, got {type(data).__name__}; print one with `talaria plan --json`")
        if "plan" in data:
            return cls._from_document(data)
        valid.only("plan", data, [f.name for f in fields(cls)])
        trained = data.get("trained", ("body", "adapters", "head"))
        if not isinstance(trained, list | tuple):
            raise ConfigError(f"plan: trained={shown(trained)} must name parts among body, adapters and head")
        return cls(**{**data, "trained": tuple(trained)})

    @classmethod
    def _from_document(cls, data: Mapping[str, Any]) -> Plan:
        odd = sorted(map(str, set(data) - {"plan", "model", "machine", "checked"}))
        if odd or not isinstance(data["plan"], Mapping) or "plan" in data["plan"]:
            raise ConfigError(
                f"plan: is no document of `talaria plan --json` (unknown: {shown(odd[:8])}); print it again"
            )
        made = cls.from_json(data["plan"])
        model = data.get("model")
        if model is not None and not isinstance(model, Mapping):
            raise ConfigError(f"plan: model={shown(model)} is no model's description; print the plan again")
        if made.model is not None and model is not None and dict(model) != dict(made.model):
            raise ConfigError("plan: the document names another model than its plan; print it again")
        return made


@dataclass(frozen=True)
class Task:
    """What one device works on in one round.

    ``model`` is one scratch module, already as small as ``mask`` says: it is loaded before each use, never
    deep-copied. All tensors given to an algorithm beside this task are compact in the same way.
    """

    model: Module = field(repr=False)
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
    newcomer: bool = False
    """True where this device is served without ever having taken part."""

    def generator(self, purpose: str) -> Generator:
        """A generator of its own for each (seed, client, round, purpose)."""
        return seeds.generator(self.seed, self.client, self.round, purpose)

    def but(self, **changes: Any) -> Task:
        """A changed copy."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Update:
    """What one device sends: tensors under names of the shared state, compact where ``mask`` is given.

    ``base`` is the version of the shared state that the device downloaded, 0 for the first
    (:func:`talaria.federated.rounds.participate` sets it). ``kind="value"`` holds new values, ``"delta"`` the
    difference to that version.
    """

    tensors: Tensors = field(repr=False)
    weight: float
    client: str = "device"
    base: int = 0
    kind: Literal["value", "delta"] = "value"
    mask: ChannelMask | None = field(default=None, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 < self.weight < float("inf")):
            raise ConfigError(f"update of {self.client!r}: weight={self.weight} must be finite and above 0")
        if self.kind not in ("value", "delta"):
            raise ConfigError(f"update of {self.client!r}: kind={self.kind!r} must be 'value' or 'delta'")

    def but(self, **changes: Any) -> Update:
        """A changed copy."""
        return replace(self, **changes)
