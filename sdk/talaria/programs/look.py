"""A graph that only looks: no weight of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from talaria.errors import ModelError, WireError
from talaria.programs import onnx_file
from talaria.programs.graph import Graph, held
from talaria.programs.lookups import Lookups
from talaria.programs.session import Session
from talaria.programs.shapes import Limits, Value, measure
from talaria.tensors import Array, Tensors

_WORTH_HOLDING = 10**9
"""Multiply-adds of a batch from which on a pass holds its weights as constants."""
_KEPT = 64
"""Combinations of shapes whose check is remembered."""


@dataclass(frozen=True)
class Look:
    """Run on some inputs and a state, it gives its outputs by name; what is run is measured first, and refused beyond
    ``limits``."""

    graph: Graph
    limits: Limits = field(default_factory=Limits)
    _checked: set[object] = field(default_factory=set, repr=False, compare=False)
    _repaid: dict[object, bool] = field(default_factory=dict, repr=False, compare=False)
    """Whether weights are held as constants, by shapes."""

    @staticmethod
    def read(data: bytes, limits: Limits = Limits()) -> Look:
        """The graph in a file. Raises :class:`~talaria.errors.WireError` for what is none."""
        graph, _ = onnx_file.read(data)
        if len(graph.nodes) > limits.nodes:
            raise WireError(f"graph: {len(graph.nodes)} operators, at most {limits.nodes} are run; make it again")
        return Look(graph, limits)

    def write(self) -> bytes:
        """The file that :meth:`read` reads."""
        return onnx_file.write(self.graph, "")

    def __call__(self, given: Mapping[str, Array], state: Tensors) -> dict[str, Array]:
        names = [port.name for port in self.graph.outputs]
        if not names:  # the statistics of a BatchNorm that no pass calls
            return {}
        feed = {**self._of(state), **given}
        self._fits(feed)
        self._lookups.require_known(feed["x"])
        read = {port.name: feed[port.name] for port in self.graph.inputs}  # statistics of every call need no rate
        return dict(zip(names, self._session(names, read), strict=True))

    def fixed(self, state: Tensors) -> Graph:
        """This graph with the weights of one state as constants."""
        return held(self.graph, self._of(state))

    def held(self, state: Tensors, x: Array) -> Look:
        """This graph for one state: with its weights as constants where batches like ``x`` are work enough to repay
        ONNX Runtime's preparing of them, and at the widths of its depthwise convolutions in any case."""
        weights = self._of(state)
        shapes = tuple((name, value.shape, value.dtype.name) for name, value in {**weights, "x": x}.items())
        repays = self._repaid.get(shapes)
        if repays is None:
            sizes = {name: Value(shape, dtype) for name, shape, dtype in shapes}
            graph = held(self.graph, weights)
            given = {port.name: sizes[port.name] for port in graph.inputs}
            large = measure(graph, given, self.limits).multiply_adds > _WORTH_HOLDING
            grouped = any(node.get("group", 1) > 1 for node in self.graph.nodes)  # also where a mask leaves one channel
            if len(self._repaid) >= _KEPT:
                self._repaid.clear()
            repays = self._repaid[shapes] = large or grouped
        return Look(held(self.graph, weights), self.limits) if repays else self

    def _of(self, state: Tensors) -> dict[str, Array]:
        try:
            return {name: state[name.removeprefix("weight/")] for name in self._weights}
        except KeyError as why:
            raise ModelError(f"graph: {why} is missing in the state; give the whole state of this model") from None

    def _fits(self, feed: Mapping[str, Array]) -> None:
        shapes = tuple((name, value.shape, value.dtype.name) for name, value in feed.items())
        if shapes in self._checked:
            return
        given = {name: Value(shape, dtype) for name, shape, dtype in shapes}
        odd = [port.name for port in self.graph.inputs if port.name not in given]
        if odd:
            raise ModelError(f"graph: {odd[0]!r} is missing; give inputs and the whole state")
        measure(self.graph, {port.name: given[port.name] for port in self.graph.inputs}, self.limits)
        if len(self._checked) >= _KEPT:
            self._checked.clear()
        self._checked.add(shapes)

    @cached_property
    def _lookups(self) -> Lookups:
        return Lookups(self.graph)

    @cached_property
    def _weights(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.graph.inputs if port.name.startswith("weight/"))

    @cached_property
    def _session(self) -> Session:
        return Session(self.write())
