"""What a device runs: its features, and its Gaussian head in the place of the last linear layer."""

from talaria.algorithms.pfedgm.head import Linear, Quadratic
from talaria.algorithms.pfedgm.navigator import last_layer
from talaria.model.split import WHOLE
from talaria.model.weights import Model, Served, Weights
from talaria.tensors import Array, Tensors, only
from talaria.training.engine import looking, served
from talaria.training.interface import Task
from talaria.training.objectives import INTO


def entering(task: Task, state: Tensors) -> Array:
    """What enters the last layer (N, d), of the training samples."""
    tap = INTO + last_layer(task.split)
    return looking(task, state, [tap])(task.train.x)[tap]


def served_with(head: Linear | Quadratic, task: Task, state: Tensors) -> Model:
    """The task's model with ``state``, and ``head`` for its last layer."""
    if not isinstance(task.model, Weights):
        from talaria.algorithms.pfedgm.module import serve

        return serve(task, state, head)
    layer = last_layer(task.split)
    if isinstance(head, Linear) and f"{layer}.bias" in {*task.split.keys}:  # the same network, with another last layer
        return served(task, {**only(state, [k for k in state if k in {*task.split.keys}]), **head.named(layer)})
    look = looking(task, state, [INTO + layer])
    whole = {**only(state, [k for k in state if k in {*task.split.keys}]), **head.named(layer)}
    learned = frozenset(task.split.parameters(*WHOLE))
    return Served(whole, lambda x: head(look(x)[INTO + layer]), learned)
