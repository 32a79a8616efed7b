"""Every model of the zoo: the same weights everywhere, prunable throughout, its shapes checked."""

import builtins
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria import tensors
from talaria.errors import ConfigError
from talaria.model import adapters, zoo
from talaria.model.masks import apply_dense, gather, scatter
from talaria.model.pruning import choose, compact, importance
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import load, state_of

SPECS = {
    "imu_cnn": ModelSpec("imu_cnn", (6, 100), 7),
    "steps_cnn": ModelSpec("steps_cnn", (6, 40), 7),
    "fmnist_cnn": ModelSpec("fmnist_cnn", (1, 28, 28), 10),
    "mlp": ModelSpec("mlp", (9, 2), 3),
    "resnet18": ModelSpec("resnet18", (3, 32, 32), 10),
    "mobilenet_v3_small": ModelSpec("mobilenet_v3_small", (3, 64, 64), 10),
    "efficientnet_b0": ModelSpec("efficientnet_b0", (3, 64, 64), 10),
    "efficientnet_lite0": ModelSpec("efficientnet_lite0", (3, 64, 64), 10),
}
GROUPS = {
    "imu_cnn": 4,
    "steps_cnn": 4,
    "fmnist_cnn": 3,
    "mlp": 2,
    "resnet18": 12,
    "mobilenet_v3_small": 27,
    "efficientnet_b0": 40,
    "efficientnet_lite0": 24,
}
every = pytest.mark.parametrize("name", sorted(SPECS))


def _stirred(spec):
    model = zoo.build(spec)
    generator = torch.Generator().manual_seed(1)
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.dim() == 1:
            noise = torch.rand(value.shape, generator=generator)
            value.copy_(0.5 + noise if key.endswith(("var", "weight")) else 0.2 * (noise - 0.5))
    return model


def test_the_table_is_the_zoo():
    assert sorted(SPECS) == zoo.names()


@every
def test_the_seed_alone_decides_the_weights(name):
    spec = SPECS[name]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one = zoo.build(spec)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(12)
    two = zoo.build(spec)
    assert one.training
    assert tensors.equal(state_of(one), state_of(two))
    other = zoo.build(ModelSpec(name, spec.input_shape, spec.classes, seed=1))
    assert not tensors.equal(state_of(one), state_of(other))
    with torch.no_grad():
        steps = (40,) if name == "steps_cnn" else ()
        assert one.eval()(zoo.example(spec, 3)).shape == (3, *steps, spec.classes)


def test_the_seed_alone_decides_the_weights_where_two_threads_make_the_model(monkeypatch):
    alone, both, plain = zoo.build(SPECS["mlp"]), Barrier(2, timeout=1), nn.Linear.reset_parameters

    def draw(layer):
        with suppress(BrokenBarrierError):
            both.wait()
        plain(layer)

    monkeypatch.setattr(nn.Linear, "reset_parameters", draw)
    with ThreadPoolExecutor(2) as threads:
        for one in threads.map(zoo.build, [SPECS["mlp"]] * 2):
            assert tensors.equal(state_of(one), state_of(alone))


@every
def test_parts_and_channel_groups(name):
    spec = SPECS[name]
    model = zoo.build(spec)
    split = zoo.split(spec, model)
    weight = next(k for k in split.head if k.endswith("weight"))
    assert len(split.head) == 2
    assert model.state_dict()[weight].shape[0] == spec.classes
    assert split.body
    assert split.adapters == ()
    zoo.surveyed.cache_clear()  # it may hold what was found for another seed before that fell out of what it reads
    found = zoo.surveyed(spec)
    assert found.refused == {}
    assert len(found.layout.sizes) == GROUPS[name]
    head = found.layout.axes[weight]
    assert head[0] == ()
    assert head[1] != ()
    assert zoo.layout(ModelSpec(name, spec.input_shape, spec.classes, seed=9)) is found.layout


