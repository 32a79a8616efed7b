"""Which channels stay: scores by hand, monotone masks, whole blocks, ties by index."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import roundings
from torch import nn

from talaria import tensors
from talaria.errors import ConfigError, ModelError
from talaria.model import masks, pruning, zoo
from talaria.model.masks import ChannelLayout
from talaria.model.spec import ModelSpec
from talaria.model.state import load, state_of

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _two_layers():
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0], [-2.0, 0.0], [0.0, 0.0], [2.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[4.0, 0.0, 0.0, -4.0]]))
    return model, pruning.layout(model, torch.zeros(1, 2))


def test_l1_by_hand():
    model, layout = _two_layers()
    # Rows have L1 (2, 2, 0, 4) with mean 2, columns (4, 0, 0, 4) with mean 2.
    scores = pruning.importance(model, layout)
    assert scores["0"].tolist() == [(1 + 2) / 2, (1 + 0) / 2, 0, (2 + 2) / 2]
    assert scores["0"].dtype == np.float64


def test_taylor_by_hand_from_given_and_from_own_gradients():
    model, layout = _two_layers()
    gradients = {
        "0.weight": np.array([[1.0, 0.0], [1.0, 9.0], [5.0, 5.0], [0.0, 0.5]], np.float32),
        "1.weight": np.zeros((1, 4), np.float32),
    }
    # |w * g| of rows is (1, 2, 0, 1) with mean 1; of columns 0.
    want = [0.5, 1.0, 0.0, 0.5]
    assert pruning.importance(model, layout, "taylor", gradients=gradients)["0"].tolist() == want
    for key, parameter in model.named_parameters():
        parameter.grad = torch.from_numpy(gradients[key])
    assert pruning.importance(model, layout, "taylor")["0"].tolist() == want


def test_bn_is_the_absolute_scale_and_falls_back_to_l1(make_net):
    model, _, layout = make_net("residual")
    model.bn1.weight.data[3] = -9.0
    scores = pruning.importance(model, layout, "bn")
    assert scores["conv1"].tolist() == model.bn1.weight.detach().double().abs().tolist()
    both = (model.bn0.weight.detach().double().abs() + model.bn2.weight.detach().double().abs()) / 2
    assert roundings(scores["stem"], both) <= 200
    assert np.array_equal(scores["down"], pruning.importance(model, layout)["down"])


def test_slopes_of_an_activation_are_no_scale():
    """A fresh PReLU has the same slope for all channels, by which the last ones would go."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.PReLU(8), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(8 * 5, 2))
    layout = pruning.layout(model, torch.zeros(2, 3, 5))
    assert "0.1.weight" in layout.axes
    assert tensors.equal(pruning.importance(model, layout, "bn"), pruning.importance(model, layout))


def test_scores_of_a_compact_model_lie_in_global_coordinates(net, random_mask):
    model, _, layout = net
    mask = random_mask(layout, 4)
    scores = pruning.importance(pruning.compact(model, mask), layout, mask=mask)
    for group, size in layout.sizes.items():
        gone = [c for c in range(size) if c not in mask.kept[group]]
        assert scores[group].shape == (size,)
        assert (scores[group][gone] == -np.inf).all()
        assert np.isfinite(scores[group][list(mask.kept[group])]).all()


