"""The 1D-to-2D rewrite on networks that mix lifted and plain values."""

import numpy as np
import onnx
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn

from talaria_export.convert.onnx import convert
from talaria_export.convert.passes.rewrites import fold_batchnorm
from talaria_export.runtime.session import Session


class Gated(nn.Module):
    """A skip, a channel gate of rank 3, a parameter of rank 2, a concatenation and two means over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 8, 5, padding=2)
        self.second = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.norm = nn.BatchNorm1d(8)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 8)[:, None])
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.first(x))
        y = skip + self.scale * self.norm(self.second(skip))
        y = y * torch.sigmoid(y.mean(-1, keepdim=True))
        y = nn.functional.max_pool1d(torch.cat([y, skip], 1), 3, 2, padding=1)
        return self.head(y.mean(-1))


class Along(nn.Module):
    """Operators that the rewrite does not know, between convolutions, and a concatenation in time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 4, 3, stride=2, bias=False)
        self.norm = nn.LayerNorm(49)
        self.second = nn.Conv1d(4, 4, 3)
        self.pool = nn.AdaptiveAvgPool1d(4)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y = self.second(torch.cat([y, y.flip(2)], 2))
        return self.head(self.pool(y).flatten(1))


def run(model: nn.Module, x: Tensor, plain: bool) -> tuple[np.ndarray, list[onnx.NodeProto]]:
    proto = convert(model.eval(), x, plain=plain)
    return Session(proto.SerializeToString())(x.numpy()), list(proto.graph.node)


def test_no_weight_is_left_that_nothing_reads() -> None:
    """ONNX Runtime says so of each, on the agent's own terminal."""
    pooled = nn.Sequential(
        nn.Conv1d(6, 16, 7, 2, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip
    graph = convert(pooled.eval(), torch.zeros(2, 6, 64)).graph
    read = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= read


@pytest.mark.parametrize("kind", [Gated, Along])
def test_rewritten_graph_gives_the_numbers_of_torch(kind):
    torch.manual_seed(1)
    model = kind()
    x = torch.randn(9, 6, 100)
    with torch.no_grad():
        for _ in range(3):
            model.train()(x)
        expected = model.eval()(x).numpy()
    lifted, nodes = run(model, x, plain=False)
    plain, _ = run(model, x, plain=True)
    assert roundings(lifted, expected) <= 1000
    assert roundings(lifted, plain) <= 1000
    ranks = {len(a.ints) for n in nodes if n.op_type == "Conv" for a in n.attribute if a.name == "kernel_shape"}
    assert ranks == {2}


class TwoPools(nn.Module):
    """What two pools give, beside each other in the channels, which are counted from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(6, 4, 3), nn.Linear(392, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        pools = nn.functional.max_pool1d(y, 2), nn.functional.avg_pool1d(y, 2)
        return self.head(torch.cat(pools, -2).flatten(1))


def test_channels_that_are_counted_from_the_end_stand_beside_each_other():
    torch.manual_seed(0)
    net, x = TwoPools(), torch.randn(5, 6, 100)
    lifted, nodes = run(net, x, plain=False)
    assert roundings(lifted, run(net, x, plain=True)[0], scale=1.0) <= 100
    assert [node.op_type for node in nodes].count("Squeeze") == 0


def test_a_slope_for_each_channel_meets_its_channel():
    """It has a shape of its own, (8, 1), which has to grow with what it meets."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(6, 8, 5), nn.PReLU(8), nn.Conv1d(8, 8, 3), nn.PReLU(), nn.Flatten(), nn.Linear(752, 7)
    )
    with torch.no_grad():
        net[1].weight.copy_(torch.linspace(-1, 1, 8))
    x = torch.randn(5, 6, 100)
    lifted, nodes = run(net, x, plain=False)
    assert roundings(lifted, run(net, x, plain=True)[0], scale=1.0) <= 100
    assert [node.op_type for node in nodes].count("PRelu") == 2


def test_neighbouring_layers_stay_lifted():
    model = nn.Sequential(
        nn.Conv1d(6, 8, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.LazyLinear(7)
    )
    x = torch.randn(2, 6, 100)
    model(x)
    _, nodes = run(model, x, plain=False)
    kinds = [node.op_type for node in nodes]
    assert kinds.count("Unsqueeze") == 1
    assert kinds.count("Squeeze") == 0


def test_batchnorm_folds_into_the_convolution_before_it():
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(size=(4, 3, 3, 3)),
        "b": rng.normal(size=4),
        "gamma": rng.normal(size=4),
        "beta": rng.normal(size=4),
        "mean": rng.normal(size=4),
        "var": rng.uniform(0.5, 2, size=4),
    }
    make = onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [
            make("Conv", ["input", "w", "b"], ["a"]),
            make("BatchNormalization", ["a", "gamma", "beta", "mean", "var"], ["n"], epsilon=1e-3),
            make("Flatten", ["n"], ["logits"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("input", 1, ["batch", 3, 8, 8])],
        [onnx.helper.make_tensor_value_info("logits", 1, ["batch", 144])],
        [onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in constants.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    x = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    before = Session(model.SerializeToString())(x)
    assert fold_batchnorm(model) == 1
    assert [node.op_type for node in model.graph.node] == ["Conv", "Flatten"]
    assert roundings(Session(model.SerializeToString())(x), before) <= 1000
