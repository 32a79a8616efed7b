"""A compact model computes what its masked dense twin computes, for every way of coupling channels."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import roundings

from talaria import tensors
from talaria.errors import ModelError
from talaria.model.compaction import compact, expand
from talaria.model.masks import ChannelMask, apply_dense, gather, scatter, shrink
from talaria.model.state import load, state_of

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _twin(model, mask):
    twin = copy.deepcopy(model)
    load(twin, apply_dense(state_of(model), mask))
    return twin.eval()


@SETTINGS
@given(seed=st.integers(0, 2**31))
def test_compact_equals_masked_dense_twin_and_gather_equals_its_state(net, random_mask, seed):
    model, x, layout = net
    mask = random_mask(layout, seed)
    small = compact(model, mask)
    state = state_of(small)
    assert list(state) == list(state_of(model))
    assert tensors.equal(state, gather(state_of(model), mask))
    with torch.no_grad():
        assert roundings(small.eval()(x), _twin(model, mask)(x)) <= 200


@SETTINGS
@given(seed=st.integers(0, 2**31))
def test_scatter_of_gather_is_the_identity_on_the_kept_and_touches_nothing_else(net, random_mask, seed):
    model, _, layout = net
    mask = random_mask(layout, seed)
    dense = state_of(model)
    other = {k: np.full_like(v, 7) for k, v in dense.items()}
    small = gather(dense, mask)
    back = scatter(small, mask, other)
    assert tensors.equal(gather(back, mask), small)
    kept = gather({k: np.ones_like(v) for k, v in dense.items()}, mask)
    inside = scatter(kept, mask, {k: np.zeros_like(v) for k, v in dense.items()})
    for key, value in back.items():
        assert np.array_equal(value[inside[key] == 1], dense[key][inside[key] == 1])
        assert (value[inside[key] == 0] == 7).all()
    assert tensors.equal(scatter(small, mask, dense), dense)


@SETTINGS
@given(seed=st.integers(0, 2**31))
def test_pruning_twice_is_pruning_once_to_the_smaller_mask(net, random_mask, seed):
    model, x, layout = net
    first = random_mask(layout, seed)
    second = ChannelMask(layout, {g: kept[: -(-len(kept) // 2)] for g, kept in first.kept.items()})
    once, twice = compact(model, second), compact(compact(model, first), second, held=first)
    assert tensors.equal(state_of(once), state_of(twice))
    assert tensors.equal(shrink(gather(state_of(model), first), first, second), state_of(once))
    with torch.no_grad():
        assert torch.equal(once.eval()(x), twice.eval()(x))


def test_layers_know_their_new_size_and_train_on(net, random_mask):
    model, x, layout = net
    small = compact(model.train(), random_mask(layout, 3))
    assert small.training
    assert state_of(model).keys() == state_of(small).keys()
    loss = small(x).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    assert all(p.grad is None for p in model.parameters())
    for layer in small.modules():
        if isinstance(layer, torch.nn.Conv2d):
            assert layer.weight.shape[:2] == (layer.out_channels, layer.in_channels // layer.groups)


def test_expand_puts_every_channel_back(net, random_mask):
    model, _, layout = net
    mask = random_mask(layout, 5)
    blank = copy.deepcopy(model)
    load(blank, {k: np.zeros_like(v) for k, v in state_of(model).items()})
    back = expand(compact(model, mask), mask, like=blank)
    assert tensors.equal(state_of(back), apply_dense(state_of(model), mask))


def test_a_mask_of_another_model_is_refused(make_net, random_mask):
    model, _, _ = make_net("residual")
    _, _, other = make_net("grouped")
    with pytest.raises(ModelError, match=r"conv1\.weight"):
        compact(model, random_mask(other, 1))


def test_growing_back_is_refused(make_net, random_mask):
    model, _, layout = make_net("residual")
    mask = random_mask(layout, 1)
    with pytest.raises(ModelError, match="only shrink"):
        compact(compact(model, mask), layout.full(), held=mask)
