"""Forms that were measured to be fast: which operators a transformer's step is made of (benchmarks/RESULTS.md)."""

import pytest
import torch

from talaria.model import zoo
from talaria.programs.build import build
from talaria.programs.program import Program
from talaria_bench.sequences import transformer


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return Program(build(zoo.keep(transformer((6, 32), 7), (6, 32), 7))).graph


def of(graph, kind):
    return [node for node in graph.nodes if node.kind == kind]


def test_the_slopes_of_biases_are_products_with_ones(graph):
    ones = {node.outputs[0] for node in of(graph, "Expand")}
    ones |= {node.outputs[0] for node in of(graph, "Reshape") if node.inputs[0] in ones}
    summed = [node for node in of(graph, "MatMul") if node.inputs[0] in ones]
    assert len(summed) >= 7  # of places, of embedding, and of both layers' output, linear1 and linear2
    assert len(of(graph, "ReduceSum")) == 5  # two over channels in each attention, and the few rows of the head


def test_what_a_softmax_takes_off_is_one_more_channel_of_a_product(graph):
    made = {name: node for node in graph.nodes for name in node.outputs}
    shares = {node.outputs[0] for node in of(graph, "Softmax")}
    slopes = [node for node in of(graph, "Mul") if shares.intersection(node.inputs)]
    assert len(slopes) == 2
    for node in slopes:
        assert made[node.inputs[1]].kind == "MatMul"
        assert made[made[node.inputs[1]].inputs[1]].kind == "Pad"
