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


@pytest.mark.parametrize("recipe", [Recipe(momentum=0), Recipe(momentum=0.9, weight_decay=0.01)])
def test_many_small_updates_are_one_and_change_no_bit(spec_of, monkeypatch, recipe):
    spec = spec_of("imu_cnn")
    together = Program(build(spec, "all", recipe))
    monkeypatch.setattr(updates._Sgd, "saved", lambda self, keys: 0)
    apart = Program(build(spec, "all", recipe))
    module = zoo.build(spec)
    matrices = sum(parameter.dim() > 1 for parameter in module.parameters())

    def steps(program):
        ends = [node.kind for node in program.graph.nodes if node.outputs[0].startswith("next/weight/")]
        return ends.count("Sub") + ends.count("Gemm")

    assert steps(apart) == sum(1 for _ in module.parameters())
    assert steps(together) == matrices
    weights = {key: value.numpy() for key, value in module.state_dict().items()}
    momentum = {key: np.full_like(value, 0.01) for key, value in together.momentum(weights).items()}
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, *spec.input_shape), np.float32), rng.integers(0, spec.classes, 5)
    one, two = (program.step(weights, momentum, x, y, lr=0.1) for program in (together, apart))
    for mine, theirs in zip(one[:2], two[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("sizes", [(3, 4), (9, -1), (8, 0), (1 << 62, 8)])
def test_a_split_that_does_not_fit_is_refused(sizes):
    node = Node("Split", ("x", "sizes"), ("a", "b"), (("axis", 0),))
    ports = (Port("x", FLOAT, (8,)),), (Port("a", FLOAT, (3,)),)
    graph = Graph(*ports, (node,), {"sizes": np.array(sizes, INT)})
    with pytest.raises(WireError, match="Split does not fit"):
        measure(graph, {"x": Value((8,))}, Limits())
