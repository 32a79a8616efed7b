"""Many steps as one graph: ONNX's ``Scan`` hands weights and momenta on from batch to batch.

A small network's step is mostly the cost of its call. The operators, and so the bytes, are those of steps alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice

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
    still = {"", *graph.constants, *given} - {*(port.name for port in carried), "x", "y"}
    once, nodes = _once(read_of(graph.nodes, [port.name for port in after]), still)
    each = (own, *(renamed(node, names) for node in nodes))
    body = Graph((*inside, number), tuple(outside), each, _read(graph.constants, nodes))
    apart = {name: f"once/{name}" for name in _read(graph.constants, once)}  # no name may stand in both graphs
    many = (
        *(renamed(node, apart) for node in once),
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
    numbers = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    constants = numbers | {apart[name]: graph.constants[name] for name in apart}
    return Graph(tuple(inputs), tuple(after), (*many, scan), constants)


def _read(constants: Mapping[str, Array], nodes: Sequence[Node]) -> dict[str, Array]:
    """Those of ``constants`` that some of ``nodes`` read."""
    names = {name for node in nodes for name in node.inputs}
    return {name: value for name, value in constants.items() if name in names}


def _once(nodes: Sequence[Node], still: Collection[str]) -> tuple[list[Node], list[Node]]:
    """The operators that give the same in every step, as those of ``x`` (K, N, ...), and the others: what follows from
    ``still`` values and from the size of a batch."""
    once, each, known = list[Node](), list[Node](), set(still)
    for node in nodes:
        if node.kind == "Shape" and node.inputs == ("x",) and node.get("end", 0) > node.get("start", 0) >= 0:
            behind = ("end", node.get("end") + 1), ("start", node.get("start", 0) + 1)
            once.append(replace(node, attributes=behind))
        elif known.issuperset(node.inputs):
            once.append(node)
        else:
            each.append(node)
            continue
        known.update(node.outputs)
    return once, each


def in_runs(batches: Iterable[Array], most: int) -> Iterator[Array]:
    """Batches of rows (N,) as runs (K, N) of equally many rows, in their order and of at most ``most`` rows, or one
    batch. K has three binary figures and zeros behind them, so that trainings of any length have few shapes."""
    for count, alike in groupby(batches, len):
        at_once = _few_figures(max(1, most // count))
        while left := list(islice(alike, at_once)):
            while left:
                many = _few_figures(len(left))
                yield np.concatenate(left[:many]).reshape(many, -1)  # sooner than np.stack
                left = left[many:]


def _few_figures(many: int) -> int:
    """``many`` with all but its first three binary figures zero."""
    zeros = max(0, many.bit_length() - 3)
    return many >> zeros << zeros
