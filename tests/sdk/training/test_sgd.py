"""The optimizer is torch.optim.SGD, bit for bit, without its imports."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from talaria.training.sgd import SGD
from talaria.types import Recipe


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_steps_as_torchs_own_bit_for_bit(momentum: float, weight_decay: float, dtype: torch.dtype) -> None:
    """Also where a gradient is missing in some steps, and in a layout of its own."""
    draws = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=draws, dtype=dtype)
        return value.to(memory_format=torch.channels_last) if len(shape) == 4 else value

    shapes = {"a": (7, 5), "b": (13,), "c": (4, 3, 3, 3), "d": ()}
    ours = {k: drawn(shape).requires_grad_() for k, shape in shapes.items()}
    theirs = {k: v.detach().clone().requires_grad_() for k, v in ours.items()}
    own = SGD(ours, Recipe(lr=0.07, momentum=momentum, weight_decay=weight_decay))
    torchs = torch.optim.SGD(theirs.values(), lr=0.07, momentum=momentum, weight_decay=weight_decay)
    for step in range(5):
        own.zero_grad()
        torchs.zero_grad()
        for k, shape in shapes.items():
            if (k, step) not in {("b", 0), ("a", 2)}:
                ours[k].grad = drawn(shape)
                theirs[k].grad = ours[k].grad.clone()
        own.step()
        torchs.step()
        assert all(torch.equal(ours[k], theirs[k]) for k in shapes)


def test_training_imports_no_optimizer_of_torch() -> None:
    said = """
import sys
import numpy as np, torch
from talaria.model.split import split_model
from talaria.model.state import state_of
from talaria.training import loop
from talaria.training.interface import Task
from talaria.types import Recipe, Samples
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
data = Samples(np.ones((5, 3), np.float32), np.zeros(5, np.int64))
task = Task(model, split_model(model, "1"), data, data, Recipe(epochs=1, batch=4, lr=0.1, momentum=0.9), 2)
loop.train(task, state_of(model))
print(len([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]))
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
