"""Tiny tasks: a two-layer net with or without BatchNorm, dropout and an adapter, and a quadratic bowl in one number."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from talaria.algorithms.base import Algorithm
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.split import Split, split_model
from talaria.model.state import load, state_of
from talaria.tensors import Tensors
from talaria.training.interface import Task
from talaria.types import Recipe, Samples, Update


class Tiny(nn.Module):
    """6 inputs, 4 hidden units, 3 classes."""

    def __init__(self, norm: bool, dropout: float, adapter: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Tanh())
        self.adapter = nn.Linear(4, 4) if adapter else None
        self.noise = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.adapter is not None:
            hidden = hidden + self.adapter(hidden)
        return self.head(self.noise(hidden))


class Bowl(nn.Module):
    """Its cross-entropy for label 0 is f(w) = (w - 3)², so that ∇f = 2 (w - 3) and ∇²f = 2."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        # softplus(log(expm1(q))) = q
        z = torch.log(torch.expm1((self.w - 3) ** 2))
        return torch.stack([torch.zeros_like(z), z]).expand(len(x), 2)


def samples(seed: int, count: int, classes: int = 3) -> Samples:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    return Samples.of(torch.randn(count, 6, generator=g) + y[:, None].float(), y)


def build(
    *,
    norm: bool = False,
    dropout: float = 0.0,
    adapter: bool = False,
    buffers: str = "local",
    head: str = "head",
    count: int = 13,
    classes: int = 3,
    client: str = "anna",
    seed: int = 1,
    round: int = 0,
    **recipe: object,
) -> Task:
    """A task whose model has the same initial weights for every client."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny(norm, dropout, adapter)
    split = split_model(model, "head", buffers=buffers)  # type: ignore[arg-type]
    if head == "none":
        split = replace(split, body=split.keys, adapters=(), head=())
    if head == "all":
        split = replace(split, body=(), adapters=(), head=split.keys)
    settings = {"epochs": 2, "batch": 4, "lr": 0.1, "momentum": 0.0, **recipe}
    return Task(
        model=model,
        split=split,
        train=samples(seed, count, classes),
        val=samples(seed + 50, 6),
        recipe=Recipe(**settings),  # type: ignore[arg-type]
        classes=3,
        client=client,
        round=round,
    )


@pytest.fixture
def tiny() -> Callable[..., Task]:
    return build


@pytest.fixture
def start() -> Callable[[Algorithm, Task], tuple[Tensors, Tensors]]:
    """``(shared, private)`` of the task's initial weights, as the coordinator and a new device have them."""

    def both(algorithm: Algorithm, task: Task) -> tuple[Tensors, Tensors]:
        return algorithm.init(task.model, task.split)

    return both


@pytest.fixture
def rounds() -> Callable[..., tuple[list[Update], Tensors, Tensors]]:
    """``(updates, shared, private)`` after some rounds of one device alone with the algorithm's own aggregator."""

    def alone(algorithm: Algorithm, task: Task, count: int = 3) -> tuple[list[Update], Tensors, Tensors]:
        shared, private = algorithm.init(task.model, task.split)
        state = algorithm.aggregator.init(shared)
        sent = []
        for number in range(count):
            update, private = algorithm.fit(task.but(round=number), shared, private)
            shared, state = algorithm.aggregator.apply(shared, state, [update])
            sent.append(update)
        return sent, shared, private

    return alone


@pytest.fixture
def bowl() -> Callable[..., Task]:
    """A task on the bowl. Full batches of six samples, learning rate 0.1."""

    def at(steps: int = 1, lr: float = 0.1, **recipe: object) -> Task:
        model = Bowl()
        data = Samples(np.zeros((6, 1), np.float32), np.zeros(6, np.int64))
        plan = Recipe(**{"steps": steps, "lr": lr, "batch": 6, "momentum": 0.0, **recipe})  # type: ignore[arg-type]
        return Task(model, Split(body=("w",), adapters=(), head=()), data, data, plan, classes=2)

    return at


@pytest.fixture
def narrowed() -> Callable[[Task], tuple[Task, ChannelMask]]:
    """The task on a device that keeps hidden units 0, 2, 3 of four: a smaller model, and the mask that says so."""

    def narrow(task: Task) -> tuple[Task, ChannelMask]:
        hidden = (("h", 1),)
        axes = {"body.0.weight": (hidden, ()), "body.0.bias": (hidden,), "head.weight": ((), hidden)}
        mask = ChannelMask(ChannelLayout({"h": 4}, axes), {"h": (0, 2, 3)})
        wide = state_of(task.model)
        small = Tiny(False, 0.0, False)
        small.body[0], small.head = nn.Linear(6, 3), nn.Linear(3, 3)
        rows = np.array([0, 2, 3])
        kept = {
            "body.0.weight": wide["body.0.weight"][rows],
            "body.0.bias": wide["body.0.bias"][rows],
            "head.weight": wide["head.weight"][:, rows],
            "head.bias": wide["head.bias"],
        }
        return task.but(model=load(small, kept), mask=mask), mask

    return narrow
