"""Fine-tuning on the device, before a model is served or for a newcomer; its result never leaves the device."""

from typing import Annotated

from talaria.algorithms.hparams import one_of
from talaria.model.split import WHOLE, Part
from talaria.tensors import Tensors
from talaria.training.engine import ready, train_upper
from talaria.training.interface import Task
from talaria.types import Samples

TUNES: dict[str, tuple[Part, ...]] = {
    "full": WHOLE,
    "head": ("head",),
    "adapters": ("adapters", "head"),
    "body": ("body",),
}
"""What fine-tuning trains, by name; ``adapters`` means adapters and head."""

Tune = Annotated[str, one_of(*TUNES)]
TuneOn = Annotated[str, one_of("train", "all")]
"""What fine-tuning learns from: training samples, or validation samples as well once nothing is chosen by them."""


def tuned(task: Task, state: Tensors, tune: str, epochs: int, lr: float = 0.0, samples: str = "train") -> Tensors:
    """``state`` after ``epochs`` of SGD on the parts ``tune``, the rest frozen in eval mode; ``lr`` 0 is the
    recipe's."""
    recipe = task.recipe.but(epochs=epochs, steps=None, lr=lr or task.recipe.lr)
    known = task.but(train=labelled(task, samples))  # a balanced loss weighs by what is learned from
    return train_upper(known, state, only=task.split.of(*TUNES[tune]), recipe=recipe, purpose="tune")


def between(state: Tensors, own: Tensors, share: float) -> Tensors:
    """The values that ``share`` of the way from ``state`` to ``own`` lead to; counters are those of ``own``."""
    return {
        key: (state[key] + share * (value - state[key])).astype(value.dtype) if value.dtype.kind == "f" else value
        for key, value in own.items()
    }


def labelled(task: Task, samples: str) -> Samples:
    """The training samples, or with ``"all"`` the validation samples behind them."""
    return Samples.joined([task.train, task.val]) if samples == "all" else task.train


def joined(task: Task, state: Tensors, epochs: int) -> Tensors:
    """``state`` as it is for a member; for a newcomer, BatchNorm is estimated on its own inputs and then adapters
    and head are trained for ``epochs`` with the body frozen."""
    if not task.newcomer:
        return state
    head = task.split.of("adapters", "head")
    recipe = task.recipe.but(epochs=epochs, steps=None)
    return train_upper(task, ready(task, state), only=head, recipe=recipe, purpose="join")
