"""Networks of every kind of coupling, with weights and statistics that hide nothing."""

import copy
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch_pruning
from torch import Tensor, nn

from talaria.model import prunability
from talaria.model.masks import ChannelLayout, ChannelMask


@lru_cache
def _nets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("talaria_test_nets", Path(__file__).with_name("nets.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS = ("residual", "squeeze_excite", "depthwise", "grouped", "concat", "flatten")


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and affine values away from their initial 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.dim() == 1:
            noise = torch.rand(value.shape, generator=generator)
            value.copy_(0.5 + noise if key.endswith(("var", "weight")) else noise - 0.5)
    return model


@lru_cache
def _layout(kind: str) -> ChannelLayout:
    model, example = _make(kind)
    return prunability.layout(model, example)


def _make(kind: str) -> tuple[nn.Module, Tensor]:
    make, shape = _nets().NETS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return stirred(make()), torch.randn(2, *shape)


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, ChannelLayout]:
    """``(model, example, layout)`` of one kind of coupling."""
    model, example = _make(request.param)
    return model, example, _layout(request.param)


@pytest.fixture
def make_net() -> Callable[[str], tuple[nn.Module, Tensor, ChannelLayout]]:
    return lambda kind: (*_make(kind), _layout(kind))


@pytest.fixture
def random_mask() -> Callable[[ChannelLayout, int], ChannelMask]:
    """A mask of random channels, at least one per group."""

    def make(layout: ChannelLayout, seed: int) -> ChannelMask:
        generator = torch.Generator().manual_seed(seed)
        kept = {}
        for group, size in layout.sizes.items():
            count = int(torch.randint(1, size + 1, (1,), generator=generator))
            kept[group] = tuple(sorted(torch.randperm(size, generator=generator)[:count].tolist()))
        return ChannelMask(layout, kept)

    return make


@pytest.fixture
def removed_by_torch_pruning() -> Callable[[nn.Module, Tensor, ChannelMask], nn.Module]:
    """The same channels taken out by torch-pruning itself, one new group for each channel group."""
    return _removed


def _removed(model: nn.Module, example: Tensor, mask: ChannelMask) -> nn.Module:
    twin = copy.deepcopy(model)
    graph = torch_pruning.DependencyGraph().build_dependency(twin, example_inputs=example, verbose=False)
    for group, kept in mask.kept.items():
        name = group.partition(":")[0]
        layer = twin.get_submodule(name)
        gone, offset = [], 0
        for segment, repeat in mask.layout.axes[f"{name}.weight"][0]:
            size = mask.layout.sizes[segment]
            if segment == group:
                lost = [channel for channel in range(size) if channel not in kept]
                gone += [offset + channel * repeat + r for channel in lost for r in range(repeat)]
            offset += size * repeat
        if gone:
            pruner = graph.get_pruner_of_module(layer)
            graph.get_pruning_group(layer, pruner.prune_out_channels, gone).prune()
    return twin.train(model.training)
