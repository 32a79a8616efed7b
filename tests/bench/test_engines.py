"""The benches that hold something beside torch's training step take the step that a device takes."""

import numpy as np
import pytest
import torch

from talaria import tensors
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of
from talaria.training import loop
from talaria.training.interface import Task
from talaria.types import Recipe, Samples
from talaria_bench import engines
from talaria_bench.steps import torch_step

SPEC = ModelSpec("fmnist_cnn", (1, 28, 28), 10)


@pytest.mark.parametrize("part", [None, "head"])
def test_torchs_step_is_the_training_loops(part: str | None) -> None:
    one = Samples(np.random.default_rng(0).standard_normal((1, 1, 28, 28), np.float32), np.array([3]))
    recipe, whole = Recipe(epochs=3, batch=1, weight_decay=0.01), zoo.build(SPEC)
    task = Task(loop.in_fast_layout(zoo.build(SPEC)), zoo.split(SPEC, whole), one, one, recipe, 10)
    only = None if part is None else task.split.of("head")
    module, step = torch_step(whole, one, recipe, only)
    for _ in range(3):
        step()
    assert tensors.equal(state_of(module), loop.train(task, state_of(whole), only=only))
    kernels = [p for p in module.parameters() if p.dim() == 4 and p.shape[1] > 1]
    assert kernels
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def test_the_bench_of_engines_takes_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took torch.optim's, by which a step of mlp is half as long again."""
    monkeypatch.delattr(torch.optim, "SGD")
    row = engines._row("mlp", (20,), 4, 16, "all", 1.0, rounds=1)
    assert row["ratio"] > 0