@every
def test_half_the_channels_gone_equals_the_masked_dense_twin(name):
    spec = SPECS[name]
    model, layout = _stirred(spec), zoo.layout(spec)
    mask = choose(importance(model, layout), layout.full(), keep=0.5)
    small = compact(model, mask)
    twin = copy.deepcopy(model)
    load(twin, apply_dense(state_of(model), mask))
    x = zoo.example(spec, 2)
    with torch.no_grad():
        got, want = small.eval()(x), twin.eval()(x)
    assert roundings(got, want, want.abs().max().clamp(min=1.0)) <= 1000
    dense = state_of(model)
    assert tensors.equal(state_of(small), gather(dense, mask))
    assert tensors.equal(scatter(state_of(small), mask, dense), dense)
    for layer in small.modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)) and layer.out_channels > 8:
            assert layer.out_channels % 8 == 0 or layer.out_channels == dense_width(model, small, layer)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_lite0", "fmnist_cnn"])
def test_the_same_channels_removed_by_torch_pruning_give_the_same_model(name, random_mask, removed_by_torch_pruning):
    spec = SPECS[name]
    model, mask = _stirred(spec), random_mask(zoo.layout(spec), 8)
    reference = removed_by_torch_pruning(model, zoo.example(spec, 1), mask)
    assert tensors.equal(state_of(compact(model, mask)), state_of(reference))


def dense_width(model, small, layer):
    """The unpruned width of the same layer: a group narrower than a block stays whole."""
    name = next(n for n, m in small.named_modules() if m is layer)
    return model.get_submodule(name).weight.shape[0]


def test_published_sizes():
    assert sum(p.numel() for p in zoo.build(SPECS["fmnist_cnn"]).parameters()) == 582_026
    assert sum(p.numel() for p in zoo.build(SPECS["imu_cnn"]).parameters()) == 114_951
    assert sum(p.numel() for p in zoo.build(SPECS["steps_cnn"]).parameters()) == 114_951
    lite = zoo.build(ModelSpec("efficientnet_lite0", (3, 64, 64), 1000))
    assert sum(p.numel() for p in lite.parameters()) == 4_652_008


@pytest.mark.parametrize("shape", [(1, 8), (3, 9), (6, 50), (9, 128), (2, 1000)])
def test_imu_cnn_takes_any_window(shape):
    model = zoo.build(ModelSpec("imu_cnn", shape, 4)).eval()
    assert model(torch.zeros(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 20)])
def test_fmnist_cnn_takes_other_maps(shape):
    assert zoo.build(ModelSpec("fmnist_cnn", shape, 4))(torch.zeros(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("imu_cnn", (100,), "channels, length"),
        ("imu_cnn", (6, 7), "too short"),
        ("fmnist_cnn", (28, 28), "height"),
        ("fmnist_cnn", (1, 15, 28), "too small"),
        ("resnet18", (1, 32, 32), r"\(3, height, width\)"),
        ("efficientnet_lite0", (3, 16, 16), "32x32"),
        ("nothing", (3,), "is unknown; use imu_cnn"),
    ],
)
def test_shapes_and_names_that_do_not_fit(name, shape, words):
    with pytest.raises(ConfigError, match=words):
        zoo.build(ModelSpec(name, shape, 3))


def test_pretrained_is_refused_where_nothing_is_published():
    with pytest.raises(ConfigError, match="no weights are published"):
        zoo.build(ModelSpec("mlp", (3,), 3, pretrained=True))


def test_a_process_that_has_torch_make_other_numbers_is_told():
    """Whatever an app set for itself: the first step ended in torch's word on a layer."""
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"its default dtype is torch.float64, and models are float32"):
            zoo.build(ModelSpec("mlp", (4,), 2))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"), pytest.raises(ConfigError, match=r"its default device is meta; set_default_device"):
        zoo.build(ModelSpec("mlp", (4,), 2))
    with torch.autocast("cpu"), pytest.raises(ConfigError, match="autocast is on, and models are float32"):
        zoo.build(ModelSpec("mlp", (4,), 2))


