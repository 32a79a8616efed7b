"""A model's derivative, run on arrays: forward to its taps, and back from slopes there to gradients.

The graph is one (:mod:`talaria.programs.differentiate`) and is run as two: what the way back reads of the pass is kept
between them, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from talaria.errors import ModelError, WireError
from talaria.programs import onnx_file
from talaria.programs.graph import Graph, Node, Port
from talaria.programs.lookups import Lookups
from talaria.programs.program import opened, values_of
from talaria.programs.session import Session
from talaria.programs.shapes import Limits, Value, measure
from talaria.tensors import Array, Tensors, under

TAP, SLOPE, GRADIENT, NEXT = "tap/", "slope/", "gradient/", "next/weight/"
_KEPT = 64
"""Combinations of shapes whose check is remembered."""


@dataclass(frozen=True)
class Pass:
    """One batch's way forward, from which :meth:`backward` goes back."""

    taps: Tensors
    """What the model made of the batch, by tap, float32 (N, ...)."""
    moved: Tensors
    """The statistics that followed the batch, by state-dict key; the caller keeps them or not."""
    _vjp: Vjp = field(repr=False)
    _read: Mapping[str, Array] = field(repr=False)

    def backward(self, slopes: Mapping[str, Array]) -> Tensors:
        """The gradient by state-dict key of all that is trained and reaches a tap, for a loss whose gradients by the
        taps are ``slopes``. Raises :class:`~talaria.errors.ModelError` where that of a tap is missing."""
        return self._vjp.back(self._read, slopes)


