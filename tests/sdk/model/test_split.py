"""Every key belongs to exactly one part, found by whole dotted names."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from talaria.errors import ModelError
from talaria.model.split import candidates, split_model, under


def _model():
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv1d(3, 8, 3),
            bn=nn.BatchNorm1d(8),
            header=nn.Conv1d(8, 8, 1),
            flatten=nn.Flatten(),
            head=nn.Linear(8, 2),
        )
    )


def test_a_prefix_is_a_whole_dotted_name():
    assert under("head.weight", "head")
    assert under("a.b.c", "a.b")
    assert not under("header.weight", "head")
    assert not under("my.head.weight", "head")


def test_parts_cover_all_keys_once_and_name_the_buffers():
    model = _model()
    split = split_model(model)
    assert split.head == ("head.weight", "head.bias")
    assert "header.weight" in split.body
    assert sorted(split.keys) == sorted(model.state_dict())
    assert split.statistics == {"bn.running_mean", "bn.running_var"}
    assert split.counters == {"bn.num_batches_tracked"}
    assert "bn.running_mean" not in split.travels("body", "head")
    assert "bn.weight" in split.travels("body")


def test_aggregated_buffers_travel_but_counters_never():
    split = split_model(_model(), buffers="aggregate")
    assert {"bn.running_mean", "bn.running_var"} <= set(split.travels("body"))
    assert "bn.num_batches_tracked" not in split.travels("body", "adapters", "head")


def test_a_causal_mask_of_infinities_never_travels():
    model = _model()
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    assert "mask" not in split_model(model, buffers="aggregate").travels("body", "adapters", "head")


def test_several_prefixes_and_named_adapters():
    split = split_model(_model(), head=["head", "header"], adapters="bn")
    assert split.head == ("header.weight", "header.bias", "head.weight", "head.bias")
    assert split.adapters[0] == "bn.weight"
    assert len(split.adapters) == 5


def test_a_missing_head_lists_the_candidates():
    with pytest.raises(ModelError, match=r"head='classifier' names no layer.*candidates: conv, bn, header, head"):
        split_model(_model(), head="classifier")


def test_candidates_name_nested_linear_layers():
    assert "1.0" in candidates(nn.Sequential(nn.Conv1d(3, 3, 1), nn.Sequential(nn.Linear(3, 3))))


def test_a_head_that_is_everything_and_a_key_named_twice_are_refused():
    with pytest.raises(ModelError, match=r"whole model, .*or put a layer before it"):
        split_model(nn.Sequential(OrderedDict(head=nn.Linear(2, 2))))
    with pytest.raises(ModelError, match="as head and as adapters"):
        split_model(_model(), adapters="head")


def test_a_model_without_parameters_says_so():
    with pytest.raises(ModelError, match="no parameters"):
        split_model(nn.Sequential(nn.ReLU()))
