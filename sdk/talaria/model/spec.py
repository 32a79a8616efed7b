"""What names a model: pure data that travels in plans and bundles, and from which any device rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.valid import by_item, only, plain

LARGEST_INPUT = 1 << 24
"""Most values one input may hold: a bound on what a spec from outside can make us allocate."""
MOST_CLASSES = 1 << 16
KINDS = ("lowrank", "residual", "heart")
LARGEST_RANK = 4096


@dataclass(frozen=True)
class AdapterSpec:
    """What adapters a model has: ``kind``, ``rank`` (None for full width; ``lowrank`` needs one), ``where``, ``head``.

    ``where`` holds dotted prefixes whose components may be patterns (``layer*.*.conv1``); ``()`` means every layer
    that can take the adapter, without the head. ``rank`` is cut to what a layer can use. ``head`` is the rank of a
    zoo model's head in two factors (:func:`factored`), for many classes; None leaves it whole.
    """

    kind: str
    rank: int | None = None
    where: tuple[str, ...] = ()
    nonlinear: bool = False
    head: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"adapters: kind={shown(self.kind)} is unknown; use one of {', '.join(KINDS)}")
        for name, rank in (("rank", self.rank), ("head", self.head)):
            whole = isinstance(rank, int) and not isinstance(rank, bool)
            if rank is not None and not (whole and 1 <= rank <= LARGEST_RANK):
                raise ConfigError(
                    f"adapters: {name}={shown(rank)} must be a whole number in 1..{LARGEST_RANK}, or None"
                )
        if self.kind == "lowrank" and self.rank is None:
            raise ConfigError("adapters: kind='lowrank' needs a rank, such as rank=8")
        if self.kind == "heart" and self.rank is not None:
            raise ConfigError(f"adapters: kind='heart' has full width; leave rank={self.rank} out")
        if not isinstance(self.nonlinear, bool) or (self.nonlinear and (self.kind != "residual" or self.rank is None)):
            raise ConfigError(
                f"adapters: nonlinear={shown(self.nonlinear)} needs kind='residual' with a rank; "
                f"without a bottleneck there is nothing between"
            )
        where = (self.where,) if isinstance(self.where, str) else self.where
        if not isinstance(where, (tuple, list)) or not all(isinstance(p, str) and p for p in where):
            raise ConfigError(f"adapters: where={shown(self.where)} must be a tuple of dotted layer names")
        object.__setattr__(self, "where", tuple(where))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        own = {"kind": self.kind, "rank": self.rank, "where": list(self.where), "nonlinear": self.nonlinear}
        return own if self.head is None else {**own, "head": self.head}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterSpec:
        """The spec that :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` on any invalid field."""
        if not isinstance(data, Mapping) or "kind" not in data:
            raise ConfigError("adapters: need an object with at least 'kind'")
        odd = set(data) - {"kind", "rank", "where", "nonlinear", "head"}
        if odd:
            raise ConfigError(
                f"adapters: {shown(min(map(str, odd)))} is unknown; it has rank, where, nonlinear and head"
            )
        where = data.get("where", [])
        if not isinstance(where, (list, tuple)):
            raise ConfigError(f"adapters: where={shown(where)} must be a list of dotted layer names")
        return cls(**{**data, "where": tuple(where)})


@dataclass(frozen=True)
class ModelSpec:
    """``name`` of a zoo model, of an entry point in ``talaria.models``, or ``module:factory``, which is called as the
    zoo's are: ``factory(input_shape, classes, **options)``. ``input_shape`` is without the batch; ``classes`` are the
    outputs of another task than classification.

    ``seed`` decides the initial weights, so that all devices of a run start from the same ones;
    ``pretrained`` takes published weights where the zoo has them (the new head still follows ``seed``).
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    adapters: AdapterSpec | None = None
    seed: int = 0
    pretrained: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the model's factory: given as a table, kept in the order of their names."""
    head: str | None = None
    """The dotted name of the last layer; None: the zoo's own, of others ``head``, or the last Linear layer."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"model: name={shown(self.name)} must be the name of a zoo model")
        if not isinstance(self.input_shape, (tuple, list)) or not self.input_shape:
            raise ConfigError(
                f"model: input_shape={shown(self.input_shape)} must be a tuple of sizes without the batch"
            )
        shape = tuple(map(_python, self.input_shape))
        if not all(_whole(n) and n > 0 for n in shape) or len(shape) > 4 or prod(shape) > LARGEST_INPUT:
            raise ConfigError(
                f"model: input_shape={shown(shape)} must be 1 to 4 positive sizes of at most {LARGEST_INPUT} values"
            )
        object.__setattr__(self, "input_shape", shape)
        object.__setattr__(self, "classes", _python(self.classes))
        if not _whole(self.classes) or not 1 <= self.classes <= MOST_CLASSES:
            raise ConfigError(f"model: classes={shown(self.classes)} must be a whole number in 1..{MOST_CLASSES}")
        if not _whole(self.seed) or not 0 <= self.seed < 1 << 63:
            mend = by_item(self.seed)
            raise ConfigError(f"model: seed={shown(self.seed)} must be a whole number in 0..2**63-1{mend}")
        if self.adapters is not None and not isinstance(self.adapters, AdapterSpec):
            raise ConfigError(f"model: adapters={shown(self.adapters)} must be an AdapterSpec or None")
        if not isinstance(self.pretrained, bool):
            raise ConfigError(f"model: pretrained={shown(self.pretrained)} must be true or false")
        if not isinstance(self.options, Mapping | tuple | list):
            raise ConfigError(f"model: options={shown(self.options)} must be a table of the factory's arguments")
        try:
            options = dict(self.options)
        except (TypeError, ValueError):
            raise ConfigError(f"model: options={shown(self.options)} must be a table of names and values") from None
        for name, value in options.items():
            if not isinstance(name, str) or not plain(value):
                raise ConfigError(
                    f"model: options[{shown(name)}]={shown(value)} must be a number or text{by_item(value)}"
                )
        object.__setattr__(self, "options", tuple(sorted(options.items())))
        if self.head is not None and (not isinstance(self.head, str) or not self.head):
            raise ConfigError(f"model: head={shown(self.head)} must be the dotted name of a layer, or left out")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse. ``options`` and ``head`` only where set."""
        more: dict[str, Any] = {"options": dict(self.options)} if self.options else {}
        more |= {} if self.head is None else {"head": self.head}
        return {
            "name": self.name,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "adapters": None if self.adapters is None else self.adapters.to_json(),
            "seed": self.seed,
            "pretrained": self.pretrained,
            **more,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The spec that :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` on a missing or unknown
        field and on any invalid value."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"model: need an object with name, input_shape and classes, got {type(data).__name__}")
        known = {"name", "input_shape", "classes", "adapters", "seed", "pretrained", "options", "head"}
        only("model", data, known)
        if missing := {"name", "input_shape", "classes"} - set(data):
            raise ConfigError(f"model: fields missing {sorted(missing)}; give them")
        fields = dict(data)
        if isinstance(fields["input_shape"], list):
            fields["input_shape"] = tuple(fields["input_shape"])
        if fields.get("adapters") is not None:
            fields["adapters"] = AdapterSpec.from_json(fields["adapters"])
        return cls(**fields)


def _python(value: Any) -> Any:
    """A whole number of numpy's, such as ``y.max() + 1``, as Python's; everything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
