"""The same step by torch, in float64 for the truth and in float32 for what torch itself loses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy

import torch
from torch.nn import Dropout, Module

from talaria.programs.graph import Array
from talaria.training import loop
from talaria.types import Recipe


def step(
    module: Module, recipe: Recipe, only: Collection[str] | None, feed: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Array]:
    """The outputs that a program gives on ``feed``, its inputs by name, worked out in ``dtype``."""
    own = deepcopy(module).to(dtype)
    held = {name.removeprefix("weight/"): torch.from_numpy(v) for name, v in feed.items() if name.startswith("weight/")}
    loop.load(own, {name: held.get(name, tensor).to(tensor.dtype) for name, tensor in own.state_dict().items()})
    trained = loop.freeze_but(own, only)
    optimizer = loop.sgd(trained, recipe.but(lr=float(feed["lr"])))
    for name, parameter in trained.items():
        if recipe.momentum:
            momentum = torch.from_numpy(feed[f"momentum/{name}"]).to(dtype)
            optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
    for name, layer in own.named_modules():
        if isinstance(layer, Dropout) and f"draw/{name}" in feed:
            draw = torch.from_numpy(feed[f"draw/{name}"]).to(dtype)
            layer.register_forward_hook(lambda _, given, out, draw=draw: given[0] * draw)
    x, y = torch.from_numpy(feed["x"]).to(dtype), torch.from_numpy(feed["y"])
    with loop.lone_sample_in_eval(own, len(y)):
        loss = loop.cross_entropy(recipe.smoothing)(own, x, y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    moved = {f"next/weight/{k}": v for k, v in loop.state_of(own).items() if _follows(own, k, trained)}
    momenta = {
        f"next/momentum/{k}": optimizer.state[p]["momentum_buffer"] for k, p in trained.items() if recipe.momentum
    }
    return {"loss": loss.detach().numpy(), **{k: v.detach().numpy() for k, v in {**moved, **momenta}.items()}}


def _follows(module: Module, key: str, trained: Collection[str]) -> bool:
    """Whether a step writes this tensor: what is trained, and the buffers of layers in train mode."""
    if key in trained:
        return True
    layer, _, name = key.rpartition(".")
    owner = module.get_submodule(layer)
    return owner.training and name in dict(owner.named_buffers(recurse=False))
