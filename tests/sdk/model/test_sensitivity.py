"""The worth of a channel is the squared first-order change of the loss when it goes, in one unit for all groups."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from talaria.errors import DataError, ModelError
from talaria.model.masks import ChannelLayout
from talaria.model.prunability import layout
from talaria.model.sensitivity import worth
from talaria.model.state import state_of


def _net(normed: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(2, 6, 3))
        if normed:
            layers["bn1"] = nn.BatchNorm2d(6)
        layers.update(act1=nn.ReLU(), conv2=nn.Conv2d(6, 5, 3))
        if normed:
            layers["bn2"] = nn.BatchNorm2d(5)
        layers.update(act2=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(5, 3))
        model = nn.Sequential(layers)
        for name, value in model.state_dict().items():
            if name.startswith("bn") and value.is_floating_point():
                value.copy_(0.5 + torch.rand(value.shape))
    return model


X = torch.randn(12, 2, 9, 9, generator=torch.Generator().manual_seed(4))
Y = torch.arange(12) % 3
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]


@pytest.mark.parametrize("normed", [True, False], ids=["BatchNorm", "bare"])
def test_it_is_the_slope_of_the_loss_as_a_gate_closes(normed: bool) -> None:
    """Against finite differences of an explicit gate behind each layer, in float64."""
    model = _net(normed).double().eval()
    found = worth(model, layout(_net(normed), X), [(x.double(), y) for x, y in BATCHES])
    assert {g: len(v) for g, v in found.items()} == {"conv1": 6, "conv2": 5}
    for group, gated in (("conv1", "bn1" if normed else "conv1"), ("conv2", "bn2" if normed else "conv2")):
        for channel in range(len(found[group])):
            squares = []
            for x, y in BATCHES:
                losses = [_gated(model, gated, channel, 1 + step, x.double(), y) for step in (1e-5, -1e-5)]
                squares.append(((losses[0] - losses[1]) / 2e-5) ** 2)
            assert float(found[group][channel]) == pytest.approx(sum(squares) / 2, rel=1e-4, abs=1e-12)


def _gated(model: nn.Module, layer: str, channel: int, gate: float, x: torch.Tensor, y: torch.Tensor) -> float:
    def scale(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        out = output.clone()
        out[:, channel] *= gate
        return out

    handle = model.get_submodule(layer).register_forward_hook(scale)
    try:
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y))
    finally:
        handle.remove()


def test_a_dead_channel_is_worth_nothing_and_the_model_stays_as_it_was() -> None:
    model = _net(True).train()
    with torch.no_grad():
        model.get_submodule("bn1").weight[2] = 0  # type: ignore[index, operator]
        model.get_submodule("bn1").bias[2] = -1  # type: ignore[index, operator]
    model.get_submodule("conv1").requires_grad_(False)
    before = state_of(model)
    found = worth(model, layout(_net(True), X), BATCHES)
    assert float(found["conv1"][2]) == 0 < float(found["conv1"].sum())
    assert all(np.array_equal(v, before[k]) for k, v in state_of(model).items())
    assert model.training
    assert model.get_submodule("bn1").training
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight", "conv1.bias"]
    assert all(p.grad is None for p in model.parameters())


def test_it_refuses_what_it_cannot_score() -> None:
    found = layout(_net(True), X)
    with pytest.raises(DataError, match="no batches"):
        worth(_net(True), found, [])
    with pytest.raises(ModelError, match="another model"):
        worth(nn.Linear(3, 2), found, BATCHES)
    with pytest.raises(ModelError, match=r"'conv1\.weight' has 6 rows"):
        worth(_net(True), ChannelLayout({**found.sizes, "conv1": 7}, found.axes), BATCHES)
