"""What a device can spare: limits with their units in the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from talaria import shares, valid
from talaria.errors import ConfigError
from talaria.foreign import shown

_SIZES = {"_mb": 1.0, "_kb": 1e-3, "_bytes": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that a plan must keep; None sets no limit. 1 MB is 1,000,000 bytes.

    Latencies are for one input on one core, in CPU time. ``latency_ratio`` is to the unpruned model on the same
    device. A round's ``train_s`` and ``energy_j`` are for all its local steps.
    """

    latency_ms: float | None = None
    latency_ratio: float | None = None
    run_memory_mb: float | None = None
    """Weights and the live activations of one input, at their peak."""
    train_memory_mb: float | None = None
    """Weights, gradients, SGD's momenta and saved activations, at their peak. Adam holds what is trained once more."""
    bundle_mb: float | None = None
    """The models in the deployed bundle: the one that is served, and the fp32 form where both fit. What proves them
    comes on top, some kilobytes."""
    upload_mb: float | None = None
    """One update, before compression."""
    train_s: float | None = None
    """CPU seconds of training per round."""
    energy_j: float | None = None
    """Joules of training per round; needs the profile's ``watts``."""
    accuracy_drop: float | None = None
    """Share of accuracy, such as 0.01 for one point, that the planned model may lose against its dense twin, the same
    model with all its channels, learned from the same samples. No planner knows it without samples, so it is measured
    (:class:`AccuracyCheck`): by the Personalizer, by ``talaria plan --data``, and by the agent before it deploys."""

    def __post_init__(self) -> None:
        for name, value in self.limits().items():
            valid.number("budget", name, value, "a finite number", low=-1e300)
            if name == "accuracy_drop":
                if not 0 <= value < 1:
                    raise ConfigError(f"budget: accuracy_drop={value!r} must be in [0, 1), such as 0.01 for one point")
            elif value <= 0:
                raise ConfigError(f"budget: {name}={value!r} must be above 0; leave it out for no limit")
        if self.latency_ratio is not None and self.latency_ratio > 1:
            raise ConfigError(
                f"budget: latency_ratio={self.latency_ratio} allows more than the unpruned model takes; "
                "give at most 1, or leave it out"
            )
        run, train = self.run_memory_mb, self.train_memory_mb
        if run is not None and train is not None and train < run:
            raise ConfigError(
                f"budget: train_memory_mb={train} is below run_memory_mb={run}, but training runs the model as well; "
                f"nearest possible: train_memory_mb={run}"
            )

    @property
    def limits_latency(self) -> bool:
        """Whether latency is limited, which only a measured device can plan for."""
        return self.latency_ms is not None or self.latency_ratio is not None

    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def broken(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The limits that ``figures``, by the same names, do not keep, with the value that would be; of what has no
        figure nothing is known."""
        known = {name: limit for name, limit in self.limits().items() if name in figures}
        return {name: figures[name] for name, limit in known.items() if figures[name] > limit * (1 + 1e-9)}

    @property
    def words(self) -> str:
        """The limits as a plan's reasons tell them."""
        return ", ".join(f"{name}={value:g}" for name, value in self.limits().items()) or "no limits"

    def refused(self, nearest: Mapping[str, float]) -> str:
        """That limits cannot be kept, each with the ``nearest`` that can."""
        told = (
            f"{name}={self.limits()[name]:g} is impossible, nearest possible {name}={need:g}"
            for name, need in nearest.items()
        )
        return "; ".join(told)

    def to_json(self) -> dict[str, float]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        return self.limits()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        """The budget that :meth:`to_json` wrote. Raises :class:`ConfigError` on an unknown limit or a wrong value."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"budget: need a table of limits such as latency_ms, got {shown(data)}")
        odd = sorted(map(str, set(data) - {f.name for f in fields(cls)}))
        if odd:
            raise ConfigError(f"budget: {odd[0][:80]!r} is unknown; use {', '.join(f.name for f in fields(cls))}")
        return cls(**data)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Budget:
        """A budget from texts such as ``latency_ms=5``; sizes may be given in ``_mb``, ``_kb`` or ``_bytes``.

        >>> Budget.parse(["latency_ratio=0.5", "upload_kb=200"])
        Budget(latency_ms=None, latency_ratio=0.5, ..., upload_mb=0.2, ...)
        """
        found: dict[str, float] = {}
        for text in texts:
            for one in filter(None, (part.strip() for part in text.split(","))):
                name, _, value = one.partition("=")
                try:
                    number = float(value)
                except ValueError:
                    raise ConfigError(f"budget: {one!r} must read NAME=NUMBER, such as latency_ms=5") from None
                for suffix, factor in _SIZES.items():
                    if name.endswith(suffix):
                        name, number = name.removesuffix(suffix) + "_mb", number * factor
                        break
                if name in found:
                    raise ConfigError(f"budget: {name} is given twice; give it once")
                found[name] = number
        return cls.from_json(found)


@dataclass(frozen=True)
class AccuracyCheck:
    """What a plan cost in accuracy: shares in [0, 1] that the planned model and its dense twin label right, on the same
    ``samples`` held-out samples, against the ``allowed`` loss. One sample more or less moves it by ``1 / samples``. Of
    another task than classification, both are its scores."""

    planned: float
    dense: float
    allowed: float
    samples: int

    @property
    def drop(self) -> float:
        """The accuracy lost; negative where the planned model is the better one."""
        return self.dense - self.planned

    @property
    def _lost(self) -> float:
        """Samples that were lost: whole ones where the figures are shares of them; another task's score has parts."""
        return round(self.drop * self.samples, 6)

    @property
    def kept(self) -> bool | None:
        """Whether the limit is kept; None without held-out samples, on which it cannot be told."""
        return self._lost <= 0 or shares.at_most(self._lost, self.samples, self.allowed) if self.samples else None

    @property
    def nearest(self) -> float:
        """The smallest ``accuracy_drop``, in tenths of a point, that this model keeps."""
        return min(0.999, -(-self._lost * 1000 // max(1, self.samples)) / 1000)

    @property
    def left(self) -> float:
        """What may still be lost, such as by rounding weights; at least 0."""
        return max(0.0, self.allowed - self.drop)

    @property
    def reason(self) -> str:
        if self.kept is None:
            return f"accuracy_drop={self.allowed:g} cannot be checked without held-out samples"
        return f"accuracy_drop={self.allowed:g} is {'kept' if self.kept else 'broken'}: {self.measured}"

    @property
    def measured(self) -> str:
        """Both shares, as they are told, whatever is allowed."""
        return f"{self.planned:.4f} against {self.dense:.4f} of the unpruned model on {self.samples} held-out samples"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for bundles and reports."""
        told = ("planned", "dense", "drop", "allowed", "left", "samples", "kept", "reason")
        return {name: getattr(self, name) for name in told}