@SETTINGS
@given(keep=st.floats(0.01, 1), block=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_masks_only_shrink_in_whole_blocks_and_never_vanish(net, random_mask, keep, block, seed):
    model, _, layout = net
    mask = random_mask(layout, seed)
    scores = pruning.importance(pruning.compact(model, mask), layout, mask=mask)
    smaller = pruning.choose(scores, mask, keep=keep, block=block)
    assert smaller.within(mask)
    for group, kept in smaller.kept.items():
        had = len(mask.kept[group])
        assert len(kept) == had or len(kept) % block == 0
        assert len(kept) >= min(had, block)
        assert len(kept) >= min(had, keep * had - 1e-6)
        worst = min(float(scores[group][c]) for c in kept)
        assert all(float(scores[group][c]) <= worst for c in mask.kept[group] if c not in kept)


def test_ties_go_to_the_lower_index():
    layout = ChannelLayout({"a": 6}, {})
    scores = {"a": np.array([1.0, 2, 1, 1, 2, 1])}
    assert pruning.choose(scores, layout.full(), widths={"a": 4}, block=1).kept["a"] == (0, 1, 2, 4)
    assert pruning.choose(scores, layout.full(), keep=0.5, block=4).kept["a"] == (0, 1, 2, 4)
    flat = {"a": np.zeros(6)}
    assert pruning.choose(flat, layout.full(), widths={"a": 3}, block=1).kept["a"] == (0, 1, 2)


def test_widths_are_rounded_up_to_blocks_and_never_grow():
    layout = ChannelLayout({"a": 20, "b": 6, "c": 16}, {})
    scores = {g: np.arange(float(n)) for g, n in layout.sizes.items()}
    mask = pruning.choose(scores, layout.full(), widths={"a": 9, "b": 1}, block=8)
    assert {g: len(k) for g, k in mask.kept.items()} == {"a": 16, "b": 6, "c": 16}
    again = pruning.choose(scores, mask, widths={"a": 20}, block=1)
    assert again.kept == mask.kept
    assert pruning.widths(layout.full(), 0.3, 8) == {"a": 8, "b": 6, "c": 8}


def test_the_step_and_cap_schedule_of_the_card():
    # Of 1000 channels a step of 20 % of what remains leaves 800, 640, 512.
    layout = ChannelLayout({"a": 1000}, {})
    mask, seen = layout.full(), []
    for _ in range(3):
        mask = pruning.choose({"a": np.random.default_rng(0).random(1000)}, mask, keep=0.8, block=1)
        seen.append(len(mask.kept["a"]))
    assert seen == [800, 640, 512]


def test_bad_requests_are_refused():
    model, layout = _two_layers()
    scores, full = pruning.importance(model, layout), layout.full()
    with pytest.raises(ConfigError, match="either widths or keep"):
        pruning.choose(scores, full)
    with pytest.raises(ConfigError, match="either widths or keep"):
        pruning.choose(scores, full, widths={}, keep=0.5)
    for keep in (0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="keep="):
            pruning.choose(scores, full, keep=keep)
    with pytest.raises(ConfigError, match="block=0"):
        pruning.choose(scores, full, keep=0.5, block=0)
    with pytest.raises(ModelError, match="'nine'"):
        pruning.choose(scores, full, widths={"nine": 3})
    with pytest.raises(ModelError, match="NaN"):
        pruning.choose({"0": np.full(4, np.nan)}, full, keep=0.5, block=1)
    with pytest.raises(ModelError, match="shape"):
        pruning.choose({"0": np.zeros(3)}, full, keep=0.5, block=1)
    with pytest.raises(ConfigError, match="kind='magic'"):
        pruning.importance(model, layout, "magic")
    with pytest.raises(ModelError, match="no gradient"):
        pruning.importance(model, layout, "taylor")
    with pytest.raises(ModelError, match="the mask keeps"):
        pruning.importance(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), layout)


def test_repeated_pruning_and_a_rebuild_from_spec_mask_and_weights_agree():
    spec = ModelSpec("imu_cnn", (6, 100), 7, seed=3)
    layout, model = zoo.layout(spec), zoo.build(spec)
    mask = layout.full()
    for _ in range(3):
        scores = pruning.importance(model, layout, mask=mask)
        smaller = pruning.choose(scores, mask, keep=0.7)
        model, mask = pruning.compact(model, smaller, held=mask), smaller
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
    kept, weights = masks.as_tensors(mask), tensors.copied(state_of(model))
    restored = masks.from_tensors(zoo.layout(spec), kept)
    rebuilt = pruning.compact(zoo.build(spec), restored)
    load(rebuilt, weights)
    x = zoo.example(spec, 5)
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(x), model.eval()(x))
    assert restored.digest == mask.digest
    assert {g: len(k) for g, k in mask.kept.items()} == {"conv1": 32, "conv2": 32, "conv3": 56, "conv4": 56}
