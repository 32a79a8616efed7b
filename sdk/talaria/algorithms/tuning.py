"""Local fine-tuning after the last round; its result never leaves the device."""

from talaria.local import train
from talaria.types import Part, Task, Tensors

TUNES: dict[str, tuple[Part, ...]] = {
    "full": ("body", "adapters", "head"),
    "head": ("head",),
    "adapters": ("adapters", "head"),
    "body": ("body",),
}
"""What fine-tuning trains, by name; ``adapters`` means adapters and head."""


def tuned(task: Task, state: Tensors, tune: str, epochs: int, lr: float = 0.0) -> Tensors:
    """``state`` after ``epochs`` of SGD on the named parts at ``lr`` (0: the recipe's), the rest frozen in eval mode."""
    recipe = task.recipe.but(epochs=epochs, steps=None, lr=lr or task.recipe.lr)
    return train(task, state, only=task.split.of(*TUNES[tune]), recipe=recipe, purpose="tune")
