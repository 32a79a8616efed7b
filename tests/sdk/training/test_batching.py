"""Batches: every sample once an epoch, none alone, all from a seed; and the draws of dropout."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from talaria.model.split import Split
from talaria.training import batching
from talaria.training.batching import LayerDraws
from talaria.types import Recipe, Samples, Task


@given(count=st.integers(1, 40), size=st.integers(1, 12))
def test_an_epoch_is_every_sample_once_and_no_batch_of_one(count: int, size: int) -> None:
    steps = batching.steps_of(Recipe(batch=size, epochs=1, lr=0.05, momentum=0.0), count)
    draws = torch.Generator().manual_seed(0)
    epoch = list(batching.batches(count, size, steps, draws))
    assert sorted(np.concatenate(epoch).tolist()) == list(range(count))
    assert len(epoch) == steps
    assert all(len(piece) <= size + 1 for piece in epoch)
    assert size == 1 or count == 1 or all(len(piece) > 1 for piece in epoch)
    again = list(batching.batches(count, size, 2 * steps, torch.Generator().manual_seed(0)))
    assert sorted(np.concatenate(again[steps:]).tolist()) == list(range(count))


def test_no_batch_of_no_samples() -> None:
    assert list(batching.batches(0, 4, 3, torch.Generator())) == []
    assert batching.steps_of(Recipe(steps=9, batch=32, lr=0.05, momentum=0.0), 0) == 0


def test_layer_draws_go_on_where_they_stopped_and_can_be_copied() -> None:
    data = Samples(np.zeros((2, 1), np.float32), np.zeros(2, np.int64))
    split = Split(body=(), adapters=(), head=())
    task = Task(torch.nn.Identity(), split, data, data, Recipe(epochs=1, batch=32, lr=0.05, momentum=0.0), 2)
    whole = LayerDraws(task, "a")
    with whole:
        expected = torch.rand(4)
    parts = LayerDraws(task, "a")
    with parts:
        first = torch.rand(2)
    again = parts.copy()
    torch.rand(5)
    with parts:
        second = torch.rand(2)
    with again:
        assert torch.equal(torch.rand(2), second)
    assert torch.equal(torch.cat([first, second]), expected)
