"""What a device does that is served without ever having taken part: body frozen, its own head trained."""

from talaria.training import frozen_features
from talaria.training.loop import ready
from talaria.types import Task, Tensors


def joined(task: Task, state: Tensors, epochs: int) -> Tensors:
    """``state`` as it is for a member; for a newcomer, BatchNorm is estimated on its own inputs and then adapters
    and head are trained for ``epochs`` with the body frozen."""
    if not task.newcomer:
        return state
    head = task.split.of("adapters", "head")
    recipe = task.recipe.but(epochs=epochs, steps=None)
    return frozen_features.train(task, ready(task, state), only=head, recipe=recipe, purpose="join")
