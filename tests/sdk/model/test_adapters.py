"""Adapters change nothing at first, train little, and fold away exactly where that is possible."""

from collections import OrderedDict

import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria import tensors
from talaria.errors import ConfigError, ModelError
from talaria.model import adapters, zoo
from talaria.model.adapters import HEART_RESNET
from talaria.model.merging import merge
from talaria.model.pruning import compact, survey
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of

LOWRANK, FULL, NARROW = AdapterSpec("lowrank", 4), AdapterSpec("residual"), AdapterSpec("residual", 4)
BENT, HEART = AdapterSpec("residual", 4, nonlinear=True), AdapterSpec("heart")


def _model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect"),
                bn=nn.BatchNorm2d(8),
                depth=nn.Conv2d(8, 8, 3, groups=8),
                conv2=nn.Conv2d(8, 6, (3, 1), dilation=(1, 2), bias=False),
                pool=nn.AdaptiveAvgPool2d(2),
                flatten=nn.Flatten(),
                fc=nn.Linear(24, 10),
                act=nn.ReLU(),
                head=nn.Linear(10, 3),
            )
        )


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def _trained(model):
    """Every adapter tensor moved away from its start, statistics included."""
    generator = torch.Generator().manual_seed(2)
    for key, value in model.state_dict().items():
        if "adapter" in key.split(".") and value.is_floating_point():
            value.add_(0.3 * torch.rand(value.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("spec", [LOWRANK, FULL, NARROW, BENT], ids=["lowrank", "full", "narrow", "bent"])
def test_a_fresh_adapter_changes_nothing_and_the_rest_keeps_its_bits(spec):
    plain = _model().eval()
    model = adapters.insert(plain, spec, skip=["head"])
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert isinstance(plain.conv1, nn.Conv2d)
    assert torch.equal(model.conv1.base.weight, plain.conv1.weight)
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.depth, nn.Conv2d)
    assert not model.conv1.training


@pytest.mark.parametrize("spec", [LOWRANK, FULL, NARROW, HEART], ids=["lowrank", "full", "narrow", "heart"])
def test_merging_is_exact_and_gives_the_plain_names_back(spec):
    model = _trained(adapters.insert(_model(), spec, skip=["head"]))
    merged = merge(model)
    with torch.no_grad():
        assert roundings(merged(X), model(X)) <= 200
        assert float((model(X) - _model().eval()(X)).abs().max()) > 1e-3
    assert set(_model().state_dict()) <= set(merged.state_dict())
    assert adapters.count(merged) == 0
    extra = set(merged.state_dict()) - set(_model().state_dict())
    assert extra == ({"conv2.bias"} if spec is HEART else set())


def test_merging_holds_for_a_pruned_model_too(random_mask):
    model = _trained(adapters.insert(_model(), LOWRANK, skip=["head"]))
    found = survey(model, X)
    small = compact(model, random_mask(found.layout, 2))
    with torch.no_grad():
        assert roundings(merge(small)(X), small(X)) <= 200


def test_what_cannot_be_merged_is_named():
    with pytest.raises(ModelError, match=r"'conv1' has a ReLU"):
        merge(adapters.insert(_model(), BENT))
    grouped = adapters.insert(_model(), AdapterSpec("residual", where=("depth",)))
    with pytest.raises(ModelError, match=r"'depth' mixes.*groups=8"):
        merge(grouped)


def test_counts_by_hand():
    model = adapters.insert(_model(), LOWRANK, skip=["head"])
    assert adapters.count(model) == (3 * 9 * 4 + 4 * 8) + (8 * 3 * 4 + 4 * 6) + (24 * 4 + 4 * 10)
    assert adapters.count(adapters.insert(_model(), FULL, skip=["head"])) == 64 + 36 + 100
    assert adapters.count(adapters.insert(_model(), NARROW, skip=["head"])) == 64 + 48 + 80
    assert adapters.count(adapters.insert(_model(), HEART)) == (64 + 16) + (36 + 12)


def test_where_takes_whole_components_and_patterns():
    model = adapters.insert(_model(), AdapterSpec("lowrank", 2, where=("conv*",)))
    assert {k.split(".")[0] for k in model.state_dict() if ".adapter." in k} == {"conv1", "conv2"}
    with pytest.raises(ModelError, match=r"where=\['con'\].*layers that can: conv1, conv2, fc, head"):
        adapters.insert(_model(), AdapterSpec("lowrank", 2, where=("con",)))
    with pytest.raises(ModelError, match="depth"):
        adapters.insert(_model(), AdapterSpec("lowrank", 2, where=("depth",)))
    with pytest.raises(ModelError, match="head"):
        adapters.insert(_model(), AdapterSpec("lowrank", 2, where=("head",)), skip=["head"])


def test_a_rank_beyond_the_layer_is_cut():
    model = adapters.insert(_model(), AdapterSpec("lowrank", 1000, where=("conv2", "fc")))
    assert model.conv2.adapter.down.weight.shape[0] == 6
    assert model.fc.adapter.up.weight.shape == (10, 10)


def test_seeded_and_blind_to_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = (adapters.insert(_model(), LOWRANK, seed=s) for s in (1, 1))
    other = adapters.insert(_model(), LOWRANK, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert tensors.equal(state_of(one), state_of(two))
    assert not torch.equal(one.fc.adapter.down.weight, other.fc.adapter.down.weight)


def test_twice_or_nowhere_is_refused():
    with pytest.raises(ModelError, match="already"):
        adapters.insert(adapters.insert(_model(), LOWRANK), NARROW)
    with pytest.raises(ModelError, match="none"):
        adapters.insert(nn.Sequential(nn.ReLU()), LOWRANK)


def test_layers_that_others_read_stay_plain():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2)
            self.other = nn.MultiheadAttention(8, 2, add_bias_kv=True)
            self.projected = nn.LSTM(8, 8, proj_size=4)
            self.fc = nn.Linear(8, 8)
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.fc.weight
            self.free = nn.Linear(8, 2)

    model = adapters.insert(Attention(), LOWRANK)
    assert {k.split(".")[0] for k in model.state_dict() if "adapter" in k} == {"attend", "free"}
    behind = adapters.insert(Attention(), AdapterSpec("residual"))
    assert {k.split(".")[0] for k in behind.state_dict() if "adapter" in k} == {"free"}
    with pytest.raises(ModelError, match=r"'attend.out_proj'.*layers that can: attend, free"):
        adapters.insert(Attention(), AdapterSpec("lowrank", 2, where=("attend.out_proj",)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "magic"},
        {"kind": "lowrank"},
        {"kind": "lowrank", "rank": 0},
        {"kind": "lowrank", "rank": True},
        {"kind": "lowrank", "rank": 10**9},
        {"kind": "heart", "rank": 4},
        {"kind": "residual", "nonlinear": True},
        {"kind": "lowrank", "rank": 4, "nonlinear": True},
        {"kind": "residual", "where": ("",)},
        {"kind": "residual", "where": 3},
    ],
    ids=str,
)
def test_impossible_specs_are_refused(fields):
    with pytest.raises(ConfigError, match="adapters:"):
        AdapterSpec(**fields)


