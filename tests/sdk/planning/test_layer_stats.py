import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from talaria.model import pruning, zoo
from talaria.model.masks import ChannelMask
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.widths import first_of
from talaria.planning.anatomy import FEATURES, deployed_values
from talaria.planning.latency_model import lively
from talaria.planning.layer_stats import anatomy
from talaria.planning.onnx_runtime import Graph, exporter

SPECS = [
    ModelSpec("imu_cnn", (6, 100), 7),
    ModelSpec("fmnist_cnn", (1, 28, 28), 10),
    ModelSpec("mobilenet_v3_small", (3, 64, 64), 10),
    ModelSpec("resnet18", (3, 32, 32), 10),
    ModelSpec("imu_cnn", (6, 100), 7, adapters=AdapterSpec("lowrank", 4)),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name + ("+adapters" if s.adapters else ""))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_shapes_are_those_of_the_compact_model(spec: ModelSpec, data: st.DataObject) -> None:
    parts = anatomy(spec)
    widths = {g: data.draw(st.integers(1, n), label=g) for g, n in parts.layout.sizes.items()}
    mask = ChannelMask(parts.layout, {g: tuple(range(w)) for g, w in widths.items()})
    small = pruning.compact(zoo.build(spec), mask)
    for key, value in small.state_dict().items():
        assert parts.shape(key, widths) == tuple(value.shape), key
    assert parts.values(list(parts.shapes), widths) == sum(v.numel() for v in small.state_dict().values())


def test_products_by_hand() -> None:
    """conv1 32x6x7 on 50 steps, conv2 ... as the model says; the head reads 96 channels at 4 moments."""
    parts = anatomy(SPECS[0])
    want = 0
    length, into = 100, 6
    from talaria.model.nets.small_cnns import IMU_BLOCKS

    for out, kernel, stride in IMU_BLOCKS:
        length = (length - 1) // stride + 1
        want += out * into * kernel * length
        into = out
    head = zoo.build(SPECS[0]).get_submodule("head")
    want += head.weight.numel()
    assert parts.products(parts.full()) == pytest.approx(want)


def test_a_width_within_a_block_costs_the_whole_block() -> None:
    parts = anatomy(SPECS[0])
    full = parts.full()
    by = {w: parts.features({**full, "conv2": w}, block=16) for w in (33, 48, 49)}
    assert by[33] == by[48]
    assert by[48] < by[49]
    assert parts.features({**full, "conv2": 33}) < parts.features({**full, "conv2": 48})
    assert len(by[33]) == len(FEATURES)


def test_blocks_that_fill_no_set_of_four_leave_products_idle() -> None:
    parts = anatomy(SPECS[0])
    full = parts.full()
    idle = {
        w: dict(zip(FEATURES, parts.features({**full, "conv2": w}, block=8), strict=True))["idle"]
        for w in (8, 16, 24, 32, 40, 64)
    }
    assert idle[32] == idle[64]
    assert idle[8] - idle[32] == pytest.approx(3 * (idle[24] - idle[32]))
    assert idle[16] - idle[32] == pytest.approx(2 * (idle[24] - idle[32]))
    assert idle[40] == idle[8] > idle[32]


def test_groups_are_found_again_under_their_adapted_names() -> None:
    bare, full = anatomy(SPECS[0]), anatomy(SPECS[4])
    names = bare.renamed(full)
    assert set(names) == set(bare.layout.sizes)
    assert all(full.layout.sizes[theirs] == bare.layout.sizes[own] for own, theirs in names.items())
    assert bare.renamed(bare) == {g: g for g in bare.layout.sizes}


def test_merged_adapters_cost_no_product() -> None:
    bare, full = anatomy(SPECS[0]), anatomy(SPECS[4])
    assert full.products(full.full()) == bare.products(bare.full())


class Odd(nn.Module):
    """Positions that no layer holds, a layer that is called three times, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(6, 16, 3, padding=1)
        self.places = nn.Parameter(torch.ones(16, 12))
        self.again = nn.Conv1d(16, 16, 3, padding=1)
        self.down, self.up = nn.Conv1d(16, 24, 1), nn.ConvTranspose1d(16, 4, 2, 2)
        self.head = nn.Linear(28, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu() + self.places
        for _ in range(3):
            x = self.again(x).relu()
        logits: Tensor = self.head(torch.cat((self.down(x).mean(-1), self.up(x).mean(-1)), 1))
        return logits


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.head = nn.Embedding(500, 16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.one(self.table(x).mean(1)).relu())
        return logits


@pytest.mark.parametrize(("net", "shape"), [(Odd, (6, 12)), (Words, (20,))], ids=["odd", "words"])
def test_the_values_of_the_file_are_counted_once_each(net: type[nn.Module], shape: tuple[int, ...]) -> None:
    spec = zoo.keep(net(), shape, 3)
    parts = anatomy(spec)
    for share in (1.0, 0.5):
        widths = {group: max(1, int(share * size)) for group, size in parts.layout.sizes.items()}
        small = pruning.compact(lively(zoo.build(spec)), first_of(parts.layout, widths))
        held = Graph(exporter()(small, zoo.example(spec, 2)), parts).tensors.values()
        assert deployed_values(parts, widths) == sum(math.prod(t.dims) for t in held if t.data_type == 1)


def test_products_of_a_transposed_convolution_by_hand() -> None:
    parts = anatomy(zoo.keep(Odd(), (6, 12), 3))
    want = 12 * (6 * 16 * 3 + 3 * 16 * 16 * 3 + 16 * 24 + 16 * 4 * 2) + 28 * 3
    assert parts.products(parts.full()) == pytest.approx(want)


class Padded(nn.Module):
    """An encoder under a mask of what is padding, which torch nests, and layers that are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
        self.gru, self.head = nn.GRU(32, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(input=self.encoder(self.table(input=x), src_key_padding_mask=x == 0))
        logits: Tensor = self.head(input=self.gru(input=y.relu())[0].mean(1))
        return logits


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_products_of_padded_sequences_and_of_layers_called_by_name() -> None:
    parts = anatomy(zoo.keep(Padded(), (12,), 3))
    want = 12 * (16 * 48 + 16 * 16 + 2 * 16 * 24 + 16 * 32 + 24 * (32 + 8)) + 8 * 3
    assert parts.products(parts.full()) == pytest.approx(want)
    assert set(parts.full()) == {"encoder.layers.0.self_attn", "encoder.layers.0.linear1", "one", "gru"}
