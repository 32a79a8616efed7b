"""Many steps as one graph: ONNX's ``Scan`` hands weights and momenta on from batch to batch.

A small network's step is mostly the cost of its call. The operators, and so the bytes, are those of steps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from talaria.programs.graph import INT, Graph, Node, Port, read_of, renamed
from talaria.tensors import Array


def followed(graph: Graph) -> Graph:
    """The steps of a program's ``graph`` on batches ``x`` (K, N, ...) and ``y`` (K, N), without their losses. All else
    is given, and comes out, as in one step."""
    given = {port.name: port for port in graph.inputs}
    after = [port for port in graph.outputs if port.name != "loss"]
    carried = [given[port.name.removeprefix("next/")] for port in after]
    x, y, number = given["x"], given["y"], Port("number", INT, ())
    names = {port.name: f"step/{port.name}" for port in (*carried, x, y, *after)}
    inside, outside = ([replace(port, name=names[port.name]) for port in some] for some in ((*carried, y), after))
    # Scan hands on the memory of a batch itself, wherever that begins, and sums differ by that: a copy begins as ever
    own = Node("Gather", (x.name, number.name), (names[x.name],), (("axis", 0),))
    nodes = [renamed(node, names) for node in read_of(graph.nodes, [port.name for port in after])]
    body = Graph((*inside, number), tuple(outside), (own, *nodes), graph.constants)
    many = (
        Node("Shape", (y.name,), ("steps",), (("end", 1), ("start", 0))),
        Node("Squeeze", ("steps",), ("many",)),
        Node("Range", ("zero", "many", "one"), ("numbers",)),
    )
    scan = Node(
        "Scan",
        (*(port.name for port in (*carried, y)), "numbers"),
        tuple(port.name for port in after),
        (("body", body), ("num_scan_inputs", 2)),
    )
    inputs = [replace(port, shape=("K", *port.shape)) if port in (x, y) else port for port in graph.inputs]
    constants = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    return Graph(tuple(inputs), tuple(after), (*many, scan), constants)


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
