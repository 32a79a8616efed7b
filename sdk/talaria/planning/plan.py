"""The plan of one device: what the planner chose for it, as data that travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from talaria import valid
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.model.split import WHOLE, Part
from talaria.valid import BELOW_ONE


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
    trained: tuple[Part, ...] = WHOLE
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
        parts = self.trained if isinstance(self.trained, tuple | list) else ()
        if not parts or not all(isinstance(part, str) and part in WHOLE for part in parts):
            raise ConfigError(f"plan: trained={shown(self.trained)} must name parts among body, adapters and head")
        if self.accuracy_drop is not None:
            rule = "in [0, 1), such as 0.01 for one point"
            valid.number("plan", "accuracy_drop", self.accuracy_drop, rule, low=0, high=BELOW_ONE)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse. Equal plans, equal text."""
        return {
            **vars(self),
            "widths": dict(sorted(self.widths.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "trained": list(self.trained),
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
        trained = data.get("trained", WHOLE)
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
