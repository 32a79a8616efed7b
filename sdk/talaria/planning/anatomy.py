"""What one architecture is made of, as plain values: its layers, and what they compute and move at given widths.

Needs no torch: a device without it plans from the anatomy that its kit holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from talaria.model.masks import Axis, ChannelLayout
from talaria.model.split import Split
from talaria.model.widths import aligned

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

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """The tensors that neither a layer nor a BatchNorm holds."""
        names = {layer.name for layer in self.layers}
        within = {name if any(key.startswith(f"{name}.") for key in self.shapes) else _module(name) for name in names}
        within |= {_module(key) for key in self.shapes if key.endswith(".running_mean")}
        return tuple(key for key in self.shapes if not key.startswith(tuple(f"{name}." for name in within)))

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


def _module(key: str) -> str:
    """The module that holds the tensor ``key``, as one of many matrices is named in :attr:`Anatomy.layers`."""
    return key.rpartition(".")[0]


def sent_bytes(parts: Anatomy, widths: Widths, keys: Collection[str], codec: str) -> int:
    """Bytes of an update of the tensors ``keys`` before compression: values exactly, names and shapes as an upper
    bound; ``codec`` is raw, fp16 or int8."""
    total = 8 + 512 + sum(-(-n // 8) + 96 + len(g) for g, n in parts.layout.sizes.items())
    for key in keys:
        shape = parts.shape(key, widths)
        values = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        total += {"raw": 4 * values, "fp16": 2 * values, "int8": values + 4 * rows}[codec]
        total += (2 if codec == "int8" else 1) * (len(key) + 96)
    return total


def deployed_values(parts: Anatomy, widths: Widths) -> int:
    """Values in one form of the deployed model: weights and one bias per output of each layer, once however often it
    is called, and what no layer holds, such as embeddings. BatchNorm is folded and adapters are merged."""
    total = parts.values(parts.apart, widths)
    for layer in {layer.name: layer for layer in parts.layers}.values():
        out = parts.extent(layer.out, layer.dense[0], widths)
        into = 1 if layer.kind == "depthwise" else parts.extent(layer.into, layer.dense[1], widths)
        total += out * into * layer.kernel + out
    return total


def bundle_bytes(parts: Anatomy, widths: Widths, graph: int) -> tuple[int, int]:
    """Bytes of the models in a bundle, for ``graph`` bytes of one form's graph: where half precision is asked for, and
    where the fp32 form is kept beside the fastest, which is half as large at most."""
    values = deployed_values(parts, widths)
    half = 2 * values + graph + 300 * len(parts.layers)  # each tensor is cast back at load
    return half, 4 * values + graph + half
