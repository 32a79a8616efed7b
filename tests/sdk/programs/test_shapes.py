"""The table of operators tells what ONNX Runtime makes of them: every value of every step, at its size; and graphs that
only look give torch's features, under a mask too, with their weights as inputs or held."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.model import pruning, tokens, zoo
from talaria.model.compaction import gather
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of
from talaria.programs import onnx_file, vector
from talaria.programs.build import build
from talaria.programs.graph import Port, held
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.programs.shapes import RULES, Limits, Value, measure
from talaria.programs.step import answers_of, graph_of
from talaria.types import Recipe

_nets = importlib.util.spec_from_file_location("talaria_program_nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_nets)
_nets.loader.exec_module(nets)


def agrees(graph, feed):
    """Each value that the table foresees has the shape and dtype that ONNX Runtime gives it."""
    cost = measure(graph, {name: Value(v.shape, v.dtype.name) for name, v in feed.items()}, Limits())
    inside = {name: node for node in graph.nodes for name in node.outputs}
    ports = [Port(name, cost.outputs[name].dtype, sizes(name, cost.outputs[name].shape)) for name in inside]
    made = Session(onnx_file.write(replace(graph, outputs=tuple(ports)), ""))([*inside], feed)
    for (name, node), value in zip(inside.items(), made, strict=True):
        foreseen = cost.outputs[name]
        assert (value.shape, value.dtype.name) == (foreseen.shape, foreseen.dtype), node
        assert foreseen.numbers is None or np.array_equal(value, foreseen.numbers), node


def sizes(name, shape):
    """A name of its own for each size: ONNX Runtime lets values whose sizes have one name share a block."""
    return tuple(f"{name}.{axis}" for axis in range(len(shape)))


@pytest.mark.parametrize("name", nets.NETS)
def test_the_table_foresees_every_value(name):
    shape, make = nets.NETS[name]
    torch.manual_seed(0)
    spec = zoo.keep(make(), shape, 4)
    program = Program(build(spec))
    agrees(program.graph, vector.inputs(program.graph, program.manifest))
    looks(make().requires_grad_(False).eval(), shape, partial(zoo.whole, spec))


def test_the_table_holds_no_operator_that_nothing_needs():
    met = set()
    for shape, make in nets.NETS.values():
        spec = zoo.keep(make(), shape, 4)
        step = graph_of(zoo.build(spec), "head", shape, 4, Recipe(momentum=0.9), None, whole=partial(zoo.whole, spec))
        looks = answers_of(make().requires_grad_(False).eval(), "head", shape, partial(zoo.whole, spec))
        met |= {node.kind for graph in (step, looks) for node in graph.nodes}
    assert RULES.keys() - met == {"Identity"}  # of what is given out as it came in


def looks(net, shape, whole):
    """The graph that only looks gives what torch gives."""
    graph = answers_of(net, "head", shape, whole)
    x = tokens.example(net, shape, 3)
    weights = {f"weight/{key}": value for key, value in state_of(net).items()}
    feed = {port.name: x.numpy() if port.name == "x" else weights[port.name] for port in graph.inputs}
    (found,) = Session(onnx_file.write(graph, ""))(["features"], feed)
    assert roundings(found, net(x)) <= 1000 * sum(1 for _ in net.modules())
    agrees(graph, feed)


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "imu_cnn"])
def test_what_frozen_layers_give_is_torchs_at_every_width(name, keep):
    spec = ModelSpec(name, (6, 100) if name == "imu_cnn" else (3, 32, 32), 4)
    dense = zoo.build(spec)
    mask = pruning.choose(pruning.importance(dense, zoo.layout(spec)), zoo.layout(spec).full(), keep=keep)
    net = pruning.compact(dense, mask).requires_grad_(False).eval()
    weights = {f"weight/{key}": value for key, value in gather(state_of(dense), mask).items()}
    graph = held(answers_of(dense.requires_grad_(False).eval(), zoo.head(spec), spec.input_shape), weights)
    assert [port.name for port in graph.inputs] == ["x"]
    for count in (1, 3):
        x = zoo.example(spec, count)
        (found,) = Session(onnx_file.write(graph, ""))(["features"], {"x": x.numpy()})
        longest = max(p[0].numel() for p in net.parameters() if p.dim() > 1)
        assert roundings(found, net(x)) <= longest * sum(1 for _ in net.modules())
