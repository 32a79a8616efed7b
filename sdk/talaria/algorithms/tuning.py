"""Local fine-tuning after the last round; its result never leaves the device."""

import torch

from talaria.training import frozen_features
from talaria.types import Part, Samples, Task, Tensors

TUNES: dict[str, tuple[Part, ...]] = {
    "full": ("body", "adapters", "head"),
    "head": ("head",),
    "adapters": ("adapters", "head"),
    "body": ("body",),
}
"""What fine-tuning trains, by name; ``adapters`` means adapters and head."""


SAMPLES = ("train", "all")
"""What fine-tuning learns from: training samples, or validation samples as well once nothing is chosen by them."""


def tuned(task: Task, state: Tensors, tune: str, epochs: int, lr: float = 0.0, samples: str = "train") -> Tensors:
    """``state`` after ``epochs`` of SGD on the named parts, the rest frozen in eval mode; ``lr`` 0 is the recipe's."""
    recipe = task.recipe.but(epochs=epochs, steps=None, lr=lr or task.recipe.lr)
    known = labelled(task, samples)
    only = task.split.of(*TUNES[tune])
    return frozen_features.train(task, state, only=only, recipe=recipe, samples=known, purpose="tune")


def labelled(task: Task, samples: str) -> Samples:
    """The training samples, or with ``"all"`` the validation samples behind them."""
    if samples != "all":
        return task.train
    return Samples(torch.cat([task.train.x, task.val.x]), torch.cat([task.train.y, task.val.y]))
