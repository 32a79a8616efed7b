"""A device's targets in units of their own spread, which never leaves it, and the model that speaks in theirs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from talaria import tasks
from talaria.errors import ModelError
from talaria.federated.run import Member, Run
from talaria.model.split import Split
from talaria.model.weights import Model, Served
from talaria.tasks import Scale
from talaria.tensors import Array, Tensors
from talaria.types import Samples

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

PREFIX = "targets/"
"""Before the names of mean and standard deviation in private state."""
_MEND = (
    "end the model with a Linear layer with a bias, or name it as head; or scale the targets yourself and set "
    "task='regression:center=zero,spread=1'"
)


def scale_of(run: Run, member: Member, private: Tensors | None) -> Scale | None:
    """What the member's targets are scaled by: as they were when it first took part, so that what it learned privately
    keeps its meaning while its data grow. None where the run's task scales nothing."""
    if private is not None and f"{PREFIX}mean" in private:
        return Scale(private[f"{PREFIX}mean"], private[f"{PREFIX}sd"])
    tasks.of(run.task).require(f"member {member.client!r}: train", member.train.y, run.spec.classes)
    return tasks.of(run.task).scale(member.train.y)


def kept(scale: Scale | None) -> Tensors:
    """The private tensors of a scale."""
    return {} if scale is None else {f"{PREFIX}mean": scale.mean, f"{PREFIX}sd": scale.sd}


def scaled(samples: Samples, scale: Scale | None) -> Samples:
    """The same samples with their targets scaled."""
    return samples if scale is None else Samples(samples.x, scale.scaled(samples.y))


def require_folds(module: Module, example: Tensor, split: Split, task: str) -> None:
    """Raise :class:`~talaria.errors.ModelError` where :func:`folded` would not scale what ``module`` gives of
    ``example`` (N, ...), as where something is added to what its last layer gives, or an activation stands behind."""
    if tasks.of(task).name != "regression":
        return
    import torch

    from talaria import seeds
    from talaria.model.cloning import clone

    twin = clone(module).eval()
    with torch.no_grad(), seeds.aside():
        first = twin(example)
        count = first.shape[-1]
        scale = tasks.of(task).scale(3 * np.arange(1, 2 * count + 1, dtype=np.float32).reshape(2, count))
        if scale is None:
            return
        wanted = first * torch.from_numpy(scale.sd) + torch.from_numpy(scale.mean)
        given = folded(twin, scale, split)(example)
    if not torch.allclose(given, wanted, rtol=1e-3, atol=1e-3 * max(1.0, float(wanted.abs().max())), equal_nan=True):
        raise ModelError(
            f"regression: what {type(module).__name__} gives is more than its last layer "
            f"({_last(split.of('head'), 'weight')}) says, so that a device's own units cannot be put into that; {_MEND}"
        )


def folded(model: Model, scale: Scale, split: Split) -> Model:
    """``model``, whose last layer gives scaled targets, made to give them in their own units.

    Raises :class:`~talaria.errors.ModelError` where that layer has no bias to move, or gives some of the targets alone.
    """
    if not scale.mean.any() and (scale.sd == 1).all():
        return model
    names = split.of("head")
    weight, bias = _last(names, "weight"), _last(names, "bias")
    if weight is None or bias is None:
        raise ModelError(
            f"regression: the head ({', '.join(names) or 'none'}) has no weight and bias to scale its outputs by; "
            f"{_MEND}"
        )
    if isinstance(model, Served):
        return _rescaled(model, scale, weight, bias)
    import torch

    state = dict(model.named_parameters(remove_duplicate=False))
    if len(state[bias]) != len(scale.sd):
        raise ModelError(
            f"regression: the last layer ({weight}) gives {len(state[bias])} of the model's {len(scale.sd)} numbers, "
            f"so that a device's own units cannot be put into it; {_MEND}"
        )
    mean, sd = (torch.from_numpy(np.array(one)).to(state[bias]) for one in (scale.mean, scale.sd))
    with torch.no_grad():
        state[weight].mul_(sd.reshape(-1, *[1] * (state[weight].dim() - 1)))
        state[bias].mul_(sd).add_(mean)
    return model


def _rescaled(model: Served, scale: Scale, weight: str, bias: str) -> Served:
    def out(x: Array) -> Array:
        return np.asarray(model.logits(x) * scale.sd + scale.mean, np.float32)

    old = model.state
    sd = scale.sd.reshape(-1, *[1] * (old[weight].ndim - 1))
    changed = {weight: old[weight] * sd, bias: old[bias] * scale.sd + scale.mean}

    def graph(own: Callable[[], Any]) -> Any:
        scaled = own()
        return replace(scaled, constants=scaled.constants | {f"weight/{name}": changed[name] for name in changed})

    whole = None if model.graph is None else partial(graph, model.graph)
    return replace(model, state={**old, **changed}, logits=out, graph=whole)


def _last(names: tuple[str, ...], kind: str) -> str | None:
    return next((name for name in reversed(names) if name.rpartition(".")[2] == kind), None)
