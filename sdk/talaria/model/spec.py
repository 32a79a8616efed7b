"""What names a model: pure data that travels in plans and bundles, and from which any device rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from talaria.errors import ConfigError
from talaria.model.adapters import AdapterSpec

LARGEST_INPUT = 1 << 24
"""Most values one input may hold: a bound on what a spec from outside can make us allocate."""
MOST_CLASSES = 1 << 16


@dataclass(frozen=True)
class ModelSpec:
    """``name`` of a zoo model, ``input_shape`` without the batch, ``classes``, optional ``adapters``.

    ``seed`` decides the initial weights, so that all devices of a run start from the same ones;
    ``pretrained`` takes published weights where the zoo has them (the new head still follows ``seed``).
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    adapters: AdapterSpec | None = None
    seed: int = 0
    pretrained: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"model: name={self.name!r} must be the name of a zoo model")
        if not isinstance(self.input_shape, (tuple, list)) or not self.input_shape:
            raise ConfigError(f"model: input_shape={self.input_shape!r} must be a tuple of sizes without the batch")
        shape = tuple(self.input_shape)
        if not all(_whole(n) and n > 0 for n in shape) or len(shape) > 4 or prod(shape) > LARGEST_INPUT:
            raise ConfigError(
                f"model: input_shape={shape!r} must be 1 to 4 positive sizes of at most {LARGEST_INPUT} values"
            )
        object.__setattr__(self, "input_shape", shape)
        if not _whole(self.classes) or not 2 <= self.classes <= MOST_CLASSES:
            raise ConfigError(f"model: classes={self.classes!r} must be a whole number in 2..{MOST_CLASSES}")
        if not _whole(self.seed) or not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"model: seed={self.seed!r} must be a whole number in 0..2**63-1")
        if self.adapters is not None and not isinstance(self.adapters, AdapterSpec):
            raise ConfigError(f"model: adapters={self.adapters!r} must be an AdapterSpec or None")
        if not isinstance(self.pretrained, bool):
            raise ConfigError(f"model: pretrained={self.pretrained!r} must be true or false")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        return {
            "name": self.name,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "adapters": None if self.adapters is None else self.adapters.to_json(),
            "seed": self.seed,
            "pretrained": self.pretrained,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The spec that :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` on a missing or unknown
        field and on any invalid value."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"model: need an object with name, input_shape and classes, got {type(data).__name__}")
        known = {"name", "input_shape", "classes", "adapters", "seed", "pretrained"}
        missing, odd = {"name", "input_shape", "classes"} - set(data), set(data) - known
        if missing or odd:
            raise ConfigError(f"model: fields missing {sorted(missing)}, unknown {sorted(map(str, odd))}")
        fields = dict(data)
        if isinstance(fields["input_shape"], list):
            fields["input_shape"] = tuple(fields["input_shape"])
        if fields.get("adapters") is not None:
            fields["adapters"] = AdapterSpec.from_json(fields["adapters"])
        return cls(**fields)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
