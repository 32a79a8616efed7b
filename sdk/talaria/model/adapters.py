"""Compact adapters: a few trainable weights beside or behind frozen layers, merged away where that is exact.

An adapted layer ``L`` becomes a module with two children: ``L.base``, the layer itself, and ``L.adapter``. Kinds:

- ``lowrank``: ``W x + B (A x)``, parallel (LoRA, Hu et al. 2021; for a convolution ``A`` has its kernel, ``B`` is 1x1;
  of attention and recurrent layers each matrix has its own ``A`` and ``B``: :mod:`talaria.model.inside`);
- ``residual``: ``y + C y`` behind the layer, ``C`` a 1x1 convolution, or ``U D y`` with a bottleneck of ``rank``
  channels, with ReLU in between where ``nonlinear`` (Rebuffi et al. 2017, Houlsby et al. 2019);
- ``heart``: ``y + C dropout(BatchNorm(y))``, the form of HEART-PFL (2026), for convolutions.

The last factor starts at zero, so a fresh adapter changes nothing; ``heart`` starts at N(0, 1e-4), as published.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Conv1d, Conv2d, Linear, Module

from talaria import seeds
from talaria.errors import ModelError, some_of
from talaria.model import inside
from talaria.model.cloning import clone
from talaria.model.inside import Around, Inside
from talaria.model.spec import AdapterSpec
from talaria.model.split import ADAPTER

HEART_RESNET = AdapterSpec("heart", where=("layer*.*.conv*",))
"""HEART-PFL's two adapters per BasicBlock of a ResNet-18: behind conv1 and conv2, before their BatchNorm."""


class _ReadPastError(ModelError, AttributeError):
    """A network reads the weights of a layer past its pass: nothing would be learned of the adapter there."""


class _Beside(Around):
    """``base``, the layer ``name``, with ``adapter``; a network may read no weights of it past its pass."""

    def __init__(self, base: Module, adapter: Module) -> None:
        super().__init__()
        self.base, self.adapter, self.name = base, adapter, ""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, Tensor):
            raise _ReadPastError(
                f"adapters: the network reads {name!r} of layer {self.name!r} itself, where an adapter has no part; "
                "leave that layer out (where names those that take one), or call it"
            )
        return found


class Parallel(_Beside):
    """``base(x) + adapter(x)``."""

    def forward(self, input: Tensor) -> Tensor:  # as torch's layers name it: a network may call one so
        return torch.add(self.base(input), self.adapter(input))


class Behind(_Beside):
    """``y + adapter(y)`` for ``y = base(x)``."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.base(input)
        return torch.add(y, self.adapter(y))


ADAPTED = (Parallel, Behind, Inside)
"""What stands in the place of a layer with an adapter."""


class Factors(Module):
    """``up(down(x))``, with ReLU in between where ``nonlinear``."""

    def __init__(self, down: Module, up: Module, nonlinear: bool = False) -> None:
        super().__init__()
        self.down, self.up, self.nonlinear = down, up, nonlinear

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.down(input)
        out: Tensor = self.up(torch.relu(hidden) if self.nonlinear else hidden)
        return out


class Heart(Module):
    """``conv(dropout_0.3(norm(x)))``."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, conv: Module) -> None:
        super().__init__()
        self.norm: nn.BatchNorm1d | nn.BatchNorm2d = norm
        self.drop, self.conv = nn.Dropout(0.3), conv

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.drop(self.norm(x)))
        return out


def insert(model: Module, spec: AdapterSpec, skip: Sequence[str] = (), seed: int = 0) -> Module:
    """A copy of ``model`` with adapters; layers under the prefixes ``skip`` (the head) stay plain.

    ``seed`` decides the adapters' random factors; torch's global generator is untouched. Raises
    :class:`~talaria.errors.ModelError` where ``spec.where`` names no layer that can take this kind, with those that
    can, and where the model has adapters already.
    """
    if any(isinstance(m, ADAPTED) for m in model.modules()):
        raise ModelError("adapters: this model has adapters already; merge them first")
    open_to = [name for name in _eligible(model, spec) if not any(_matches(name, s) for s in skip)]
    chosen = [name for name in open_to if not spec.where or any(_matches(name, p) for p in spec.where)]
    deaf = [p for p in spec.where if not any(_matches(name, p) for name in open_to)]
    if deaf or not chosen:
        if not open_to:
            raise ModelError(f"adapters: no layer of this model can take kind={spec.kind!r}; use another kind, or none")
        raise ModelError(
            f"adapters: where={list(deaf)} names no layer that can take kind={spec.kind!r}; layers that can: "
            f"{some_of(open_to, 12)}"
        )
    out = clone(model)
    with seeds.aside(seed):
        for name in chosen:
            base = out.get_submodule(name)
            made = _adapted(base, spec).train(base.training)
            if isinstance(made, _Beside):
                made.name = name
            out.set_submodule(name, made)
    _walk_through(out)
    return out


def _walk_through(model: Module) -> None:
    """Torch's transformer layers read the weights of their linear layers past what stands there, where they are not
    trained; one that holds adapters must call them."""
    for owner in model.modules():
        if any(isinstance(part, ADAPTED) for part in owner.modules()):
            if isinstance(owner, nn.TransformerEncoderLayer):
                owner.activation_relu_or_gelu = 0
            elif isinstance(owner, nn.TransformerEncoder):
                owner.use_nested_tensor = False


