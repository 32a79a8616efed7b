import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from talaria.model import tokens, zoo
from talaria.model.spec import ModelSpec
from talaria.planning import memory


def test_a_linear_layer_by_hand() -> None:
    layer = nn.Linear(100, 50, bias=False)
    weights, x, y = 100 * 50 * 4, 100 * 4, 50 * 4
    assert memory.running(layer, (100,)) == weights + x + y
    peak = memory.training(layer, (100,), batch=8, momentum=False)
    assert peak >= 2 * weights + 8 * (x + y)
    assert memory.training(layer, (100,), batch=8) == peak + weights


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec("imu_cnn", (6, 40), 5),
        ModelSpec("mobilenet_v3_small", (3, 32, 32), 5),
        ModelSpec("resnet18", (3, 32, 32), 5),
    ],
    ids=lambda s: s.name,
)
def test_without_values_it_is_what_it_is_with_values(spec: ModelSpec) -> None:
    model = zoo.build(spec)
    ledger = memory.Ledger()
    ledger.know([*model.parameters(), *model.buffers()])
    with ledger:
        F.cross_entropy(model(torch.zeros(4, *spec.input_shape)), torch.zeros(4, dtype=torch.int64)).backward()
    told = memory.training(model, spec.input_shape, 4, momentum=False)
    assert told == pytest.approx(ledger.peak, rel=0.02)


def test_frozen_layers_need_no_gradients_and_save_no_activations() -> None:
    spec = ModelSpec("resnet18", (3, 32, 32), 5)
    model = zoo.build(spec)
    split = zoo.split(spec, model)
    whole = memory.training(model, spec.input_shape, 8)
    memory.train_only(model, split.of("head"))
    head = memory.training(model, spec.input_shape, 8)
    weights = sum(t.nbytes for t in model.state_dict().values())
    assert head < 1.2 * weights
    assert whole > 3 * weights


def test_a_larger_batch_needs_more_and_the_model_is_left_alone() -> None:
    spec = ModelSpec("imu_cnn", (6, 40), 5)
    model = zoo.build(spec)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    small, large = (memory.training(model, spec.input_shape, b) for b in (4, 8))
    assert small < large < 2 * small
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Steps(nn.Module):
    """A class for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(6, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(x)[0].relu())
        return logits


class Words(nn.Module):
    """Reads tokens, looks at their values, and has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
        self.one, self.two, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.two.weight = self.one.weight
        tokens.as_numbers(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(self.table(x), src_key_padding_mask=x == 0)[:, : int((x != 0).sum(1).max())]
        logits: Tensor = self.head(self.two(self.one(y.mean(1)).relu()))
        return logits


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("net", "shape"), [(Steps, (30, 6)), (Words, (12,))])
def test_it_is_what_tensors_with_values_hold(net: type[nn.Module], shape: tuple[int, ...]) -> None:
    model = net()
    x, before = tokens.example(model, shape, 8), torch.get_rng_state()
    ledger = memory.Ledger()
    ledger.know([*model.parameters(), *model.buffers()])
    with ledger:
        out = model(x.clone())
        F.cross_entropy(out.flatten(0, -2), torch.zeros(math.prod(out.shape[:-1]), dtype=torch.int64)).backward()
    torch.set_rng_state(before)
    momenta = sum(p.nbytes for p in model.parameters())
    assert memory.training(model, shape, 8) >= ledger.peak + momenta
    assert memory.training(model, shape, 8) == pytest.approx(ledger.peak + momenta, rel=0.06)
    assert memory.running(model, shape) > sum(p.nbytes for p in model.parameters()) + x[:1].nbytes
    assert torch.equal(torch.get_rng_state(), before)
