"""What a model is made of, as a function of its widths: products, activations, values. No weights are touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from talaria.errors import ModelError
from talaria.model import merging, zoo
from talaria.model.dependency_groups import CONVS, is_depthwise
from talaria.model.masks import Axis, ChannelLayout
from talaria.model.pruning import aligned
from talaria.model.spec import ModelSpec
from talaria.model.split import Split

Widths = Mapping[str, int]
PRODUCTS = ("pointwise", "depthwise", "convolution", "stem", "vector")
"""Million products of 1x1, depthwise, larger and first convolutions, and of layers on single positions."""
SPILLS = {"beyond_1mb": 0.25, "beyond_4mb": 1.0, "beyond_16mb": 4.0}
"""Million weights beyond sizes that caches have: from there on they come from slower memory at every input."""
SET = 4
"""Blocks of outputs that a convolution computes at once from the same inputs; a last set of fewer takes longer each."""
FEATURES = (*PRODUCTS, "idle", "moved", "weights", *SPILLS, "fixed")
"""Products; million products that would have filled last sets; million values moved in and out of layers; million
weights, and those beyond each size; 1."""


@dataclass(frozen=True)
class Layer:
    """One convolution or linear layer as it is run for one input."""

    name: str
    kind: str
    out: Axis
    into: Axis
    dense: tuple[int, int]
    """Outputs and inputs of the unpruned layer (inputs per group of channels)."""
    kernel: int
    positions: tuple[int, int]
    """Positions of the output and of the input map."""
    linear: bool


@dataclass(frozen=True)
class Anatomy:
    """The layers and tensors of one architecture, with what rules their sizes."""

    layout: ChannelLayout
    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Dense shape of each state-dict tensor."""
    split: Split

    def full(self) -> dict[str, int]:
        """The widths of the unpruned model."""
        return dict(self.layout.sizes)

    def shape(self, key: str, widths: Widths) -> tuple[int, ...]:
        """The shape of a tensor at ``widths``."""
        axes = self.layout.axes.get(key)
        dense = self.shapes[key]
        if axes is None:
            return dense
        return tuple(self.extent(axis, size, widths) for axis, size in zip(axes, dense, strict=True))

    def values(self, keys: Sequence[str], widths: Widths) -> int:
        """Number of values of the named tensors at ``widths``."""
        return sum(math.prod(self.shape(key, widths)) for key in keys)

    def products(self, widths: Widths) -> float:
        """Multiply-adds for one input."""
        return 1e6 * sum(self.features(widths)[: len(PRODUCTS)])

    def features(self, widths: Widths, block: int = 1) -> list[float]:
        """What latency is predicted from, in the order of :data:`FEATURES`.

        A convolution is computed in whole blocks of channels, so it counts as wide as the next multiple of ``block``.
        """
        found = dict.fromkeys(FEATURES, 0.0)
        for layer in self.layers:
            whole = 1 if layer.linear else block
            out = aligned(self.extent(layer.out, layer.dense[0], widths), whole)
            into = self.extent(layer.into, layer.dense[1], widths)
            into = 1 if layer.kind == "depthwise" else into if layer.kind == "stem" else aligned(into, whole)
            weights = out * into * layer.kernel
            found[layer.kind] += weights * layer.positions[0] / 1e6
            if layer.kind in ("pointwise", "convolution") and not layer.linear:
                missing = -out % (SET * block)
                found["idle"] += missing * into * layer.kernel * layer.positions[0] / 1e6
            read = (out if layer.kind == "depthwise" else into) * layer.positions[1]
            found["moved"] += (out * layer.positions[0] + read) / 1e6
            found["weights"] += weights / 1e6
        for name, size in SPILLS.items():
            found[name] = max(0.0, found["weights"] - size)
        found["fixed"] = 1.0
        return [found[name] for name in FEATURES]

    def extent(self, axis: Axis, dense: int, widths: Widths) -> int:
        """Positions along one dimension at ``widths``."""
        return sum(widths.get(g, self.layout.sizes[g]) * repeat for g, repeat in axis) if axis else dense

    def renamed(self, full: Anatomy) -> dict[str, str]:
        """The groups of this plain model by their names in the same model with adapters."""
        names = {g: g for g in self.layout.sizes}
        for key, axes in self.layout.axes.items():
            stem, _, leaf = key.rpartition(".")
            theirs = full.layout.axes.get(key) or full.layout.axes.get(f"{stem}.base.{leaf}") or ()
            for own, other in zip(axes, theirs, strict=False):
                names.update({g: h for (g, _), (h, _) in zip(own, other, strict=False)})
        return names


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
        run, renamed = model, False
    layers: list[Layer] = []
    handles = []
    for name, module in run.named_modules():
        if isinstance(module, (*CONVS, nn.Linear)):
            key = _key(f"{name}.weight" if name else "weight", shapes, renamed)
            handles.append(module.register_forward_hook(_noting(layers, name, layout.axes.get(key))))
    modes = {m: m.training for m in run.modules()}
    try:
        with torch.no_grad():
            run.eval()(example)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return Anatomy(layout, tuple(layers), shapes, split)


def _key(merged: str, shapes: Mapping[str, tuple[int, ...]], renamed: bool) -> str:
    """The name that a merged layer's weight has in the adapted model."""
    if not renamed or merged in shapes:
        return merged
    stem, _, leaf = merged.rpartition(".")
    return f"{stem}.base.{leaf}"


def _noting(layers: list[Layer], name: str, axes: tuple[Axis, ...] | None) -> Any:
    def note(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        linear = isinstance(module, nn.Linear)
        positions = (_positions(output, linear), _positions(inputs[0], linear))
        kernel = math.prod(weight.shape[2:])
        if linear or max(positions) == 1:
            kind = "vector"
        elif is_depthwise(module):
            kind = "depthwise"
        elif module.in_channels <= 8 and not (axes and axes[1]):
            kind = "stem"
        else:
            kind = "pointwise" if kernel == 1 else "convolution"
        out, into = axes[:2] if axes else ((), ())
        layers.append(Layer(name, kind, out, into, (weight.shape[0], weight.shape[1]), kernel, positions, linear))

    return note


def _positions(value: Tensor, linear: bool) -> int:
    shape = value.shape
    return math.prod(shape[1:-1] if linear else shape[2:])
