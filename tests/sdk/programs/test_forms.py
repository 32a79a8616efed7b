"""Forms that were measured to be fast: which operators a step is made of (benchmarks/RESULTS.md)."""

import numpy as np
import pytest
import torch
from torch import nn

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs import onnx_file
from talaria.programs.build import build, packed
from talaria.programs.graph import FLOAT, Draft, Port
from talaria.programs.layers.activation import OF
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.types import Recipe
from talaria_bench.sequences import transformer


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return Program(build(zoo.keep(transformer((6, 32), 7), (6, 32), 7))).graph


@pytest.fixture(scope="module")
def convolutions():
    return Program(build(ModelSpec("imu_cnn", (6, 100), 7))).graph


LINE = (3, 12)


class Normalized(nn.Module):
    """A normalized sequence that two layers read, one of them narrow."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.below, self.norm, self.one = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.two, self.head = nn.Linear(6, wide), nn.Linear(5 + wide, 4)

    def forward(self, x):
        y = self.norm(self.below(x.transpose(1, 2)))
        return self.head(torch.cat([self.one(y), self.two(y)], 2).mean(dim=1))


def of(graph, kind):
    return [node for node in graph.nodes if node.kind == kind]


def test_the_slopes_of_biases_are_products_with_ones(graph):
    ones = {node.outputs[0] for node in of(graph, "Expand")}
    ones |= {node.outputs[0] for node in of(graph, "Reshape") if node.inputs[0] in ones}
    summed = [node for node in of(graph, "MatMul") if node.inputs[0] in ones]
    assert len(summed) >= 7  # of places, of embedding, and of both layers' output, linear1 and linear2
    # two over channels in each attention, and five slopes of scales over a small matrix
    assert len(of(graph, "ReduceSum")) == 9


def test_what_a_softmax_takes_off_is_one_more_channel_of_a_product(graph):
    made = {name: node for node in graph.nodes for name in node.outputs}
    shares = {node.outputs[0] for node in of(graph, "Softmax")}
    slopes = [node for node in of(graph, "Mul") if shares.intersection(node.inputs)]
    assert len(slopes) == 2
    for node in slopes:
        assert made[node.inputs[1]].kind == "MatMul"
        assert made[made[node.inputs[1]].inputs[1]].kind == "Pad"


def test_weights_take_the_scale_of_a_normalized_sequence_in(graph):
    even = {node.outputs[0] for node in of(graph, "LayerNormalization")}
    read = [node.kind for node in graph.nodes for name in node.inputs if name in even]
    # of five, four stand before weights: forward, and in the gradient of weights; the last one is averaged first
    assert read.count("Gemm") == 8
    scales = {port.name for port in graph.inputs if "norm" in port.name and port.name.startswith("weight/")}
    assert len(scales) == 10
    met = [node for node in of(graph, "Mul") if scales.intersection(node.inputs) and even.intersection(node.inputs)]
    assert not met


@pytest.mark.parametrize(("wide", "folded"), [(48, True), (49, False)])
def test_wide_weights_take_no_scale_in(wide, folded):
    graph = Program(build(zoo.keep(Normalized(wide), LINE, 4))).graph
    (norm,) = of(graph, "LayerNormalization")
    readers = [node for node in graph.nodes if norm.outputs[0] in node.inputs]
    assert folded == any(node.kind == "Gemm" for node in readers)


class Averaged(nn.Module):
    """A normalized sequence of which something is read that ``how`` makes."""

    def __init__(self, how) -> None:
        super().__init__()
        self.below, self.norm, self.head, self.how = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 4), how

    def forward(self, x):
        return self.how(self, self.norm(self.below(x.transpose(1, 2))))


HOW = {
    "the mean over moments": (True, lambda own, y: own.head(y.mean(dim=1))),
    "counted from the end": (True, lambda own, y: own.head(y.mean(-2))),
    "kept": (True, lambda own, y: own.head(y.mean((1,), keepdim=True)).squeeze(1)),
    "of torch": (True, lambda own, y: own.head(torch.mean(y, dim=1))),
    "read twice": (True, lambda own, y: own.head(y.mean(1)) + own.head(y).mean(1)),
    "the sum": (False, lambda own, y: own.head(y.sum(1))),
    "the mean over width": (False, lambda own, y: own.head(y.mean(2)[:, :6])),
    "the mean of all": (False, lambda own, y: own.head(y + y.mean((1, 2), keepdim=True)).mean(1)),
    "read by no weights too": (False, lambda own, y: own.head(y.mean(1)) + y.mean(1)[:, :4]),
    "the largest": (False, lambda own, y: own.head(y.amax(1))),
}


@pytest.mark.parametrize("how", HOW)
def test_a_mean_of_normalized_moments_hands_their_scale_on_to_its_weights(how):
    torch.manual_seed(0)
    folded, way = HOW[how]
    own = Averaged(way)
    with torch.no_grad():
        own.norm.weight.uniform_(0.5, 2)
        own.norm.bias.normal_()
    spec = zoo.keep(own, LINE, 4)
    program = Program(packed(spec, zoo.build(spec), None, "all", Recipe()))  # which compares it with float64
    (norm,) = of(program.graph, "LayerNormalization")
    met = [node for node in of(program.graph, "Mul") if norm.outputs[0] in node.inputs]
    assert folded == all("weight/norm.weight" not in node.inputs for node in met)


@pytest.mark.parametrize("only", [["one.weight"], ["norm.weight"], ["norm.bias", "two.bias"], ["below.weight"]])
def test_each_part_of_a_folded_layer_trains_alone(only):
    torch.manual_seed(0)
    spec, recipe = zoo.keep(Normalized(7), LINE, 4), Recipe(momentum=0.9)
    program = Program(packed(spec, zoo.build(spec), only, "some", recipe))  # which compares it with float64
    assert {*program.trained} == {*only}


def test_weights_of_a_convolution_meet_columns_as_they_lie_and_rows_turned(convolutions):
    made = {name: node for node in convolutions.nodes for name in node.outputs}

    def comes_from(value, *kinds):
        for kind in kinds:
            value = made[value].inputs[0] if value in made and made[value].kind == kind else ""
        return value

    ports = [port.name for port in convolutions.inputs if len(port.shape) == 3]
    weights = [name for name in ports if name.startswith("weight/")]
    assert len(weights) == 4
    columns = {comes_from(node.inputs[0], "Reshape") for node in of(convolutions, "MatMul")}
    assert columns.intersection(weights) == {"weight/conv1.weight"}  # of 6 channels
    rows = {comes_from(node.inputs[0], "Reshape", "Transpose", "Reshape") for node in of(convolutions, "Gemm")}
    assert rows.issuperset({*weights} - columns)
    taken = {
        name for node in of(convolutions, "Gemm") if node.get("beta") for name in made.get(node.inputs[2], node).inputs
    }
    assert taken.intersection(ports) - {"x"} == {"momentum/conv1.weight"}  # by the product that gives its gradient


def test_all_taps_of_a_wide_convolution_are_one_lookup(convolutions):
    sums = {node.outputs[0]: node.inputs for node in of(convolutions, "Add")}
    looked = [sums[node.inputs[1]] for node in of(convolutions, "Gather") if node.inputs[1] in sums]
    tables = [tuple(convolutions.constants[one].size for one in places) for places in looked]
    # three layers forward, and the two by 2 back in two phases each, of which one of conv4 is a single tap
    assert tables == [(25, 5), (25, 5), (13, 3), (13, 2), (25, 5), (25, 3), (25, 2)]


def test_taps_that_lie_apart_are_cut_as_rows(convolutions):
    steps = [convolutions.constants[node.inputs[4]][-1] for node in of(convolutions, "Slice") if len(node.inputs) > 4]
    assert steps
    assert {*steps} == {1}  # of a convolution by 2 and of a kernel that meets every other place


def test_what_a_channel_has_is_reckoned_with_as_a_vector(convolutions):
    running = {port.name for port in convolutions.inputs if "running" in port.name}
    assert len(running) == 8
    assert {node.inputs[2] for node in of(convolutions, "Where")}.issuperset(running)  # and not as columns


def test_a_rectifier_has_its_slope_in_one_pass(convolutions):
    steep = [node for node in of(convolutions, "HardSigmoid") if node.get("alpha") > 1e38]
    assert len(steep) == 4
    assert len(of(convolutions, "Greater")) == 1  # whether the batch holds more than one sample


KINKED = (
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardtanh(-0.1, 0.3), nn.Hardtanh(-0.001, 7e5), nn.Hardtanh(-1e7, 1e7),
    nn.LeakyReLU(), nn.LeakyReLU(0.0), nn.LeakyReLU(1.5), nn.LeakyReLU(-0.2), nn.Hardsigmoid(), nn.Hardswish(),
)  # fmt: skip
BOUNDS = (0.0, 0.001, 0.1, 0.3, 1.0, 3.0, 6.0, 7e5, 1e7)


@pytest.mark.parametrize("own", KINKED, ids=str)
def test_a_slope_has_its_steps_at_the_bounds_themselves(own):
    bounds = np.float32([*BOUNDS, *(-bound for bound in BOUNDS)])
    near = [np.nextafter(bounds, np.float32(way)) for way in (np.inf, -np.inf)]
    x = np.concatenate([bounds, *near, np.float32([1e-30, -1e-30, 1e30, -1e30, 0.5, -0.5])])
    x = x[(np.abs(x) > 1e-37) | (x == 0)]  # a number that is hardly one may count in part
    if isinstance(own, nn.Hardswish):
        x = x[np.abs(x) != 3]  # where it has no slope
    g = np.linspace(-2, 3, len(x), dtype=np.float32)
    draft = Draft()
    value, slope = draft.input("x", ("N",)), draft.input("g", ("N",))
    y, way = OF[type(own)](draft, value, own)
    named = [(Port("y", FLOAT, ("N",)), y), (Port("dx", FLOAT, ("N",)), way(slope))]
    graph = draft.finish(named)
    assert bool(of(graph, "Where")) == (own in KINKED[5:6] or own in KINKED[8:10])  # which takes ten times a product
    found = Session(onnx_file.write(graph, ""))(["y", "dx"], {"x": x, "g": g})
    xs = torch.from_numpy(x).requires_grad_()
    own(xs).backward(torch.from_numpy(g))
    for mine, theirs in zip(found, (own(xs).detach(), xs.grad), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-6, atol=1e-7)


def test_without_momentum_a_weight_is_added_to_as_its_gradient_is_made():
    plain = Program(build(ModelSpec("mlp", (20,), 4), recipe=Recipe(momentum=0))).graph
    made = {name: node.kind for node in plain.nodes for name in node.outputs}
    assert {made[f"next/weight/{layer}.weight"] for layer in ("fc1", "fc2", "head")} == {"Gemm"}


class States(nn.Module):
    """A recurrent layer, and its last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.below, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.below(x)[0][:, -1])


@pytest.mark.parametrize(("kind", "each"), [(nn.LSTM, 17), (nn.GRU, 15), (nn.RNN, 6)])
def test_what_a_recurrent_layer_does_at_each_moment(kind, each):
    """There and back; what does not wait for the moment before is done for all moments at once."""
    one, more = (len(Program(build(zoo.keep(States(kind), (long, 3), 4))).graph.nodes) for long in (8, 9))
    assert more - one == each
