"""The small private model beside a large shared one: narrow plain networks for the shape of the data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from talaria.errors import ConfigError
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.tensors import Tensors, alike
from talaria.training.engine import another, state_of, train
from talaria.training.interface import Task
from talaria.types import Recipe, Samples

if TYPE_CHECKING:
    from torch.nn import Module

AUTO = "auto"


def require(name: str) -> None:
    """Raise :class:`~talaria.errors.ConfigError` unless ``name`` is ``"auto"`` or a zoo name."""
    known = [AUTO, *zoo.names()]
    if name not in known:
        raise ConfigError(f"thorki: small={name!r} must be one of {known}")


def spec_of(task: Task, name: str) -> ModelSpec:
    """The small model ``name`` for the task's data; of ``"auto"`` the function :func:`narrow`, by its address."""
    shape, made = tuple(task.train.x.shape[1:]), f"{__name__}:narrow" if name == AUTO else name
    return ModelSpec(made, shape, task.classes, seed=task.seed)


def task_of(task: Task, name: str) -> Task:
    """``task`` with the small model for its own; no mask ever cuts it."""
    model, engine = another(task, spec_of(task, name))
    return task.but(model=model, mask=None, engine=engine)


def fitting(own: Task, state: Tensors) -> Tensors:
    """``state`` where it is of the small model of ``own``; nothing where that is another one by now, as in a run that
    follows with another option."""
    return state if alike(state, state_of(own.model)) else {}


def trained(task: Task, name: str, state: Tensors, recipe: Recipe, samples: Samples) -> Tensors:
    """The small model ``name`` after ``recipe`` on ``samples``, from ``state``, or from its first weights where that is
    none of it. All of it learns: what the recipe freezes are layers of the large one."""
    own = task_of(task, name)
    recipe = recipe.but(freeze=())
    return train(own, fitting(own, state) or state_of(own.model), recipe=recipe, samples=samples, purpose="small")


def narrow(input_shape: Sequence[int], classes: int) -> Module:
    """A network of a tenth to a third of the zoo's weights: 1D convolutions with BatchNorm for windows (C, T ≥ 8), 2D
    ones for images (C, H, W ≥ 16), else a small perceptron."""
    shape = tuple(input_shape)
    if len(shape) == 2 and shape[1] >= 8:
        return _windows(shape, classes)
    if len(shape) == 3 and min(shape[1:]) >= 16:
        return _images(shape, classes)
    return _rows(shape, classes)


def _windows(shape: tuple[int, ...], classes: int) -> Module:
    from torch.nn import AvgPool1d, BatchNorm1d, Conv1d, Flatten, Linear, ReLU, Sequential

    layers: OrderedDict[str, Module] = OrderedDict()
    width, length = shape
    for k, (out, kernel, stride) in enumerate(((16, 7, 2), (32, 5, 2), (48, 3, 1)), 1):
        layers[f"conv{k}"] = Conv1d(width, out, kernel, stride, padding=kernel // 2, bias=False)
        layers[f"bn{k}"] = BatchNorm1d(out)
        layers[f"relu{k}"] = ReLU()
        width, length = out, (length - 1) // stride + 1
    kernel = max(1, length // 4)
    layers["pool"] = AvgPool1d(kernel)
    layers["flatten"] = Flatten()
    layers["head"] = Linear(width * (length // kernel), classes)
    return Sequential(layers)


def _images(shape: tuple[int, ...], classes: int) -> Module:
    from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential

    height, width = (size // 4 for size in shape[1:])
    return Sequential(
        OrderedDict(
            conv1=Conv2d(shape[0], 16, 5, padding=2),
            relu1=ReLU(),
            pool1=MaxPool2d(2),
            conv2=Conv2d(16, 32, 5, padding=2),
            relu2=ReLU(),
            pool2=MaxPool2d(2),
            flatten=Flatten(),
            fc1=Linear(32 * height * width, 96),
            relu3=ReLU(),
            head=Linear(96, classes),
        )
    )


def _rows(shape: tuple[int, ...], classes: int) -> Module:
    from torch.nn import Flatten, Linear, ReLU, Sequential

    return Sequential(
        OrderedDict(flatten=Flatten(), fc1=Linear(prod(shape), 48), relu1=ReLU(), head=Linear(48, classes))
    )
