"""The training loop of every algorithm: train, gradient, calibrate, evaluate, on one scratch module.

A module is in train mode only where one of its own tensors is being trained; everything else is frozen:
``requires_grad=False``, out of the optimizer, and in eval mode (so that BatchNorm below stands still).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from talaria import seeds, tasks
from talaria.errors import ModelError
from talaria.model.batch_norm import estimated_anew, lone_sample_in_eval, tracked
from talaria.model.cloning import clone
from talaria.model.split import torn
from talaria.model.state import array_of, beside, load, state_of
from talaria.tensors import Array, Tensors, spread
from talaria.training import batching
from talaria.training.batching import AT_ONCE, steps_of
from talaria.training.interface import Task
from talaria.training.layer_draws import LayerDraws
from talaria.training.objectives import Pull
from talaria.training.sgd import SGD
from talaria.types import Recipe, Samples

Loss = Callable[[Any, Any, Any], Any]
"""``(module, x, y) -> scalar loss`` on one batch."""

WIDE = 64
"""Inputs from which on a convolution larger than 1x1 trains faster in torch's plain layout."""
_PLAIN = "_takes_plain_layout_alone"
"""Noted on a module, and so on its copies: in channels-last memory torch has no ``view`` of a map that joins channels
and places, which many networks call before their first linear layer."""


def served(task: Task, state: Tensors) -> Module:
    """A module of its own with ``state``, in eval mode: what a device runs and exports."""
    module = load(clone(task.model), state).to(memory_format=torch.contiguous_format)
    return module.requires_grad_(False).eval()


def in_fast_layout(module: Module) -> Module:
    """``module`` with its 2D convolutions in channels-last memory where a CPU trains them faster so: depthwise and
    small ones by a tenth to a third. Wide ones (:data:`WIDE` inputs, larger than 1x1) were slower by a sixth. One that
    cannot be read so, as :func:`try_fast_layout` or :func:`predict` found, stays as it is."""
    larger = _convolved(module)
    if larger and all(p.shape[1] < WIDE for p in larger) and not hasattr(module, _PLAIN):
        module.to(memory_format=torch.channels_last)
    return module


def try_fast_layout(module: Module, example: Tensor) -> None:
    """Note on ``module`` where it cannot read ``example`` (N, ...) in the layout of :func:`in_fast_layout`."""
    twin = in_fast_layout(clone(module)).eval()
    try:
        with torch.no_grad(), seeds.aside():
            twin(example)
    except RuntimeError:
        setattr(module, _PLAIN, True)


def _convolved(module: Module) -> list[Tensor]:
    """The weights of its 2D convolutions larger than 1x1."""
    return [p for p in module.parameters() if p.dim() == 4 and p.shape[-1] > 1]


@torch.enable_grad()  # who runs a model may have asked for it under no_grad, and it is tuned before it is served
def train(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str] | None = None,
    recipe: Recipe | None = None,
    pull: Pull | None = None,
    objective: Loss | None = None,
    samples: Samples | None = None,
    purpose: str = "train",
) -> Tensors:
    """SGD from ``state`` on the task's training samples; returns the whole new state.

    ``only`` names what is trained (parameters and the buffers that follow them; default: everything).
    ``pull`` is added to the gradient before the optimizer's step, so momentum sees it. ``purpose`` names the
    random draws: branches with different purposes do not disturb each other.
    """
    recipe = recipe or task.recipe
    samples = task.train if samples is None else samples
    objective = objective or cross_entropy(recipe.smoothing)
    module = load(task.model, state)
    trained = freeze_but(module, only)
    if not trained or steps_of(recipe, len(samples)) == 0:
        return dict(state)
    anchors = {} if pull is None else {name: beside(module, pull.anchor[name]) for name in trained}
    optimizer, draws = SGD(trained, recipe), LayerDraws(task, purpose)
    for x, y in feed(task, recipe, samples, purpose):
        with draws:  # between batches other threads have torch's generator
            optimizer.zero_grad()
            _backward(module, objective, x, y, recipe.accumulate)
            if pull is not None:
                for name, parameter in trained.items():
                    add_pull(parameter, anchors[name], pull.strength)
            optimizer.step()
    return state_of(module)


