"""Both branches and the gate as one ONNX graph: what a device without torch puts into its bundle."""

from dataclasses import replace

import numpy as np

from talaria.algorithms.thorki.fusion_gate import ConstantGate, Gate
from talaria.model.weights import Served
from talaria.programs.graph import Graph, Node
from talaria.tensors import Array

_LAST = np.array([1], np.int64)


def fused_graph(general: Served, small: Served, gate: Gate, shift: Array | None) -> Graph:
    """From ``x`` to ``(1 − α) (general + shift) + α small``; both have graphs of their own."""
    assert general.graph is not None
    assert small.graph is not None
    one, two = general.graph(), small.graph()
    x = one.inputs[0]
    nodes = [*_named(one, "general/"), *_named(two, "small/")]
    constants: dict[str, Array] = {}
    for prefix, graph in (("general/", one), ("small/", two)):
        constants |= {prefix + name: value for name, value in graph.constants.items()}
    made = _Made(nodes, constants)
    z_g, z_p = f"general/{one.outputs[0].name}", f"small/{two.outputs[0].name}"
    if shift is not None:
        z_g = made("Add", z_g, made.constant("shift", shift.astype(np.float32)))
    alpha = _alpha(made, gate, z_g, z_p)
    found = made("Add", z_g, made("Mul", alpha, made("Sub", z_p, z_g)))
    logits = replace(one.outputs[0], name=found)
    return Graph((x,), (logits,), tuple(nodes), constants)


def _named(graph: Graph, prefix: str) -> list[Node]:
    """Its operators, every name but that of its input behind ``prefix``."""
    kept = {graph.inputs[0].name: "x", "": ""}

    def name(one: str) -> str:
        return kept.get(one, prefix + one)

    return [
        replace(node, inputs=tuple(map(name, node.inputs)), outputs=tuple(map(name, node.outputs)))
        for node in graph.nodes
    ]


class _Made:
    """Operators added one by one; each call gives the name of what it makes."""

    def __init__(self, nodes: list[Node], constants: dict[str, Array]) -> None:
        self._nodes, self._constants = nodes, constants

    def __call__(self, kind: str, *inputs: str, **attributes: int) -> str:
        name = f"fused/{len(self._nodes)}"
        self._nodes.append(Node(kind, inputs, (name,), tuple(sorted(attributes.items()))))
        return name

    def constant(self, name: str, value: Array) -> str:
        self._constants[f"fused/{name}"] = value
        return f"fused/{name}"


def _alpha(made: _Made, gate: Gate, z_g: str, z_p: str) -> str:
    if isinstance(gate, ConstantGate):
        return made.constant("alpha", np.array(gate.alpha, np.float32))
    last = made.constant("last", _LAST)
    logs = [made("LogSoftmax", z, axis=1) for z in (z_g, z_p)]
    probs = [made("Exp", log) for log in logs]
    entropies = [
        made("Neg", made("ReduceSum", made("Mul", p, log), last, keepdims=1))
        for p, log in zip(probs, logs, strict=True)
    ]
    tops = [made("ReduceMax", p, last, keepdims=1) for p in probs]
    seen = made("Concat", *probs, made("Sub", *tops), *entropies, axis=1)
    weights = {"hidden": gate.hidden.T, "offset": gate.offset, "out": gate.out.T, "lift": gate.lift}
    named = {name: made.constant(name, np.ascontiguousarray(value, np.float32)) for name, value in weights.items()}
    hidden = made("Relu", made("Add", made("MatMul", seen, named["hidden"]), named["offset"]))
    return made("Sigmoid", made("Add", made("MatMul", hidden, named["out"]), named["lift"]))
