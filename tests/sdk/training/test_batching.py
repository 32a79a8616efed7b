"""Batches: every sample once an epoch, none alone, all from a seed; and the draws of dropout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from talaria import seeds
from talaria.model.split import Split
from talaria.seeds import Draws
from talaria.training import batching
from talaria.training.interface import Task
from talaria.training.layer_draws import LayerDraws
from talaria.types import Recipe, Samples


@given(count=st.integers(1, 40), size=st.integers(1, 12))
def test_an_epoch_is_every_sample_once_and_no_batch_of_one(count: int, size: int) -> None:
    steps = batching.steps_of(Recipe(batch=size, epochs=1, lr=0.05, momentum=0.0), count)
    draws = Draws(0)
    epoch = list(batching.batches(count, size, steps, draws))
    assert sorted(np.concatenate(epoch).tolist()) == list(range(count))
    assert len(epoch) == steps
    assert all(len(piece) <= size + 1 for piece in epoch)
    assert size == 1 or count == 1 or all(len(piece) > 1 for piece in epoch)
    again = list(batching.batches(count, size, 2 * steps, Draws(0)))
    assert sorted(np.concatenate(again[steps:]).tolist()) == list(range(count))


def test_no_batch_of_no_samples() -> None:
    assert list(batching.batches(0, 4, 3, Draws(0))) == []
    assert batching.steps_of(Recipe(steps=9, batch=32, lr=0.05, momentum=0.0), 0) == 0


def test_layer_draws_go_on_where_they_stopped_and_can_be_copied() -> None:
    """Those of the layers, and those of torch's own generator for what draws beside them."""
    data = Samples(np.zeros((2, 1), np.float32), np.zeros(2, np.int64))
    split = Split(body=(), adapters=(), head=())
    model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    task = Task(model, split, data, data, Recipe(epochs=1, batch=32, lr=0.05, momentum=0.0), 2)

    def drawn(count: int) -> torch.Tensor:
        return torch.cat([model(torch.ones(count)), torch.rand(count)]).reshape(2, count)

    whole = LayerDraws(task, "a")
    with whole:
        expected = drawn(8)
    parts = LayerDraws(task, "a")
    with parts:
        first = drawn(4)
    again = parts.copy()
    torch.rand(5)
    with parts:
        second = drawn(4)
    with again:
        assert torch.equal(drawn(4), second)
    assert torch.equal(torch.cat([first, second], 1), expected)
    assert {*expected[0].tolist()} == {0.0, 2.0}
    assert "forward" not in vars(model[0]), "outside the layers are as they were"


@pytest.mark.parametrize(
    ("kind", "shape", "drawn"),
    [
        ("Dropout", (3, 4, 5), (3, 4, 5)),
        ("Dropout1d", (3, 4, 5), (3, 4, 1)),
        ("Dropout2d", (3, 4, 5, 6), (3, 4, 1, 1)),
        ("row", (3, 4, 5), (3, 1, 1)),
        ("batch", (3, 4, 5), (1, 1, 1)),
    ],
)
def test_each_layer_draws_for_what_it_lets_fall(kind: str, shape: tuple[int, ...], drawn) -> None:
    """In torch's own way: values, channels, samples or the batch, by the numbers that every engine draws."""
    from torchvision.ops import StochasticDepth  # here: every process that runs tests would pay two seconds for it

    layer = getattr(torch.nn, kind)(0.25) if kind.startswith("Dropout") else StochasticDepth(0.25, kind)
    data = Samples(np.zeros((2, 1), np.float32), np.zeros(2, np.int64))
    model = torch.nn.Sequential(layer).train()
    task = Task(model, Split(body=(), adapters=(), head=()), data, data, Recipe(epochs=1, batch=2, lr=0.1), 2)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with LayerDraws(task, "a"):
        found = model(x)
        assert torch.equal(model.eval()(x), x), "in eval mode nothing falls"
    words = np.random.Philox(key=seeds.seed_of(0, "device", 0, "a/layers/0")).random_raw(int(np.prod(drawn)))
    stays = (words.reshape(drawn) >> np.uint64(11)) * 2.0**-53 < 0.75
    assert torch.equal(found, x * torch.from_numpy(stays.astype(np.float32) * np.float32(1 / 0.75)))