def factored(model: Module, head: str, rank: int, seed: int = 0) -> Module:
    """A copy of ``model`` whose linear layer ``head`` is a product of two, ``head.down`` and ``head.up``, of ``rank``.

    It has ``rank * (inputs + outputs) + outputs`` parameters; where that is not fewer, the layer stays whole. ``seed``
    decides both factors. Raises :class:`~talaria.errors.ModelError` where ``head`` is no linear layer.
    """
    out = clone(model)
    layer = out.get_submodule(head)
    if type(layer) is not Linear:
        raise ModelError(f"adapters: head {head!r} is a {type(layer).__name__}; only a linear layer has two factors")
    if rank * (layer.in_features + layer.out_features) >= layer.weight.numel():
        return out
    with seeds.aside(seed):
        down = _started(Linear(layer.in_features, rank, bias=False))
        up = Linear(rank, layer.out_features, bias=layer.bias is not None)
    out.set_submodule(head, _like(layer, Factors(down, up)).train(layer.training))
    return out


def count(model: Module, components: Iterable[str] = (ADAPTER,)) -> int:
    """Parameters whose dotted name has one of ``components`` in it: by default, those of adapters."""
    wanted = set(components)
    return sum(p.numel() for name, p in model.named_parameters() if wanted & set(name.split(".")))


def _eligible(model: Module, spec: AdapterSpec) -> list[str]:
    """Plain layers that one name alone leads to, and for low-rank factors attention and recurrent layers; the linear
    layer inside attention is read by its owner, and adapted with it.

    A grouped convolution could never take its adapter up, so it gets one only where it is named in full.
    """
    closed = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    seen: dict[int, int] = {}
    for _, layer in model.named_modules(remove_duplicate=False):
        for parameter in layer.parameters(recurse=False):
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    out = []
    for name, layer in model.named_modules():
        plain = type(layer) in ((Conv1d, Conv2d) if spec.kind == "heart" else (Conv1d, Conv2d, Linear))
        plain = plain or (spec.kind == "lowrank" and inside.open_to(layer))
        if not plain or not name or any(name != owner and _matches(name, owner) for owner in closed):
            continue
        if (
            isinstance(layer, (Conv1d, Conv2d))
            and layer.groups > 1
            and (spec.kind == "lowrank" or name not in spec.where)
        ):
            continue
        if all(seen[id(p)] == 1 for p in layer.parameters()):
            out.append(name)
    return out


def _matches(name: str, prefix: str) -> bool:
    """True where the components of ``prefix``, patterns allowed, begin those of ``name``."""
    parts, wanted = name.split("."), prefix.split(".")
    return len(parts) >= len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=False))


def _adapted(base: Any, spec: AdapterSpec) -> Module:
    if inside.open_to(base):
        return Inside(
            base, {name: _factors(base.get_parameter(key), spec) for name, key in inside.matrices(base).items()}
        )
    width = base.weight.shape[0]
    if spec.kind == "lowrank":
        rank = min(spec.rank or 1, width, base.weight[0].numel())
        return Parallel(base, _like(base, Factors(_started(_down(base, rank)), _zero(_pointwise(base, rank, width)))))
    if spec.kind == "heart":
        norm = (nn.BatchNorm1d if isinstance(base, Conv1d) else nn.BatchNorm2d)(width)
        conv = _pointwise(base, width, width)
        nn.init.normal_(conv.weight, 0.0, 1e-4)
        return Behind(base, _like(base, Heart(norm, conv)))
    if spec.rank is None:
        return Behind(base, _like(base, _zero(_pointwise(base, width, width))))
    rank = min(spec.rank, width)
    down, up = _started(_pointwise(base, width, rank)), _zero(_pointwise(base, rank, width))
    return Behind(base, _like(base, Factors(down, up, spec.nonlinear)))


def _factors(weight: Tensor, spec: AdapterSpec) -> Module:
    """Low-rank factors beside a matrix."""
    out, into = weight.shape
    rank = min(spec.rank or 1, out, into)
    factors = Factors(_started(Linear(into, rank, bias=False)), _zero(Linear(rank, out, bias=False)))
    return factors.to(device=weight.device, dtype=weight.dtype)


def _like(base: Any, adapter: Module) -> Module:
    return adapter.to(device=base.weight.device, dtype=base.weight.dtype)


def _down(base: Any, rank: int) -> Any:
    """A layer that reads what ``base`` reads, with ``rank`` outputs."""
    if isinstance(base, Linear):
        return Linear(base.in_features, rank, bias=False)
    shape = (base.kernel_size, base.stride, base.padding, base.dilation)
    return type(base)(base.in_channels, rank, *shape, bias=False, padding_mode=base.padding_mode)


def _pointwise(base: Any, width: int, out: int) -> Any:
    return Linear(width, out, bias=False) if isinstance(base, Linear) else type(base)(width, out, 1, bias=False)


@torch.no_grad()
def _started(layer: Any) -> Module:
    layer.weight.normal_(0.0, 1 / sqrt(layer.weight[0].numel()))
    return cast(Module, layer)


@torch.no_grad()
def _zero(layer: Any) -> Module:
    layer.weight.zero_()
    return cast(Module, layer)