def test_a_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without_torchvision(name, *args, **kwargs):
        if name.split(".")[0] == "torchvision":
            raise ImportError("No module named 'torchvision'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torchvision)
    with pytest.raises(ConfigError, match=r"talaria\[vision\]"):
        zoo.build(SPECS["resnet18"])


@pytest.mark.parametrize(
    ("shape", "samples", "name"),
    [
        ((12,), 40, "mlp"),
        ((6, 100), 40, "imu_cnn"),
        ((6, 4), 40, "mlp"),
        ((1, 28, 28), 9, "fmnist_cnn"),
        ((3, 8, 8), 9, "mlp"),
    ],
)
def test_fitting_chooses_by_shape(shape, samples, name):
    spec = zoo.fitting(shape, 5, samples)
    assert spec == ModelSpec(name, shape, 5)
    assert zoo.build(spec).eval()(zoo.example(spec, 2)).shape == (2, 5)


def test_fitting_needs_data():
    with pytest.raises(ConfigError, match="samples=0"):
        zoo.fitting((6, 100), 5, 0)


def test_sizes_and_classes_may_be_numpys_own_whole_numbers():
    """As ``x.shape`` worked upon and ``y.max() + 1`` are."""
    counted = ModelSpec("mlp", tuple(np.array([9, 2])), np.arange(3).max() + 1)
    assert ModelSpec.from_json(json.loads(json.dumps(counted.to_json()))) == ModelSpec("mlp", (9, 2), 3)
    with pytest.raises(ConfigError, match="must be 1 to 4 positive sizes"):
        ModelSpec("mlp", (np.float64(9), 2), 3)


def test_specs_travel_as_json():
    spec = ModelSpec("imu_cnn", (6, 100), 7, AdapterSpec("lowrank", 8, ("conv2",)), seed=5)
    text = json.dumps(spec.to_json())
    assert ModelSpec.from_json(json.loads(text)) == spec
    assert hash(ModelSpec.from_json(json.loads(text))) == hash(spec)


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": 3},
        {"input_shape": []},
        {"input_shape": [6, 0]},
        {"input_shape": [6, "100"]},
        {"input_shape": [1] * 5},
        {"input_shape": [1 << 20, 1 << 20]},
        {"input_shape": 100},
        {"classes": 0},
        {"classes": True},
        {"classes": 1 << 40},
        {"seed": -1},
        {"seed": 1.5},
        {"adapters": {"kind": "magic"}},
        {"adapters": "lowrank"},
        {"pretrained": 1},
        {"odd": 1},
    ],
    ids=str,
)
def test_damaged_specs_are_refused(change):
    data = {**ModelSpec("imu_cnn", (6, 100), 7).to_json(), **change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        ModelSpec.from_json(data)


def test_a_field_that_no_model_has_is_named_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="model: seeed=3 is unknown; did you mean 'seed'"):
        ModelSpec.from_json({**ModelSpec("imu_cnn", (6, 100), 7).to_json(), "seeed": 3})


@pytest.mark.parametrize("data", [None, 3, {}, {"name": "mlp", "classes": 3}])
def test_a_spec_that_is_no_spec(data):
    with pytest.raises(ConfigError, match="model:"):
        ModelSpec.from_json(data)


def test_an_adapted_model_has_three_parts_and_prunes():
    spec = ModelSpec("imu_cnn", (6, 100), 7, AdapterSpec("residual", 8))
    model = zoo.build(spec)
    split = zoo.split(spec, model)
    assert split.adapters
    assert all(".adapter." in k for k in split.adapters)
    assert not any("adapter" in k for k in split.head)
    plain = zoo.build(SPECS["imu_cnn"])
    x = zoo.example(spec, 2)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), plain.eval()(x))
    found = zoo.surveyed(spec)
    assert found.refused == {}
    assert found.layout.sizes["conv2.base"] == 64
    assert adapters.count(model) == sum(p.numel() for k, p in model.named_parameters() if k in split.adapters)
