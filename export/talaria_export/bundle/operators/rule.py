"""What a rule is given and what it tells: shapes, and numbers where they are few and may become a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KNOWN_VALUES = 4096
"""Most numbers of a value that are followed, because they may become a shape."""

Shape = tuple[int, ...]
Number = int | float


@dataclass(frozen=True)
class Value:
    """A tensor's shape and, where it is small and known, its numbers in order."""

    shape: Shape
    numbers: tuple[Number, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """An operator as it stands in the file."""

    kind: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Unknown(Exception):  # noqa: N818 - caught where a graph is measured
    """A shape that cannot be told, with the reason."""


Found = tuple[list[Value], int]
"""All outputs, and how many products they took."""
Rule = Callable[[Node, list[Value]], Found]
Rules = dict[tuple[str, str], Rule]
"""By domain, without ``ai.onnx``, and name."""


def group(rule: Rule, names: str) -> Rules:
    """The operators, of ONNX itself or of ``domain:``, that keep this rule."""
    out = {}
    for name in names.split():
        domain, _, kind = name.rpartition(":")
        out[{"ms": "com.microsoft", "nchwc": "com.microsoft.nchwc", "": ""}[domain], kind] = rule
    return out


def single(shape: Sequence[int], work: int = 0, numbers: tuple[Number, ...] | None = None) -> Found:
    """One output."""
    return [Value(tuple(shape), numbers)], work


def numbers_of(value: Value, what: str = "it is computed from the input") -> tuple[Number, ...]:
    """Raises :class:`Unknown`, with ``what``, where they are not known."""
    if value.numbers is None:
        raise Unknown(what)
    return value.numbers


def ints(value: Value) -> list[int]:
    """As :func:`numbers_of`, whole."""
    return [int(n) for n in numbers_of(value)]


def listed(node: Node, given: list[Value], name: str, place: int) -> list[int] | None:
    """What older operators say as an attribute and newer ones as an input."""
    if len(given) > place and node.inputs[place]:
        return ints(given[place])
    found = node.attributes.get(name)
    return None if found is None else list(found)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape of what is computed number by number; raises ValueError where these do not go together."""
    rank = max(map(len, shapes))
    out = []
    for sizes in zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise ValueError(f"shapes {shapes} do not go together")
        out.append(wide.pop() if wide else 1)
    return tuple(out)
