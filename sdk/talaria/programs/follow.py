"""Many steps as one graph: ONNX's ``Scan`` hands weights and momenta on from batch to batch.

A small network's step is mostly the cost of its call. The operators, and so the bytes, are those of steps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from talaria.programs.graph import Graph, Node, read_of, renamed
from talaria.tensors import Array

_BATCH = ("x", "y")


def followed(graph: Graph) -> Graph:
    """The steps of a program's ``graph`` on batches ``x`` (K, N, ...) and ``y`` (K, N), without their losses. All else
    is given, and comes out, as in one step."""
    given = {port.name: port for port in graph.inputs}
    after = [port for port in graph.outputs if port.name != "loss"]
    carried = [given[port.name.removeprefix("next/")] for port in after]
    batch = [given[name] for name in _BATCH]
    names = {port.name: f"step/{port.name}" for port in (*carried, *batch, *after)}
    inside, outside = ([replace(port, name=names[port.name]) for port in some] for some in ((*carried, *batch), after))
    nodes = [renamed(node, names) for node in read_of(graph.nodes, [port.name for port in after])]
    body = Graph(tuple(inside), tuple(outside), tuple(nodes), graph.constants)
    scan = Node(
        "Scan",
        tuple(port.name for port in (*carried, *batch)),
        tuple(port.name for port in after),
        (("body", body), ("num_scan_inputs", len(batch))),
    )
    inputs = [replace(port, shape=("K", *port.shape)) if port in batch else port for port in graph.inputs]
    return Graph(tuple(inputs), tuple(after), (scan,), {})


def in_runs(batches: Iterable[Array], most: int) -> Iterator[Array]:
    """Batches of rows (N,) as runs (K, N) of equally many rows, in their order and of at most ``most`` rows, or one
    batch. K is a power of two, so that trainings of any length have few shapes."""
    waiting = list[Array]()
    for rows in batches:
        if waiting and (len(waiting[0]) != len(rows) or (len(waiting) + 1) * len(rows) > most):
            yield from _powers(waiting)
            waiting = []
        waiting.append(rows)
    yield from _powers(waiting)


def _powers(batches: list[Array]) -> Iterator[Array]:
    start = 0
    while left := len(batches) - start:
        many = 1 << left.bit_length() - 1
        yield np.stack(batches[start : start + many])
        start += many
