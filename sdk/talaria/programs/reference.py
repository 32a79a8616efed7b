"""The same step by torch, in float64 for the truth and in float32 for what torch itself loses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import Module

from talaria.model.state import load, state_of, to_arrays
from talaria.tensors import Array
from talaria.training import loop
from talaria.training.sgd import SGD
from talaria.training.taps import Taps
from talaria.types import Recipe


def step(
    module: Module, recipe: Recipe, only: Collection[str] | None, feed: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Array]:
    """The outputs that a program gives on ``feed``, its inputs by name, worked out in ``dtype``."""
    own, trained = _given(module, only, feed, dtype)
    optimizer = SGD(trained, recipe.but(lr=float(feed["lr"])))
    if recipe.momentum:
        optimizer.momentum = {k: torch.from_numpy(feed[f"momentum/{k}"]).to(dtype, copy=True) for k in trained}
    x, y = torch.from_numpy(feed["x"]).to(dtype), torch.from_numpy(feed["y"])
    with loop.lone_sample_in_eval(own, len(y)):
        loss = loop.cross_entropy(recipe.smoothing)(own, x, y)
    loss.backward()
    if "pull" in feed:
        for name, parameter in trained.items():
            loop.add_pull(parameter, torch.from_numpy(feed[f"anchor/{name}"]).to(dtype), float(feed["pull"]))
    optimizer.step()
    moved = {f"next/weight/{k}": v for k, v in state_of(own).items() if _follows(own, k, trained)}
    momenta = {f"next/momentum/{k}": v for k, v in optimizer.momentum.items()}
    return {"loss": loss.detach().numpy(), **moved, **to_arrays(momenta)}


def derivative(
    module: Module, only: Collection[str] | None, taps: Sequence[str], feed: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Array]:
    """The outputs that a derivative (:func:`talaria.programs.differentiate.graph_of`) gives on ``feed``, likewise."""
    own, trained = _given(module, only, feed, dtype)
    x = torch.from_numpy(feed["x"]).to(dtype)
    with Taps(own, taps) as opened, loop.lone_sample_in_eval(own, len(x)):
        own(x)
    seen = opened.seen
    slopes = {tap: torch.from_numpy(feed[f"slope/{tap}"]).to(dtype) for tap in taps if f"slope/{tap}" in feed}
    torch.autograd.backward([seen[tap] for tap in slopes], list(slopes.values()))
    moved = {f"next/weight/{k}": v for k, v in state_of(own).items() if _follows(own, k, ())}
    gradients = {f"gradient/{k}": p.grad for k, p in trained.items() if p.grad is not None}
    return {**to_arrays({f"tap/{tap}": value.detach() for tap, value in seen.items()}), **moved, **to_arrays(gradients)}


def _given(
    module: Module, only: Collection[str] | None, feed: Mapping[str, Array], dtype: torch.dtype
) -> tuple[Module, dict[str, Tensor]]:
    """A copy of ``module`` in ``dtype`` with the weights of ``feed`` and its draws for dropout, and what is trained."""
    own = deepcopy(module).to(dtype)
    held = {name.removeprefix("weight/"): value for name, value in feed.items() if name.startswith("weight/")}
    load(own, {**state_of(own), **held})
    trained = loop.freeze_but(own, only)
    for name, layer in own.named_modules():
        if f"draw/{name}" in feed:
            draw = torch.from_numpy(feed[f"draw/{name}"]).to(dtype)
            layer.register_forward_hook(lambda _, given, out, draw=draw: given[0] * _beside(draw, given[0]))
    return own, trained


def _beside(draw: Tensor, x: Tensor) -> Tensor:
    """A draw for each sample, or for each value, so that it multiplies ``x``."""
    return draw if draw.shape == x.shape else draw.reshape(-1, *(1 for _ in x.shape[1:]))


def _follows(module: Module, key: str, trained: Collection[str]) -> bool:
    """Whether a step writes this tensor: what is trained, and the buffers of layers in train mode."""
    if key in trained:
        return True
    layer, _, name = key.rpartition(".")
    owner = module.get_submodule(layer)
    return owner.training and name in dict(owner.named_buffers(recurse=False))