@pytest.mark.parametrize("spec", [LOWRANK, BENT, HEART_RESNET])
def test_specs_travel_as_json(spec):
    assert AdapterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "data", [None, [], {}, {"kind": "lowrank", "rank": 4, "odd": 1}, {"kind": "residual", "where": "conv1"}]
)
def test_damaged_json_is_refused(data):
    with pytest.raises(ConfigError, match="adapters:"):
        AdapterSpec.from_json(data)


def test_a_kind_that_no_layer_of_the_model_takes_is_told_as_that():
    with pytest.raises(ModelError, match=r"no layer of this model can take kind='heart'; use another kind, or none"):
        adapters.insert(nn.Sequential(nn.Linear(4, 3)), HEART)


def test_adapters_train_while_the_base_stays():
    model = adapters.insert(_model(), LOWRANK, skip=["head"])
    tuned = [p for n, p in model.named_parameters() if "adapter" in n]
    base = tensors.copied({k: v for k, v in state_of(model).items() if ".base." in k})
    optimizer = torch.optim.SGD(tuned, lr=0.1)
    first = model.eval()(X).square().mean()
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < float(first.detach())
    assert tensors.equal(base, {k: v for k, v in state_of(model).items() if ".base." in k})


def test_heart_pfl_on_resnet18_counts_as_published():
    spec = ModelSpec("resnet18", (3, 32, 32), 100, HEART_RESNET)
    model = zoo.build(spec)
    assert adapters.count(model, ("adapter", "bn1", "bn2", "fc")) == 1_459_428
    assert sum(p.numel() for p in model.parameters()) == 12_628_132
    convs = [m for m in model.modules() if isinstance(m, adapters.Heart)]
    assert len(convs) == 16
    assert sum(m.conv.weight.numel() for m in convs) == 1_392_640
    deviation = torch.cat([m.conv.weight.detach().flatten() for m in convs]).std()
    assert float(deviation) == pytest.approx(1e-4, rel=0.01)
    assert len(zoo.split(spec, model).adapters) == 16 * 6
    for classes, total in ((10, 1_413_258), (101, 1_459_941)):
        other = zoo.build(ModelSpec("resnet18", (3, 32, 32), classes, HEART_RESNET))
        assert adapters.count(other, ("adapter", "bn1", "bn2", "fc")) == total


