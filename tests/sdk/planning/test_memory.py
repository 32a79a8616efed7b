import pytest
import torch
from torch import nn
from torch.nn import functional as F

from talaria.model import zoo
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
