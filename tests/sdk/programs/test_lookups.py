"""Tokens: what no table has is refused before ONNX Runtime sees it, and so is a graph that looks up anything else."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from talaria.errors import DataError, ModelError, WireError
from talaria.model import zoo
from talaria.programs import onnx_file, vector
from talaria.programs.build import build
from talaria.programs.graph import FLOAT, INT, Graph, Node, Port
from talaria.programs.making import Maker
from talaria.programs.program import Program
from talaria.programs.shapes import Limits, Value, measure
from talaria.programs.training import Training

_nets = importlib.util.spec_from_file_location("talaria_token_nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_nets)
_nets.loader.exec_module(nets)


@pytest.fixture(scope="module")
def maker():
    torch.manual_seed(0)
    return Maker(zoo.keep(nets.Tokens(), (2, 7), 4))


@pytest.fixture(scope="module")
def data(maker):
    return build(maker.spec)


@pytest.fixture
def fed(data):
    program = Program(data)
    feed = vector.inputs(program.graph, program.manifest)
    weights = {name.removeprefix("weight/"): v for name, v in feed.items() if name.startswith("weight/")}
    return program, weights, feed["x"], feed["y"]


def test_a_vector_is_drawn_of_tokens_that_each_table_has(fed):
    _, _, x, _ = fed
    assert np.array_equal(x, np.floor(x))
    assert x.min() >= 0
    assert 5 <= x[:, 0].max() < 20
    assert x[:, 1].max() < 5


@pytest.mark.parametrize("what", [-1.0, 20.0, 1e30, float("nan"), float("-inf")])
def test_a_token_that_no_table_has_is_refused_before_it_is_looked_up(fed, maker, what, monkeypatch):
    program, weights, x, y = fed
    momentum = program.momentum(weights)
    training = Training(program, weights, momentum)
    training.step(x, y, lr=0.1)
    derivative = maker.derivative(None, ("logits",))
    derivative.forward(weights, x)
    maker.forward()({"x": x}, weights)

    def touched(*_):
        raise AssertionError("ONNX Runtime was asked")

    monkeypatch.setattr("talaria.programs.session.Session.__call__", touched)
    monkeypatch.setattr("talaria.programs.session.Session._run", touched)
    bad = x.copy()
    bad[1, 0, 2] = what
    for call in (
        lambda: program.step(weights, momentum, bad, y, lr=0.1),
        lambda: training.step(bad, y, lr=0.1),
        lambda: derivative.forward(weights, bad),
        lambda: maker.forward()({"x": bad}, weights),
    ):
        with pytest.raises(DataError, match=r"a table of 20 entries.* standardize=false"):
            call()
    bad = x.copy()
    bad[0, 1, 0] = 7  # which the other table has
    with pytest.raises(DataError, match="a table of 5 entries"):
        program.step(weights, momentum, bad, y, lr=0.1)


def test_the_kind_that_pads_learns_nothing_and_the_others_do(fed):
    program, weights, x, y = fed
    after, _, _ = program.step(weights, program.momentum(weights), x, y, lr=0.5)
    seen = {int(one) for one in x[:, 0].ravel()} - {0}
    for kind in range(20):
        moved = not np.array_equal(after["words.weight"][kind], weights["words.weight"][kind])
        assert moved == (kind in seen)


def test_a_frozen_table_stays_and_has_no_momentum(data):
    torch.manual_seed(0)
    net = nets.Sentences()
    spec = zoo.keep(net, (9,), 4)
    program = Program(build(spec, "head"))
    assert "embed.weight" not in program.trained


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_that_no_program_has_are_refused(option):
    net = nets.Sentences()
    net.embed = nn.Embedding(40, 6, **option)
    with pytest.raises(ModelError, match=next(iter(option))):
        build(zoo.keep(net, (9,), 4))


def swapped(data, change):
    graph, note = onnx_file.read(data)
    return onnx_file.write(replace(graph, nodes=tuple(map(change, graph.nodes))), note)


def test_places_that_are_no_part_of_a_batch_are_refused(data):
    def elsewhere(node):
        own = node.kind in ("Gather", "ScatterND")
        return replace(node, inputs=(node.inputs[0], "y", *node.inputs[2:])) if own else node

    def elsewhere_back(node):
        return replace(node, inputs=(node.inputs[0], "y", *node.inputs[2:])) if node.kind == "ScatterND" else node

    def otherwise(node):
        return replace(node, attributes=(("reduction", "mul"),)) if node.kind == "ScatterND" else node

    def in_a_circle(node):
        return replace(node, inputs=(node.outputs[0], *node.inputs[1:])) if node.kind == "Cast" else node

    def lacking(node):
        return replace(node, inputs=node.inputs[:1]) if node.kind in ("Gather", "ScatterND") else node

    for change in (elsewhere, elsewhere_back, otherwise, in_a_circle, lacking):
        with pytest.raises(WireError):
            Program(swapped(data, change))


def test_a_scatter_that_does_not_fit_is_refused():
    node = Node("ScatterND", ("table", "at", "rows"), ("out",), (("reduction", "add"),))
    graph = Graph((), (Port("out", FLOAT, (4, 3)),), (node,), {})
    good = {"table": Value((4, 3)), "at": Value((5, 1), INT), "rows": Value((5, 3))}
    assert measure(graph, good, Limits()).outputs["out"].shape == (4, 3)
    for name, bad in (
        ("at", Value((5, 2), INT)),
        ("at", Value((6, 1), INT)),
        ("at", Value((5, 1), FLOAT)),
        ("rows", Value((5, 2))),
        ("rows", Value((5, 3), INT)),
    ):
        with pytest.raises(WireError, match="ScatterND does not fit"):
            measure(graph, good | {name: bad}, Limits())