def test_a_silent_heart_adapter_leaves_the_block_as_it_was():
    plain = _model().eval()
    model = adapters.insert(plain, HEART)
    for layer in model.modules():
        if isinstance(layer, adapters.Heart):
            layer.conv.weight.data.zero_()
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


def test_a_head_in_two_factors_has_few_parameters_and_follows_its_seed():
    whole = _model()
    made = adapters.factored(whole, "fc", 4, seed=3)
    assert isinstance(whole.fc, nn.Linear)
    assert {k: tuple(v.shape) for k, v in made.fc.state_dict().items()} == {
        "down.weight": (4, 24),
        "up.weight": (10, 4),
        "up.bias": (10,),
    }
    again = adapters.factored(whole, "fc", 4, seed=3).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in made.state_dict().items())
    assert not torch.equal(adapters.factored(whole, "fc", 4, seed=4).fc.up.weight, made.fc.up.weight)
    with torch.no_grad():
        x = torch.randn(5, 24)
        product = nn.functional.linear(x, made.fc.up.weight @ made.fc.down.weight, made.fc.up.bias)
        assert roundings(made.fc(x), product) <= 64
    assert isinstance(adapters.factored(whole, "fc", 8).fc, nn.Linear)  # 8 * (24 + 10) is more than 24 * 10
    with pytest.raises(ModelError, match="only a linear layer has two factors"):
        adapters.factored(whole, "conv1", 4)


def test_the_zoo_builds_the_head_that_a_spec_asks_for_and_old_specs_read_the_same():
    asked = AdapterSpec("lowrank", 2, head=3)
    assert AdapterSpec.from_json(asked.to_json()) == asked
    assert "head" not in AdapterSpec("lowrank", 2).to_json()
    spec = ModelSpec("imu_cnn", (6, 40), 7, adapters=asked)
    assert ModelSpec.from_json(spec.to_json()) == spec
    model = zoo.build(spec)
    split = zoo.split(spec, model)
    assert set(split.of("head")) == {"head.down.weight", "head.up.weight", "head.up.bias"}
    assert not any(k.startswith("head") for k in split.of("adapters"))
    model = _trained(model).double()  # the moved weights make its inner numbers large
    merged = merge(model).eval()
    with torch.no_grad():
        x = zoo.example(spec, 3).double()
        assert roundings(merged(x), model(x)) <= 10_000
    with pytest.raises(ConfigError, match="head=0"):
        AdapterSpec("lowrank", 2, head=0)


class Asking(nn.Module):
    """Calls layers by name, and asks them for their sizes; ``past`` reads a weight itself."""

    def __init__(self, past):
        super().__init__()
        self.conv, self.one, self.two = nn.Conv1d(3, 4, 3), nn.Linear(24, 8), nn.Linear(8, 8)
        self.head, self.past = nn.Linear(8, 3), past

    def forward(self, x):
        y = self.one(input=self.conv(input=x).reshape(-1, self.one.in_features)).relu()
        return self.head(nn.functional.linear(y, self.two.weight) if self.past else self.two(input=y))


@pytest.mark.parametrize("spec", [LOWRANK, NARROW], ids=["lowrank", "narrow"])
def test_a_layer_is_called_by_name_and_asked_with_its_adapter_as_without(spec):
    plain, x = Asking(past=False).eval(), torch.randn(2, 3, 8)
    model = adapters.insert(plain, spec, skip=["head"])
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert torch.allclose(merge(_trained(model))(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_read_past_its_layer_takes_no_adapter():
    model = adapters.insert(Asking(past=True), LOWRANK, skip=["head"])
    with pytest.raises(ModelError, match=r"reads 'weight' of layer 'two' itself.*leave that layer out \(where"):
        model(torch.randn(2, 3, 8))
    apart = adapters.insert(Asking(past=True), AdapterSpec("lowrank", 4, where=("conv", "one")), skip=["head"])
    assert apart(torch.randn(2, 3, 8)).shape == (2, 3)
