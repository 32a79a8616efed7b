"""Preprocessing of raw recordings, put inside the exported graph so that no app can get it wrong.

A model learned from normalized windows; a sensor gives raw numbers without end. A bundle made with these steps takes
what the sensor gives: it normalizes every channel, and cuts one recording of any length into windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from talaria import inputs, recorded
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array

ELEMENTS = 1 << 25
"""Most numbers in one input, and in all the inputs that parity is proven on."""


@dataclass(frozen=True)
class Preprocessing:
    """From what a bundle takes to what its model takes: ``(x - mean) / std``, then windows.

    ``shape`` is one input of the model, channels first. ``mean`` and ``std`` have one number for all channels or one
    for each; empty, nothing is normalized. With a ``stride`` the bundle takes one recording (time, channels) of any
    length, and a window of ``shape[1]`` steps begins every ``stride`` steps; a rest that fills no window is left out,
    as in training. Raises :class:`~talaria.errors.ConfigError` on steps that have no meaning.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    stride: int | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.mean), len(self.std)}
        if len(sizes) != 1 or not sizes <= {0, 1, self.shape[0]}:
            raise ConfigError(
                f"normalize: {len(self.mean)} means and {len(self.std)} deviations for {self.shape[0]} channels; "
                "give one of each, or one per channel"
            )
        if not all(map(math.isfinite, self.mean)) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ConfigError("normalize: mean must be finite and std finite and above 0, for every channel")
        if self.stride is not None and len(self.shape) != 2:
            raise ConfigError(f"stride: inputs of shape {self.shape} are no windows (channels, steps) of a recording")
        if self.stride is not None and (type(self.stride) is not int or not 1 <= self.stride < 1 << 24):
            raise ConfigError(
                f"stride={self.stride} must be a whole number from 1 on: the steps from one window to the next"
            )

    @property
    def empty(self) -> bool:
        """True where a bundle takes exactly what its model takes."""
        return not self.mean and self.stride is None

    @property
    def windows(self) -> tuple[int, int] | None:
        """``(size, stride)`` in steps, where recordings are cut."""
        return None if self.stride is None else (self.shape[1], self.stride)

    def inputs(self, count: int) -> tuple[int, ...]:
        """The shape of what a bundle takes for ``count`` answers: a batch, or a recording just long enough."""
        if self.stride is None:
            return (count, *self.shape)
        return (self.shape[1] + self.stride * (count - 1), self.shape[0])

    def raw(self, x: Array) -> Array:
        """Model inputs (N, *shape), or such of one recording (time, channels), as they were before normalization,
        float32."""
        if not self.mean:
            return x
        mean, std = self._columns(x.ndim - 2)
        with inputs.narrowing():
            return x * std + mean

    def joined(self, x: Array) -> Array:
        """Raw inputs (N, *shape) as a bundle takes them: as they are, or one after the other as one recording."""
        return x if self.stride is None else np.ascontiguousarray(x.swapaxes(1, 2).reshape(-1, self.shape[0]))

    def apply(self, given: Array) -> Array:
        """What the graph does: from what the bundle takes, float32, to model inputs (N, *shape)."""
        if self.stride is not None:
            begins = np.arange(0, len(given) - self.shape[1] + 1, self.stride)
            given = given[begins[:, None] + np.arange(self.shape[1])].swapaxes(1, 2)
        if self.mean:
            mean, std = self._columns(given.ndim - 2)
            given = (given - mean) / std
        return np.ascontiguousarray(given)

    def to_json(self) -> dict[str, Any]:
        """The part of the manifest's ``input`` that tells these steps."""
        out: dict[str, Any] = {}
        if self.mean:
            out["normalized"] = {"mean": list(self.mean), "std": list(self.std)}
        if self.stride is not None:
            out["windows"] = {"size": self.shape[1], "stride": self.stride}
        return out

    @staticmethod
    def from_json(spec: Mapping[str, Any]) -> Preprocessing:
        """The steps that a manifest's ``input`` tells."""
        moments = spec.get("normalized", {})
        return Preprocessing(
            tuple(spec["shape"]),
            tuple(moments.get("mean", ())),
            tuple(moments.get("std", ())),
            spec.get("windows", {}).get("stride"),
        )

    def _columns(self, trailing: int) -> tuple[Array, Array]:
        moments = (np.array(self.mean, np.float32), np.array(self.std, np.float32))
        return moments[0].reshape(-1, *[1] * trailing), moments[1].reshape(-1, *[1] * trailing)


def preprocessing(
    shape: Sequence[int], normalize: tuple[object, object] | None = None, stride: int | None = None
) -> Preprocessing:
    """The steps for a model whose inputs have ``shape``; ``normalize`` is (mean, std), numbers or one per channel."""
    if normalize is not None and (not isinstance(normalize, Sequence | np.ndarray) or len(normalize) != 2):
        raise ConfigError(f"normalize={str(normalize)[:80]} must be (mean, std), each a number or one per channel")
    mean, std = ((), ()) if normalize is None else (_numbers("mean", normalize[0]), _numbers("std", normalize[1]))
    return Preprocessing(tuple(shape), mean, std, stride)


def of_file(steps: Preprocessing, x: Array) -> Array:
    """``x`` of a file as a bundle with these steps takes it: pixels, uint8, are divided by 255 where the bundle does
    not normalize, as they were before the model learned from them."""
    return x if steps.mean else recorded.scaled(x)


def inputs_of(steps: Preprocessing, x: Any) -> Array:
    """``x`` as a bundle with these steps takes it, contiguous float32: a batch, one input of it, or a recording.

    Raises :class:`~talaria.errors.DataError` on another shape, on a type that is not numeric, on NaN and infinity.
    """
    given = inputs.array_of(x, "x")
    with inputs.narrowing():
        array = np.ascontiguousarray(given, dtype=np.float32)
    if steps.stride is not None:
        size, channels = steps.shape[1], steps.shape[0]
        if array.ndim != 2 or array.shape[1] != channels or len(array) < size:
            raise DataError(
                f"x: shape {given.shape} does not fit; give one recording (time, {channels}) of at least {size} steps"
            )
    else:
        array = array.reshape(1, *given.shape) if given.ndim == len(steps.shape) else array
        if array.shape[1:] != steps.shape or len(array) == 0:
            dims = ", ".join(map(str, steps.shape))
            raise DataError(
                f"x: shape {given.shape} does not fit; give {steps.shape} for one input or (N, {dims}) for N"
            )
    with np.errstate(invalid="ignore"):  # infinities of both signs
        total = float(array.sum(dtype=np.float64))
    if not math.isfinite(total) and not np.isfinite(array).all():
        raise DataError("x: holds NaN or infinity; drop or repair that input")
    return array


def _numbers(name: str, value: object) -> tuple[float, ...]:
    try:
        found = np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise ConfigError(f"normalize: {name}={str(value)[:80]!r} is not a number or one number per channel") from None
    if not len(found):
        raise ConfigError(f"normalize: {name} is empty; give one number, or one per channel")
    return tuple(float(np.float32(number)) for number in found)
