"""A clone is what a deep copy is: the same values, shared where they are shared, and nothing of the original."""

import copy
from pathlib import Path
from typing import Any

import mypkg.nets
import pytest
import torch
from torch import Tensor, nn

import talaria
from talaria.model import zoo
from talaria.model.cloning import clone
from talaria.model.spec import ModelSpec
from talaria_export import Predictor, make_bundle

SHAPE = (6, 32)


class Tied(nn.Module):
    """Two layers of one weight, one layer in two places, a list of tensors, a hook, and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.again = self.one
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
        self.kept = [torch.ones(4), {"scale": self.scale}]
        self.one.register_forward_hook(doubled)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.two(x)) * self.scale + self.kept[0]


def doubled(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return 2 * out


class Kept(nn.Module):
    """Keeps what it sees, to be looked at, one by one and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.share = torch.softmax(self.one(x), 1)
        self.seen = [self.share, {"x": x * self.share}]
        return self.two(self.share)


class Counted(nn.Linear):
    """It says itself how it is copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        Counted.copies += 1
        return self


MADE = {
    "tied": (Tied, (4,)),
    "gru": (lambda: mypkg.nets.Gated(SHAPE, 3), SHAPE),
    "transformer": (lambda: mypkg.nets.Attentive(SHAPE, 3), SHAPE),
    "traced": (lambda: torch.fx.symbolic_trace(mypkg.nets.plain((4,), 3)), (4,)),
    "normed": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "efficientnet_b0": (lambda: zoo.build(ModelSpec("efficientnet_b0", (3, 32, 32), 3)), (3, 32, 32)),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_what_a_deep_copy_is(name: str) -> None:
    make, shape = MADE[name]
    module = make().eval()
    first = next(module.parameters())
    if first.is_leaf:
        first.requires_grad_(False)
    mine, theirs = clone(module), copy.deepcopy(module)
    assert type(mine).__name__ == type(theirs).__name__
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [(n, p.requires_grad) for n, p in mine.named_parameters()] == [
        (n, p.requires_grad) for n, p in theirs.named_parameters()
    ]
    assert not any(part.training for part in mine.modules())
    owned = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    assert owned.isdisjoint(id(tensor) for tensor in (*mine.parameters(), *mine.buffers()))
    x = torch.randn(2, *shape)
    before = module(x).clone()
    assert torch.equal(mine(x), before)
    with torch.no_grad():
        for tensor in mine.parameters():
            tensor.add_(1)
    assert torch.equal(module(x), before)


def test_what_is_shared_stays_shared() -> None:
    module = clone(Tied())
    assert module.two.weight is module.one.weight
    assert module.again is module.one
    assert module.kept[1]["scale"] is module.scale
    assert len(list(module.parameters())) == 1


def test_a_module_that_copies_itself_does_so_and_a_memo_takes_the_place() -> None:
    own = Counted(2, 2)
    assert clone(nn.Sequential(own))[0] is own
    assert Counted.copies == 1
    layer, given = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
    assert clone(nn.Sequential(layer), {id(layer.weight): given})[0].weight is given


def test_what_a_pass_left_there_is_copied_without_what_it_was_made_of() -> None:
    net, x = Kept(), torch.randn(2, 4)
    net(x)
    twin = clone(net)
    assert torch.equal(twin.share, net.share)
    assert twin.seen[0] is twin.share
    assert twin.share.grad_fn is None
    assert net.share.grad_fn is not None


@pytest.mark.parametrize(("algorithm", "engine"), [("perfedavg", "torch"), ("fedper", "onnx")])
def test_a_network_that_keeps_what_it_sees_learns_and_is_exported(algorithm: str, engine: str, tmp_path: Path) -> None:
    net = Kept()
    net(torch.randn(2, 4)).sum().backward()
    result = talaria.simulate(algorithm, "mypkg.sets:rings", net, rounds=1, engine=engine)
    x = torch.randn(8, 4)
    model = result.model("client-0")
    model(x)
    make_bundle(tmp_path / "me.talaria", model, example=x.numpy()[:1])
    assert Predictor(tmp_path / "me.talaria")(x.numpy()).logits.shape == (8, 3)
