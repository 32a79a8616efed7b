"""What a program says of itself: for which model and part, at which sizes, how exact it was, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from talaria.errors import WireError
from talaria.foreign import parsed, shown
from talaria.programs.graph import Size, size_of

VERSION = 2
ROUNDINGS = 16 * 2.0**-23
"""Of float32, sixteen: right results may lie so far apart, as where torch adds BatchNorm's statistics in float64."""
KINDS = ("gradient", "momentum", "tap", "weight")
"""What the outputs of a program are: of a step momenta and weights (the loss, one number, is judged among them), of a
derivative taps, gradients and weights that follow."""
_NOTE_BYTES = 1 << 16
_LARGEST = 1 << 24
_FAR = 1e300
"""Beyond all that float32 gives; a whole number may be larger than a float can be."""


@dataclass(frozen=True)
class Manifest:
    """The facts of one program.

    ``sizes`` are the widths of the unpruned model and the batch of the test vector; ``vector`` is its number among
    those that can be drawn. ``parity`` is the error of one step against float64
    (:func:`talaria.programs.vector.distance`) of the program and of torch in float32. ``expected`` has the float64
    ``(projection, norm)`` of each kind of output on the test vector.
    """

    model: Mapping[str, Any]
    trained: str
    recipe: Mapping[str, float]
    classes: int
    sizes: Mapping[str, int]
    vector: int
    parity: Mapping[str, float]
    expected: Mapping[str, tuple[float, float]]
    made_with: Mapping[str, str]

    @property
    def allowed(self) -> float:
        """The largest error against float64: twice torch's own in float32, but not less than sixteen roundings."""
        return max(2 * self.parity["torch"], ROUNDINGS)

    @property
    def exact(self) -> bool:
        """Whether the program errs no more than is allowed."""
        return self.parity["program"] <= self.allowed

    def size(self, label: Size) -> int:
        """A size of a port as a number."""
        return size_of(label, self.sizes)

    def text(self) -> str:
        """The JSON that stands in the file; :func:`read` is the inverse."""
        return json.dumps({"format": VERSION, **vars(self)}, sort_keys=True, separators=(",", ":"))


def read(text: str) -> Manifest:
    """The manifest of a program's file. Raises :class:`~talaria.errors.WireError` for any field that is not right."""
    if len(text) > _NOTE_BYTES:
        raise WireError(f"program: its manifest has {len(text)} bytes, at most {_NOTE_BYTES} are read; build it again")
    try:
        data = parsed(text)
    except ValueError as why:
        raise WireError(f"program: its manifest is no JSON ({str(why)[:80]}); build it again") from None
    if not isinstance(data, dict) or data.get("format") != VERSION:
        found = shown(data.get("format")) if isinstance(data, dict) else "none"
        raise WireError(f"program: is of format {found}, this version reads {VERSION}; build it again")
    rest = {name: value for name, value in data.items() if name != "format"}
    if rest.keys() != _RULES.keys():
        odd = sorted(shown(name, 20) for name in rest.keys() ^ _RULES.keys())[:6]
        raise WireError(f"program: its manifest lacks or adds {', '.join(odd)}; build it again")
    for name, good in _RULES.items():
        if not good(rest[name]):
            raise WireError(f"program: its manifest's {name}={shown(rest[name])} cannot be; build it again")
    expected = {kind: (float(one[0]), float(one[1])) for kind, one in rest["expected"].items()}
    return Manifest(**{**rest, "expected": expected})


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FAR


def _table(value: object, good: Any, names: tuple[str, ...] | None = None) -> bool:
    return (
        isinstance(value, dict) and (names is None or {*value} == {*names}) and all(good(one) for one in value.values())
    )


def _pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_number(one) for one in value) and value[1] >= 0


_RULES: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, dict),
    "trained": lambda value: isinstance(value, str),
    "recipe": lambda value: _table(value, _number, ("momentum", "smoothing", "weight_decay")),
    "classes": _whole,
    "sizes": lambda value: _table(value, _whole),
    "vector": lambda value: value == 0 or _whole(value),
    "parity": lambda value: _table(value, lambda one: _number(one) and one >= 0, ("program", "torch")),
    "expected": lambda value: (
        _table(value, _pair) and not {*value}.isdisjoint(("weight", "tap")) and {*value} <= {*KINDS}
    ),
    "made_with": lambda value: _table(value, lambda one: isinstance(one, str)),
}
