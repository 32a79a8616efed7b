"""Squeeze and excite in the blocked form: the same numbers at every batch size, and nothing reordered in between."""

from copy import deepcopy
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn

from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.planning.onnx_runtime import forms
from talaria_export.bundle.preprocess import Preprocessing
from talaria_export.convert import onnx as onnx_convert
from talaria_export.convert.onnx import convert, export_onnx
from talaria_export.convert.quantize import linear_int8
from talaria_export.runtime.session import Session

REORDERS = ("com.microsoft.nchwc:ReorderInput", "com.microsoft.nchwc:ReorderOutput")


class Excited(nn.Module):
    """A gate on maps, one on the sum of a skip, and a mean that drops its dimensions."""

    def __init__(self) -> None:
        from torchvision.ops import SqueezeExcitation  # here: every test process imports this file, few need it

        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = SqueezeExcitation(16, 16)
        self.middle = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.skip = nn.Conv2d(16, 16, 1)
        self.second = SqueezeExcitation(16, 16, scale_activation=nn.Hardsigmoid)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(torch.relu(self.stem(x))))
        x = self.second(torch.relu(x + self.skip(x)))
        return self.head(torch.relu(self.skip(x)).mean((2, 3)))


class Elsewhere(nn.Module):
    """Products that are no gate from a convolution: a parameter, a linear gate, positions, the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16)[:, None, None])
        self.gate = nn.Linear(16, 16)
        self.where = nn.Conv2d(16, 1, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x * x.mean((2, 3), keepdim=True)) * self.scale
        x = x * torch.sigmoid(self.gate(x.mean((-1, -2))))[:, :, None, None]
        x = x * torch.sigmoid(self.where(x))
        return self.head(x.mean(2).mean(2) + x.mean((1, 2, 3))[:, None])


@cache
def converted(kind: type[nn.Module]) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(3)
    model = kind().eval()
    return model, convert(model, torch.randn(1, 3, 12, 10))


@pytest.mark.parametrize("kind", [Excited, Elsewhere])
def test_the_numbers_are_those_of_torch(kind: type[nn.Module]) -> None:
    model, proto = converted(kind)
    x = torch.randn(7, 3, 12, 10, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(x).numpy()
    session = Session(proto.SerializeToString())
    for batch in (1, 2, 7):
        assert roundings(session(x[:batch].numpy()), expected[:batch]) <= 1000


def test_only_gates_from_convolutions_are_spread() -> None:
    kinds = [node.op_type for node in converted(Elsewhere)[1].graph.node]
    assert "Resize" not in kinds
    excited = [node.op_type for node in converted(Excited)[1].graph.node]
    assert excited.count("Resize") == 2
    assert excited.count("GlobalAveragePool") == 3
    assert "ReduceMean" not in excited


def test_a_gate_over_time_is_blocked_too_and_may_follow_windows() -> None:
    """Lifted to maps of height 1; cut from a recording, the batch is the number of windows."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate, self.head = nn.Conv1d(6, 16, 5, padding=2), nn.Conv1d(16, 16, 1), nn.Linear(16, 7)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.stem(x))
            return self.head((y * torch.sigmoid(self.gate(y.mean(-1, keepdim=True)))).mean(-1))

    torch.manual_seed(0)
    model, x = Timed().eval(), torch.randn(4, 6, 50)
    kinds = [node.op_type for node in convert(model, x).graph.node]
    assert kinds.count("GlobalAveragePool") == 2
    assert kinds.count("Resize") == 1
    steps = Preprocessing(shape=(6, 50), mean=(0.1,) * 6, std=(2.0,) * 6, stride=25)
    recording = np.random.default_rng(0).standard_normal((200, 6)).astype(np.float32)
    windows = np.stack([(recording[begin : begin + 50].T - 0.1) / 2 for begin in range(0, 151, 25)])
    with torch.no_grad():
        expected = model(torch.from_numpy(windows)).numpy()
    assert roundings(Session(export_onnx(model, x, steps=steps))(recording), expected) <= 1000


def test_a_network_with_gates_stays_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the graph as ONNX Runtime rewrote it. torch's own export has 38 reorders here."""
    spec = ModelSpec("mobilenet_v3_small", (3, 64, 64), 10)
    model, x = zoo.build(spec).eval(), zoo.example(spec, 2)
    made = onnx_convert._exported(*onnx_convert.prepared(model, x))  # torch's part, the same for both, takes seconds
    monkeypatch.setattr(onnx_convert, "_exported", lambda *_: deepcopy(made))
    plain = forms(convert(model, x, plain=True).SerializeToString())
    assert sum(plain[name] for name in REORDERS) >= 30
    proto = convert(model, x)
    for data in (proto.SerializeToString(), linear_int8(proto)):
        found = forms(data)
        assert found["com.microsoft.nchwc:Conv"] == sum(node.op_type == "Conv" for node in proto.graph.node)
        assert found["com.microsoft.nchwc:Upsample"] == 9
        assert sum(found[name] for name in REORDERS) <= 6


def test_a_gate_is_told_the_batch_of_the_model_and_nothing_else() -> None:
    _, proto = converted(Excited)
    assert len(proto.graph.value_info) == 2
    for told in proto.graph.value_info:
        batch, *rest = told.type.tensor_type.shape.dim
        assert batch.dim_param == proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
        assert not any(size.HasField("dim_value") for size in rest)
    onnx.checker.check_model(proto, full_check=True)


class Exact(nn.Module):
    """Means of maps and of their squares in float64, where float32 would lose them."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = conv, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).double()
        over = tuple(range(2, x.dim()))
        return self.head(torch.cat((x.mean(over), x.square().mean(over).sqrt()), 1).float())


@pytest.mark.parametrize(("conv", "size"), [(nn.Conv1d(3, 4, 3), (3, 16)), (nn.Conv2d(3, 4, 3), (3, 8, 8))], ids=str)
def test_means_in_float64_stay_what_onnx_runtime_has(conv: nn.Module, size: tuple[int, ...]) -> None:
    """It pools float32 alone: such a network could not be loaded."""
    torch.manual_seed(0)
    model, x = Exact(conv).eval(), torch.randn(4, *size)
    with torch.no_grad():
        assert roundings(torch.from_numpy(Session(export_onnx(model, x))(x.numpy())), model(x)) <= 100
