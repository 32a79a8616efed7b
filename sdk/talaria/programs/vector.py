"""The test vector of a program: inputs drawn by rule, so that the file need not hold them, and what comes out in short.

Draws are the raw words of numpy's Philox, keyed by the sha256 of the vector's number and the input's name: the same
everywhere, for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from talaria.programs.graph import INT, Graph, Port
from talaria.programs.lookups import Lookups
from talaria.programs.manifest import Manifest
from talaria.tensors import Array

BATCH = 5
"""Samples of the vector: odd, and more than one, so that BatchNorm takes its statistics."""
ABOVE_ZERO = 4
"""From this number on, a vector's tensors that do not learn are above zero, as those of whose product a network takes
the logarithm are."""
_NUMBERS = {"lr": 1.0, "pull": 0.25}
"""The learning rate of the vector is high, so that errors of gradients show in the weights."""


def inputs(graph: Graph, manifest: Manifest) -> dict[str, Array]:
    """An array for each input of a program, at the sizes of its manifest."""
    shapes = {port: tuple(map(manifest.size, port.shape)) for port in graph.inputs}
    drawn = {port.name: _drawn(port, shape, manifest.classes, manifest.vector) for port, shape in shapes.items()}
    if manifest.vector >= ABOVE_ZERO:
        drawn |= {name: np.abs(drawn[name]) for name in still(graph)}
    tokens = np.zeros(drawn["x"].shape, np.float32)  # how many entries the tables have of what is looked up there
    for lookup in sorted(Lookups(graph).all, key=lambda one: -one.entries):
        np.put(tokens, lookup.places(np.arange(tokens.size).reshape(tokens.shape)), lookup.entries)
    even = np.clip((drawn["x"] / np.float32(math.sqrt(3)) + 1) / 2, 0, 1 - 2**-23)
    return drawn | {"x": np.where(tokens > 0, np.floor(even * tokens), drawn["x"]).astype(np.float32)}


def still(graph: Graph) -> list[str]:
    """The weights that do not learn, by their names in the graph."""
    learned = {port.name.rpartition("/")[2] for port in graph.outputs}  # next/weight/, gradient/, gradient/along/
    names = (port.name for port in graph.inputs if port.name.startswith("weight/"))
    return [name for name in names if name.rpartition("/")[2] not in learned]


def _drawn(port: Port, shape: tuple[int, ...], classes: int, vector: int) -> Array:
    count, kind, key = math.prod(shape), port.name.partition("/")[0], f"{vector}/{port.name}"
    if port.name in _NUMBERS:
        return np.array(_NUMBERS[port.name], np.float32)
    if port.name == "y":
        return (_words(key, count) % np.uint64(classes)).astype(np.int64).reshape(shape)
    if port.dtype == INT:
        return np.full(shape, 3, np.int64)
    even = (_words(key, count) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    if kind == "draw" or (kind == "weight" and len(shape) < 2):  # scales and variances are above zero
        value = 0.5 + even
    elif kind == "momentum":
        value = (2 * even - 1) / 64
    else:
        value = (2 * even - 1) * math.sqrt(3 / (math.prod(shape[1:]) if kind in ("weight", "anchor") else 1))
    return value.astype(np.float32).reshape(shape)


def _words(name: str, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def kind_of(output: str) -> str:
    """``momentum`` or ``weight`` of a step, whose loss counts among the weights, as of one number torch's own error is
    luck; ``gradient``, ``tap`` or ``weight`` of a derivative."""
    first = output.partition("/")[0]
    return first if first in ("gradient", "tap") else "momentum" if output.startswith("next/momentum/") else "weight"


def projections(outputs: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    """``(sum under drawn signs, euclidean norm)`` in float64, over all outputs of a kind."""
    found: dict[str, tuple[float, float]] = {}
    for name, value in outputs.items():
        flat = np.asarray(value, np.float64).reshape(-1)
        signs = (_words(f"sign/{name}", len(flat)) >> np.uint64(63)).astype(np.float64) * 2 - 1
        total, square = found.get(kind_of(name), (0.0, 0.0))
        found[kind_of(name)] = (total + float(signs @ flat), square + float(flat @ flat))
    return {kind: (total, math.sqrt(square)) for kind, (total, square) in found.items()}


def distance(outputs: Mapping[str, Array], exact: Mapping[str, Array]) -> float:
    """The norm of the difference to ``exact`` over its norm, of the kind of output where it is largest; where all that
    is exact is zero, as a gradient behind steps, the difference itself."""
    apart: dict[str, tuple[float, float]] = {}
    for name, value in exact.items():
        wanted = np.asarray(value, np.float64)
        error = np.asarray(outputs[name], np.float64) - wanted
        square, whole = apart.get(kind_of(name), (0.0, 0.0))
        apart[kind_of(name)] = (square + float((error * error).sum()), whole + float((wanted * wanted).sum()))
    return max(math.sqrt(square / (whole or 1.0)) for square, whole in apart.values())


def deviation(found: Mapping[str, tuple[float, float]], expected: Mapping[str, tuple[float, float]]) -> float:
    """How far projections lie from those expected, over the norm: about the error of all values together, as signs that
    are drawn add errors up like a walk. Infinite where a kind is missing or not finite."""
    if found.keys() != expected.keys():
        return math.inf
    apart = [abs(found[kind][0] - total) / (norm or 1.0) for kind, (total, norm) in expected.items()]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf
