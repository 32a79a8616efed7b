"""The served model in torch: the device's features and its Gaussian head in the place of the last linear layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Module

from talaria.algorithms.pfedgm.head import Linear, Quadratic
from talaria.algorithms.pfedgm.navigator import last_layer
from talaria.model.cloning import clone
from talaria.model.state import state_of, tensor_of
from talaria.tensors import Tensors
from talaria.training.engine import served
from talaria.training.interface import Task


class Projected(Module):
    """A fixed linear map, ``matrix`` (k, d)."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) to (N, k)."""
        return x @ self.get_buffer("matrix").T


class Scores(Module):
    """A :class:`~talaria.algorithms.pfedgm.head.Quadratic` head of projected features."""

    def __init__(self, head: Quadratic) -> None:
        super().__init__()
        self.register_buffer("weight", tensor_of(head.weight))
        self.register_buffer("shift", tensor_of(head.shift))
        self.register_buffer("bias", tensor_of(head.bias))

    def forward(self, z: Tensor) -> Tensor:
        """Logits (N, C)."""
        bias = self.get_buffer("bias")
        white = z @ self.get_buffer("weight").T - self.get_buffer("shift")
        return bias - 0.5 * white.square().reshape(len(z), len(bias), -1).sum(2)


def module_of(head: Linear | Quadratic) -> Module:
    """The head as a module: one plain linear layer, or a projection and scores."""
    if isinstance(head, Quadratic):
        return nn.Sequential(Projected(tensor_of(head.matrix)), Scores(head))
    weight = tensor_of(head.weight)
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")  # where nothing is drawn
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(tensor_of(head.bias).clone())
    return layer


def replaced(model: Module, layer: str, new: Module) -> Module:
    """A copy of ``model`` with ``new`` in the place of ``layer``."""
    if not layer:
        return new
    out = clone(model)
    out.set_submodule(layer, new)
    return out


def serve(task: Task, state: Tensors, head: Linear | Quadratic) -> Module:
    """The task's model with ``state`` and ``head`` for its last linear layer: what a device runs."""
    whole = {**state_of(task.model), **state}
    module = served(task, {key: whole[key] for key in task.model.state_dict()})
    return replaced(module, last_layer(task.split), module_of(head)).requires_grad_(False).eval()