def feed(task: Task, recipe: Recipe, samples: Samples, purpose: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of :func:`talaria.training.batching.feed` as tensors, beside the task's module."""
    for x, y in batching.feed(task, recipe, samples, purpose):
        yield beside(task.model, x), beside(task.model, y)


def _backward(module: Module, objective: Loss, x: Tensor, y: Tensor, slices: int) -> None:
    pieces = min(slices, len(y))
    for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
        with lone_sample_in_eval(module, len(ys)):
            loss = objective(module, xs, ys)
        (loss * (len(ys) / len(y))).backward()


def add_pull(parameter: Tensor, anchor: Tensor, strength: float) -> None:
    """Add ``strength * (parameter - anchor)`` to a parameter's gradient; what no loss reaches has none, and rests."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad + strength * (parameter.detach() - anchor)


def cross_entropy(smoothing: float = 0.0) -> Loss:
    """Mean cross-entropy of the module's logits (N, classes)."""

    def objective(module: Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y, label_smoothing=smoothing)

    return objective


@torch.enable_grad()
def gradient(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str] | None = None,
    samples: Samples | None = None,
    objective: Loss | None = None,
    purpose: str = "gradient",
) -> Tensors:
    """The mean gradient over ``samples`` (default: all training samples) at ``state``, which does not move.

    BatchNorm normalizes as in training where its layer is in ``only``, but its statistics are not kept.
    """
    samples = task.train if samples is None else samples
    objective = objective or cross_entropy()
    module = load(task.model, state)
    freeze_but(module, only)
    module.zero_grad()
    with LayerDraws(task, purpose), lone_sample_in_eval(module, len(samples)):
        objective(module, beside(module, samples.x), beside(module, samples.y)).backward()
    return gradients_of(learning(module))


def learning(module: Module) -> dict[str, Tensor]:
    """The parameters of ``module`` that are not frozen, under each name that they have: a state has a weight of two
    layers twice."""
    return {name: one for name, one in module.named_parameters(remove_duplicate=False) if one.requires_grad}


def gradients_of(trained: Mapping[str, Tensor]) -> Tensors:
    """Copies of what gradients these have; zeros where no loss reaches."""
    return {
        k: np.array(array_of(torch.zeros_like(p) if p.grad is None else p.grad), order="C") for k, p in trained.items()
    }


def freeze_but(module: Module, only: Collection[str] | None) -> dict[str, Tensor]:
    """Freeze all but the tensors in ``only`` (None: nothing is frozen); returns the trained parameters.

    Raises :class:`ModelError` where ``only`` has one name of a weight and not its other one."""
    wanted = None if only is None else set(only)
    if wanted is not None and (found := torn(module, wanted)):
        raise ModelError(
            f"training: {found[0]!r} is to learn and {found[1]!r} is not, which are one weight; let both learn or "
            "none of them, or give each layer a weight of its own"
        )
    trained: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted is None or name in wanted)
        if parameter.requires_grad:
            trained[name] = parameter
    module.train(wanted is None)
    if wanted is not None:
        _train_mode_where(module, "", wanted)
    return trained


def _train_mode_where(module: Module, prefix: str, wanted: set[str]) -> bool:
    """Train mode for modules that own a wanted tensor, and for the stateless ones (dropout) beside them."""
    own = [prefix + n for n, _ in module.named_parameters(recurse=False)]
    own += [prefix + n for n, _ in module.named_buffers(recurse=False)]
    active = any(name in wanted for name in own)
    stateless: list[Module] = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is None and next(child.buffers(), None) is None:
            stateless.append(child)
        else:
            active |= _train_mode_where(child, f"{prefix}{name}.", wanted)
    if active:
        module.training = True
        for child in stateless:
            child.train()
    return active


def calibrate(task: Task, state: Tensors, samples: Samples | None = None, batch: int = 256) -> Tensors:
    """Re-estimate BatchNorm statistics by one unlabelled pass, but for what the recipe freezes; everything else stays
    as it is."""
    samples = task.train if samples is None else samples
    module = load(task.model, state)
    layers = tracked(module, task.still).values()
    if not layers or len(samples) < 2:
        return dict(state)
    module.requires_grad_(False).eval()
    with estimated_anew(layers):
        for index in spread(len(samples), batch):
            module(beside(module, samples.x[index]))
    return state_of(module)


def predict(module: Module, x: Array, batch: int = AT_ONCE) -> Array:
    """Logits float32 (N, classes) in eval mode without gradients; the module's modes and layout are restored."""
    modes = {m: m.training for m in module.modules()}
    plain = all(p.is_contiguous() for p in _convolved(module))
    in_fast_layout(module).eval()
    inputs, starts = beside(module, x), range(0, max(1, len(x)), batch)
    with torch.no_grad():
        try:
            out = torch.cat([module(inputs[start : start + batch]) for start in starts])
        except RuntimeError:
            setattr(module, _PLAIN, True)
            module.to(memory_format=torch.contiguous_format)
            out = torch.cat([module(inputs[start : start + batch]) for start in starts])
    if plain:
        module.to(memory_format=torch.contiguous_format)
    for m, mode in modes.items():
        m.training = mode
    return array_of(out)


def accuracy(task: Task, state: Tensors, samples: Samples) -> float:
    """Share of ``samples`` that ``state`` labels right, in eval mode; 0.0 without samples."""
    if not len(samples):
        return 0.0
    logits = predict(load(task.model, state), samples.x)
    return tasks.of(tasks.CLASSIFICATION).measured(logits, samples.y)[0]
