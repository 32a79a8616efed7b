"""The models known by name: spec in, module out, the same weights on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import Module

from talaria import seeds
from talaria.errors import ConfigError
from talaria.model import adapters, prunability
from talaria.model.nets import efficientnet_lite, small_cnns, torchvision_models
from talaria.model.spec import ModelSpec
from talaria.model.split import split_model
from talaria.types import Buffers, ChannelLayout, Split

__all__ = [
    "ModelSpec",
    "build",
    "example",
    "fitting",
    "head",
    "layout",
    "names",
    "require",
    "split",
    "surveyed",
    "tuned",
]


@dataclass(frozen=True)
class _Entry:
    make: Callable[[Sequence[int], int], Module]
    head: str = "head"
    load: Callable[[Module, int], None] | None = None
    """Puts published weights into the module, where there are any."""
    tuned: tuple[str, ...] = ()
    """Layers that adapters sit on by default, where the weights are published; (): all."""


_ZOO: dict[str, _Entry] = {
    "imu_cnn": _Entry(small_cnns.imu_cnn),
    "fmnist_cnn": _Entry(small_cnns.fmnist_cnn),
    "mlp": _Entry(small_cnns.mlp),
    **{
        name: _Entry(partial(torchvision_models.backbone, name), head)
        for name, head in torchvision_models.HEADS.items()
    },
    "efficientnet_lite0": _Entry(efficientnet_lite.lite0, load=efficientnet_lite.load, tuned=efficientnet_lite.TUNED),
}


def names() -> list[str]:
    """The names that a :class:`ModelSpec` may carry."""
    return sorted(_ZOO)


def build(spec: ModelSpec) -> Module:
    """The model of ``spec`` in train mode; weights follow ``spec.seed`` alone, torch's global generator is untouched.

    Raises :class:`~talaria.errors.ConfigError` for an unknown name, an input shape that the model cannot take, a
    missing optional package, and for ``pretrained`` where no weights are published.
    """
    entry = _entry(spec.name)
    if spec.pretrained and entry.load is None:
        raise ConfigError(f"{spec.name}: pretrained=True, but no weights are published for it; use pretrained=False")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)
        model = entry.make(spec.input_shape, spec.classes)
        if spec.pretrained and entry.load is not None:
            entry.load(model, spec.classes)
        if spec.adapters is not None:
            seed = seeds.seed_of(spec.seed, "zoo", 0, "adapters")
            model = adapters.insert(model, spec.adapters, skip=(entry.head,), seed=seed)
            if spec.adapters.head is not None:
                seed = seeds.seed_of(spec.seed, "zoo", 0, "head")
                model = adapters.factored(model, entry.head, spec.adapters.head, seed)
    return model.train()


def split(spec: ModelSpec, model: Module, buffers: Buffers = "local") -> Split:
    """Body, adapters and head of a model that :func:`build` made."""
    return split_model(model, head=_entry(spec.name).head, buffers=buffers)


def head(name: str) -> str:
    """The dotted prefix of the named model's head."""
    return _entry(name).head


def tuned(name: str) -> tuple[str, ...]:
    """Where adapters sit by default on the named model with its published weights; () for every layer."""
    return _entry(name).tuned


def example(spec: ModelSpec, batch: int = 1) -> Tensor:
    """Standard normal float32 input (batch, *input_shape), always the same one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *spec.input_shape, generator=generator)


def layout(spec: ModelSpec) -> ChannelLayout:
    """The channel groups of the model; worked out once per architecture and process."""
    return surveyed(spec).layout


def surveyed(spec: ModelSpec) -> prunability.Survey:
    """The layout with the reasons for what cannot be pruned."""
    return _surveyed(replace(spec, seed=0, pretrained=False))


@lru_cache(maxsize=64)
def _surveyed(spec: ModelSpec) -> prunability.Survey:
    return prunability.survey(build(spec), example(spec, 2))


def require(name: str) -> None:
    """Raise :class:`ConfigError`, with the models there are, unless ``name`` is one of them."""
    _entry(name)


def fitting(input_shape: Sequence[int], classes: int, samples: int, seed: int = 0) -> ModelSpec:
    """A small model for data of this shape (without the batch).

    (features,) takes ``mlp``, (channels, length) ``imu_cnn`` and (channels, H, W) ``fmnist_cnn``; where there is less
    than about one sample per class to tell channels apart, or the window is too short to convolve, ``mlp``.
    """
    shape = tuple(input_shape)
    if samples < 1:
        raise ConfigError(f"fitting: samples={samples} must be at least 1; give labelled data")
    name = "mlp"
    if len(shape) == 2 and shape[1] >= 8:
        name = "imu_cnn"
    elif len(shape) == 3 and min(shape[1:]) >= 16:
        name = "fmnist_cnn"
    return ModelSpec(name, shape, classes, seed=seed)


def _entry(name: str) -> _Entry:
    if name not in _ZOO:
        raise ConfigError(f"model: name={name!r} is unknown; choose one of {', '.join(names())}")
    return _ZOO[name]
