"""The end of a step: vectors side by side, to the same numbers as one by one."""

import numpy as np
import pytest

from talaria.errors import WireError
from talaria.model import zoo
from talaria.programs import updates
from talaria.programs.build import build
from talaria.programs.graph import FLOAT, INT, Graph, Node, Port
from talaria.programs.program import Program
from talaria.programs.shapes import Limits, Value, measure
from talaria.types import Recipe


@pytest.mark.parametrize("recipe", [Recipe(momentum=0.9), Recipe(momentum=0.9, weight_decay=0.01)])
def test_many_small_updates_are_one_and_change_no_bit(spec_of, monkeypatch, recipe):
    spec = spec_of("imu_cnn")
    together = Program(build(spec, "all", recipe))
    monkeypatch.setattr(updates._Sgd, "saved", lambda self, keys: 0)
    apart = Program(build(spec, "all", recipe))
    module = zoo.build(spec)
    assert _moved_alone(apart, module) == sum(1 for _ in module.parameters())
    assert _moved_alone(together, module) == sum(parameter.dim() > 1 for parameter in module.parameters())
    weights = {key: value.numpy() for key, value in module.state_dict().items()}
    momentum = {key: np.full_like(value, 0.01) for key, value in together.momentum(weights).items()}
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, *spec.input_shape), np.float32), rng.integers(0, spec.classes, 5)
    one, two = (program.step(weights, momentum, x, y, lr=0.1) for program in (together, apart))
    for mine, theirs in zip(one[:2], two[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


def _moved_alone(program, module):
    """How many weights have an operator of their own at the end of a step."""
    ends = {f"next/weight/{name}" for name, _ in module.named_parameters()}
    return sum(node.kind != "Split" for node in program.graph.nodes if ends.intersection(node.outputs))


def test_without_momentum_a_new_weight_is_a_part_of_its_gradients_product(spec_of):
    spec = spec_of("mlp")
    graph = Program(build(spec, "all", Recipe(momentum=0))).graph
    products = [node for node in graph.nodes if node.kind == "Gemm" and node.inputs[-1].startswith("weight/")]
    joined = {node.inputs[-1] for node in products if dict(node.attributes).get("beta") == 1}
    assert joined >= {"weight/fc1.weight", "weight/fc2.weight", "weight/head.weight"}


@pytest.mark.parametrize("recipe", [Recipe(momentum=0.9, weight_decay=0.01), Recipe(momentum=0)])
def test_the_rate_is_in_the_slopes_and_meets_no_weight(spec_of, recipe):
    graph = Program(build(spec_of("imu_cnn"), "all", recipe)).graph
    read = [node for node in graph.nodes if "lr" in node.inputs]
    assert {node.kind for node in read} <= {"Div", "Mul"}
    assert len(read) == 1 + bool(recipe.weight_decay)


@pytest.mark.parametrize("sizes", [(3, 4), (9, -1), (8, 0), (1 << 62, 8)])
def test_a_split_that_does_not_fit_is_refused(sizes):
    node = Node("Split", ("x", "sizes"), ("a", "b"), (("axis", 0),))
    ports = (Port("x", FLOAT, (8,)),), (Port("a", FLOAT, (3,)),)
    graph = Graph(*ports, (node,), {"sizes": np.array(sizes, INT)})
    with pytest.raises(WireError, match="Split does not fit"):
        measure(graph, {"x": Value((8,))}, Limits())