class Vjp:
    """The derivative of one model at one trained part and some taps, for every mask and batch size."""

    def __init__(self, graph: Graph, limits: Limits = Limits()) -> None:
        self.graph, self.limits, self._lookups = graph, limits, Lookups(graph)
        early, late = _cut(graph)
        made = {name for node in early for name in node.outputs}
        read = dict.fromkeys(name for node in late for name in node.inputs)
        found = {name for node in late for name in node.outputs}
        self._crossing = [name for name in read if name in made]
        self._first = _part(graph, early, [port for port in graph.outputs if port.name not in found], [])
        self._second = _part(graph, late, [port for port in graph.outputs if port.name in found], self._crossing)
        self._sessions: tuple[Session, Session | None] | None = None
        self._checked: set[object] = set()

    @staticmethod
    def read(data: bytes, limits: Limits = Limits()) -> Vjp:
        """The derivative in a file. Raises :class:`~talaria.errors.WireError` for what is none, and
        :class:`~talaria.errors.TooLarge` for one beyond ``limits`` at the sizes of its test vector."""
        graph, manifest = opened(data, limits)
        _require_ports(graph)
        given, told = values_of(graph.inputs, manifest), values_of(graph.outputs, manifest)
        found = measure(graph, given, limits).outputs
        for name, value in told.items():
            if name not in found or (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
                raise WireError(f"program: {name[:80]!r} is not what it says; build it again")
        Lookups(graph).all  # noqa: B018 - which refuses what no derivative looks up
        vjp = Vjp(graph, limits)
        if any(not port.name.startswith(GRADIENT) for port in vjp._second.outputs):
            raise WireError("program: what it makes of a batch hangs on slopes; build it again")
        return vjp

    def run(self, feed: Mapping[str, Array]) -> Tensors:
        """All outputs by their names in the graph, for inputs by theirs."""
        kinds: dict[str, Tensors] = {kind: {} for kind in ("weight", "draw", "slope")}
        for name, value in feed.items():
            kind, _, key = name.partition("/")
            if kind in kinds:
                kinds[kind][key] = value
        done = self.forward(kinds["weight"], feed["x"], kinds["draw"])
        parts = ((TAP, done.taps), (NEXT, done.moved), (GRADIENT, done.backward(kinds["slope"])))
        return {prefix + name: value for prefix, found in parts for name, value in found.items()}

    def forward(self, weights: Mapping[str, Array], x: Array, draws: Mapping[str, Array] | None = None) -> Pass:
        """The pass of ``x`` float32 (N, ...) at ``weights``, a state by state-dict key as narrow as a mask says.

        ``draws`` are those of dropout, (N, ...) by layer. Raises :class:`~talaria.errors.ModelError` for a tensor that
        is missing, and what :func:`talaria.programs.shapes.measure` raises for those that do not fit.
        """
        given = {"x": np.ascontiguousarray(x)}
        given |= {f"weight/{name}": value for name, value in weights.items()}
        given |= {f"draw/{name}": value for name, value in (draws or {}).items()}
        feed = {}
        for name in (port.name for port in self.graph.inputs if not port.name.startswith(SLOPE)):
            if name not in given:
                raise ModelError(f"program: {name!r} is missing; give the whole state, and draws for dropout")
            feed[name] = given[name]
        first, _ = self._opened(feed)
        self._lookups.require_known(feed["x"])
        names = [*(port.name for port in self._first.outputs), *self._crossing]
        found = dict(zip(names, first(names, {port.name: feed[port.name] for port in self._first.inputs}), strict=True))
        kept = {name: found[name] for name in self._crossing}
        return Pass(under(found, TAP), under(found, NEXT), self, {**feed, **kept})

    def back(self, read: Mapping[str, Array], slopes: Mapping[str, Array]) -> Tensors:
        """See :meth:`Pass.backward`; ``read`` is what a pass was given and what it kept."""
        given = {**read, **{SLOPE + tap: np.ascontiguousarray(value) for tap, value in slopes.items()}}
        wanted = [port.name for port in self._second.inputs]
        missing = [name for name in wanted if name not in given]
        if missing:
            raise ModelError(f"program: {missing[0]!r} is missing; give the slope of every tap")
        feed = {name: given[name] for name in wanted}
        after = self._sessions[1] if self._sessions is not None else None
        names = [port.name for port in self._second.outputs]
        if after is None:
            return {}
        return under(dict(zip(names, after(names, feed), strict=True)), GRADIENT)

    def _opened(self, feed: Mapping[str, Array]) -> tuple[Session, Session | None]:
        """Both halves, within the limits at the shapes of ``feed``."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in feed.items())
        if self._sessions is None or shapes not in self._checked:
            given = {name: Value(value.shape, value.dtype.name) for name, value in feed.items()}
            values = measure(self._first, {p.name: given[p.name] for p in self._first.inputs}, self.limits).outputs
            slopes = {p.name: values[TAP + p.name.removeprefix(SLOPE)] for p in self.graph.inputs if p.name not in feed}
            everything = {**values, **given, **slopes}
            measure(self._second, {p.name: everything[p.name] for p in self._second.inputs}, self.limits)
            if self._sessions is None:
                ports = {name: _port(name, values[name]) for name in self._crossing}
                back = _session(self._second, ports, out=False) if self._second.outputs else None
                self._sessions = _session(self._first, ports, out=True), back
            if len(self._checked) >= _KEPT:
                self._checked.clear()
            self._checked.add(shapes)
        return self._sessions


def _require_ports(graph: Graph) -> None:
    """Raise :class:`~talaria.errors.WireError` for an input or output that no derivative has."""
    names = [port.name for port in graph.inputs]
    known = all(name == "x" or name.startswith(("weight/", "draw/", SLOPE)) for name in names)
    made = [port.name for port in graph.outputs]
    taps = {TAP + name.removeprefix(SLOPE) for name in names if name.startswith(SLOPE)}
    gives = all(name.startswith((TAP, GRADIENT, NEXT)) for name in made)
    twice = len({*names}) < len(names) or len({*made}) < len(made)
    if not known or "x" not in names or not gives or twice or not taps <= {*made}:
        raise WireError("program: its inputs and outputs are not those of a derivative; build it again")


def _cut(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The operators that no slope reaches, and those that one does."""
    reached = {port.name for port in graph.inputs if port.name.startswith(SLOPE)}
    parts: tuple[list[Node], list[Node]] = ([], [])
    for node in graph.nodes:
        late = not reached.isdisjoint(node.inputs)
        parts[late].append(node)
        if late:
            reached.update(node.outputs)
    return parts


def _part(graph: Graph, nodes: Sequence[Node], outputs: Sequence[Port], entering: Sequence[str]) -> Graph:
    """``nodes`` as a graph of their own; what enters from the other half has no sizes yet."""
    read = {name for node in nodes for name in node.inputs}
    inputs = [port for port in graph.inputs if port.name in read]
    inputs += [Port(name, "float32", ()) for name in entering]
    constants = {name: value for name, value in graph.constants.items() if name in read}
    return Graph(tuple(inputs), tuple(outputs), tuple(nodes), constants)


def _session(part: Graph, crossing: Mapping[str, Port], out: bool) -> Session:
    if out:
        outputs = {port.name: port for port in part.outputs} | dict(crossing)
        whole = Graph(part.inputs, tuple(outputs.values()), part.nodes, part.constants)
    else:
        inputs = (crossing.get(port.name, port) for port in part.inputs)
        whole = Graph(tuple(inputs), part.outputs, part.nodes, part.constants)
    return Session(onnx_file.write(whole, ""))


def _port(name: str, value: Value) -> Port:
    return Port(name, value.dtype, tuple(f"{name}:{axis}" for axis in range(len(value.shape))))
