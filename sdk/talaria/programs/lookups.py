"""What a graph looks up in tables: which numbers of a batch are places there, and whether they are all known.

It is read off the graph, so that no file has to say it: places lead back to ``x`` by operators that only move values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from talaria.errors import DataError, WireError
from talaria.programs.graph import MOVES, Graph, Node
from talaria.tensors import Array

_BEFORE = (*MOVES, "Cast")


@dataclass(frozen=True)
class Lookup:
    """A table of ``entries`` rows, and the way from ``x`` to the places in it."""

    entries: int
    way: tuple[tuple[Node, tuple[tuple[int, ...], ...]], ...]
    """Operators with their further inputs, up to the last one that leaves values out."""

    def places(self, x: Array) -> Array:
        """Those among the numbers of ``x`` (N, ...) that are looked up."""
        for node, numbers in self.way:
            x = _moved(node, x, numbers)
        return x


@dataclass(frozen=True)
class Lookups:
    """All lookups of a graph that has been measured (:func:`talaria.programs.shapes.measure`): its operators have the
    inputs that they need, each made before it is read.

    Raises :class:`~talaria.errors.WireError` where places come from elsewhere than ``x``."""

    graph: Graph

    @cached_property
    def all(self) -> tuple[Lookup, ...]:
        """Each once."""
        makers = {name: node for node in self.graph.nodes for name in node.outputs}
        found = dict[Lookup, None]()
        for node in self.graph.nodes:
            if node.kind in ("Gather", "ScatterND") and not self._known(node.inputs[1], makers):
                found[Lookup(self._entries(node, makers), self._way(node.inputs[1], makers))] = None
        return tuple(found)

    def require_known(self, x: Array) -> None:
        """Raise :class:`~talaria.errors.DataError` where a table lacks an entry for a number of ``x`` (N, ...)."""
        for lookup in self.all:
            places = lookup.places(x)
            low, high = float(places.min()), float(places.max())
            if not (low > -1 and high < lookup.entries):  # NaN too
                raise DataError(
                    f"x: {low:g}..{high:g} is looked up in a table of {lookup.entries} entries; give whole numbers "
                    f"0..{lookup.entries - 1}, and standardize=false (--data-option) so that they stay as they are"
                )

    def _known(self, places: str, makers: dict[str, Node]) -> bool:
        """Whether they stand in the file, or are a sum of what does."""
        made = makers.get(places)
        if made is not None and made.kind == "Add":
            return all(self._known(one, makers) for one in made.inputs)
        return places in self.graph.constants

    def _entries(self, node: Node, makers: dict[str, Node]) -> int:
        table = node.inputs[0]
        made = makers.get(table)
        ports = {port.name: port.shape for port in self.graph.inputs}
        shape: object = ()
        if table in ports:
            shape = ports[table]
        elif table in self.graph.constants:
            shape = self.graph.constants[table].shape
        elif made is not None and made.kind == "Expand" and made.inputs[1] in self.graph.constants:
            shape = tuple(self.graph.constants[made.inputs[1]].tolist())
        first = shape[0] if isinstance(shape, tuple) and shape else None
        if not isinstance(first, int) or node.get("axis", 0) != 0:
            raise WireError(f"program: {node.kind} looks up places in what is no table; build it again")
        return first

    def _way(self, places: str, makers: dict[str, Node]) -> tuple[tuple[Node, tuple[tuple[int, ...], ...]], ...]:
        way = list[tuple[Node, tuple[tuple[int, ...], ...]]]()
        while places != "x":
            node = makers.get(places)
            if node is None or node.kind not in _BEFORE or any(i not in self.graph.constants for i in node.inputs[1:]):
                raise WireError("program: it looks up places that are no part of a batch; build it again")
            numbers = [self.graph.constants[name] for name in node.inputs[1:]]
            way.append((node, tuple(tuple(np.atleast_1d(one).tolist()) for one in numbers)))
            places = node.inputs[0]
        while way and way[0][0].kind != "Slice":
            way.pop(0)
        return tuple(reversed(way))


def _moved(node: Node, x: Array, numbers: tuple[tuple[int, ...], ...]) -> Array:
    if node.kind == "Reshape":
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(numbers[0])])
    if node.kind == "Flatten":
        return x.reshape(int(np.prod(x.shape[: node.get("axis")])), -1)
    if node.kind == "Transpose":
        return x.transpose(node.get("perm"))
    if node.kind == "Unsqueeze":
        return np.expand_dims(x, numbers[0])
    if node.kind == "Slice":
        cuts = [slice(None)] * x.ndim
        for start, end, axis, step in zip(*numbers, strict=True):
            cuts[axis] = slice(start, end, step)
        return x[tuple(cuts)]
    return x
