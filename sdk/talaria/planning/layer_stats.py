"""What a model is made of, as a function of its widths: products, activations, values. No weights are touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from talaria.errors import ModelError
from talaria.model import called, merging, zoo
from talaria.model.cloning import clone
from talaria.model.dependency_groups import CONVS, is_depthwise
from talaria.model.masks import Axis, ChannelLayout
from talaria.model.recurrent import GATES
from talaria.model.spec import ModelSpec
from talaria.model.split import Split
from talaria.planning.anatomy import Anatomy, Layer

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@lru_cache(maxsize=32)
def anatomy(spec: ModelSpec) -> Anatomy:
    """The anatomy of a zoo model, its adapters (if any) counted as tensors but not as layers where they merge."""
    model = zoo.build(spec)
    return describe(model, zoo.example(spec), zoo.layout(spec), zoo.split(spec, model))


def describe(model: Module, example: Tensor, layout: ChannelLayout, split: Split) -> Anatomy:
    """The anatomy of any model whose channels ``layout`` describes; ``example`` is one input (1, ...)."""
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    try:
        run, renamed = merging.merge(model), True
    except ModelError:
        run, renamed = clone(model), False
    layers: list[Layer] = []
    for name, module in run.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # padded sequences stay as long as they are: nested ones have no sizes
        if isinstance(module, (*CONVS, *TRANSPOSED, nn.Linear)):
            key = _key(f"{name}.weight" if name else "weight", shapes, renamed)
            module.register_forward_hook(_noting(layers, name, layout.axes.get(key)), with_kwargs=True)
        elif type(module) in GATES or isinstance(module, nn.MultiheadAttention):
            module.register_forward_hook(_weighing(layers, name, layout, shapes), with_kwargs=True)
    with torch.no_grad():
        run.eval()(example)
    return Anatomy(layout, tuple(layers), shapes, split)


def _key(merged: str, shapes: Mapping[str, tuple[int, ...]], renamed: bool) -> str:
    """The name that a merged layer's weight has in the adapted model."""
    if not renamed or merged in shapes:
        return merged
    stem, _, leaf = merged.rpartition(".")
    return f"{stem}.base.{leaf}"


def _noting(layers: list[Layer], name: str, axes: tuple[Axis, ...] | None) -> Any:
    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        (x, *_), _ = called.by_place(module, given, named)
        weight = module.weight
        linear = isinstance(module, nn.Linear)
        positions = (_positions(output, linear), _positions(x, linear))
        kernel = math.prod(weight.shape[2:])
        if linear or max(positions) == 1:
            kind = "vector"
        elif is_depthwise(module):
            kind = "depthwise"
        elif module.in_channels <= 8 and not (axes and axes[1]):
            kind = "stem"
        else:
            kind = "pointwise" if kernel == 1 else "convolution"
        if isinstance(module, TRANSPOSED):  # left whole: each position of what comes in meets all of its weights
            dense, at = (weight.shape[1], weight.shape[0]), (positions[1], positions[1])
            layers.append(Layer(name, "convolution", (), (), dense, kernel, at, True))
            return
        out, into = axes[:2] if axes else ((), ())
        layers.append(Layer(name, kind, out, into, (weight.shape[0], weight.shape[1]), kernel, positions, linear))

    return note


def _weighing(layers: list[Layer], name: str, layout: ChannelLayout, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Notes the products of a layer whose weights are many: each weighs all moments of what comes in, as those of a
    recurrent layer do with the states before, and those of attention with what the heads give."""

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        (x, *_), _ = called.by_place(module, given, named)
        moments = math.prod(x.shape[:-1]) if isinstance(x, Tensor) else len(x.data)
        for key, weight in module.named_parameters():
            if weight.dim() == 2:
                full = f"{name}.{key}"
                held = full if full in shapes else f"{name}.base.{key}"  # where adapters were merged
                out, into = layout.axes.get(held, ((), ()))
                dense = (weight.shape[0], weight.shape[1])
                layers.append(Layer(full, "vector", out, into, dense, 1, (moments, moments), True))

    return note


def _positions(value: Tensor, linear: bool) -> int:
    shape = value.shape
    return math.prod(shape[1:-1] if linear else shape[2:])
