"""The models known by name: spec in, module out, the same weights on every device. Those of other packages are found
by the name of an entry point in ``talaria.models`` or as ``module:factory``; a module of this process: :func:`keep`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from talaria import plugins, seeds, valid
from talaria.errors import ConfigError, ModelError
from talaria.foreign import shown
from talaria.model.masks import ChannelLayout
from talaria.model.spec import ModelSpec
from talaria.model.split import Buffers, Split, require_layers, split_model

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from talaria.model import prunability
    from talaria.model.functional_dropout import Calls


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., Module]
    head: str | None = "head"
    """None: looked for, see :func:`head`."""
    load: Callable[[Module, int], None] | None = None
    """Puts published weights into the module, where there are any."""
    tuned: tuple[str, ...] = ()
    """Layers that adapters sit on by default, where the weights are published; (): all. The last stages: all below is
    computed once and kept."""


def _net(home: str, name: str) -> Callable[..., Any]:
    """A function of ``talaria.model.nets``, imported when it is called: who only names a model needs no torch."""

    def call(*given: Any) -> Any:
        return getattr(import_module(f"talaria.model.nets.{home}"), name)(*given)

    return call


def _factory(home: str, name: str) -> Callable[..., Module]:
    def make(input_shape: Sequence[int], classes: int) -> Module:
        model: Module = _net(home, name)(input_shape, classes)
        return model

    return make


_ZOO: dict[str, _Entry] = {
    "imu_cnn": _Entry(_factory("small_cnns", "imu_cnn")),
    "steps_cnn": _Entry(_factory("small_cnns", "steps_cnn")),
    "fmnist_cnn": _Entry(_factory("small_cnns", "fmnist_cnn")),
    "mlp": _Entry(_factory("small_cnns", "mlp")),
    "resnet18": _Entry(_factory("torchvision_models", "resnet18"), "fc"),
    "mobilenet_v3_small": _Entry(_factory("torchvision_models", "mobilenet_v3_small"), "classifier.3"),
    "efficientnet_b0": _Entry(_factory("torchvision_models", "efficientnet_b0"), "classifier.1"),
    "efficientnet_lite0": _Entry(
        _factory("efficientnet_lite", "lite0"),
        load=_net("efficientnet_lite", "load"),
        tuned=("features.stage6.*.layers.project", "features.stage7.*.layers.project"),
    ),
}


GROUP = plugins.Group("model", "talaria.models", _ZOO)
"""How models are found by name: the zoo, entry points, ``module:factory``."""


def names() -> list[str]:
    """The names that a :class:`ModelSpec` may carry."""
    return sorted(_ZOO)


def build(spec: ModelSpec) -> Module:
    """The model of ``spec`` in train mode; weights follow ``spec.seed`` alone, torch's global generator is untouched.

    Raises :class:`~talaria.errors.ConfigError` for an unknown name, an input shape that the model cannot take, a
    missing optional package, for ``pretrained`` where no weights are published, and where this process has torch make
    other numbers than float32, or elsewhere than on the CPU.
    """
    entry = _entry(spec.name)
    _require_plain_torch()
    if spec.pretrained and entry.load is None:
        raise ConfigError(f"{spec.name}: pretrained=True, but no weights are published for it; use pretrained=False")
    with seeds.aside(spec.seed):
        model = _made(spec, entry)
        if spec.pretrained and entry.load is not None:
            entry.load(model, spec.classes)
        if spec.adapters is not None:
            from talaria.model import adapters

            seed = seeds.seed_of(spec.seed, "zoo", 0, "adapters")
            last = head(spec)
            model = adapters.insert(model, spec.adapters, skip=(last,), seed=seed)
            if spec.adapters.head is not None:
                seed = seeds.seed_of(spec.seed, "zoo", 0, "head")
                model = adapters.factored(model, last, spec.adapters.head, seed)
    return model.train()


def _require_plain_torch() -> None:
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32:
        raise ConfigError(f"torch: its default dtype is {dtype}, and models are float32; set_default_dtype(float32)")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError("torch: autocast is on, and models are float32; call this outside of it")
    if device.type != "cpu":
        raise ConfigError(
            f"torch: its default device is {device}; set_default_device('cpu'), and name device= to train on"
        )


def split(spec: ModelSpec, model: Module, buffers: Buffers = "local") -> Split:
    """Body, adapters and head of a model that :func:`build` made. Raises :class:`~talaria.errors.ModelError` where a
    model of another package does not answer as a model must."""
    last = head(spec)
    if GROUP.is_foreign(spec.name):
        _require_answers(plain(spec))
    return split_model(model, head=last, buffers=buffers)


def head(spec: ModelSpec) -> str:
    """The dotted prefix of the model's head: what ``spec`` names, else the zoo's, else of a foreign model the module
    ``head``, its last Linear layer, or the one that answers last, or where none is Linear the last convolution with as
    many channels as classes. Raises :class:`~talaria.errors.ModelError` where there is none."""
    return spec.head or _entry(spec.name).head or _found(plain(spec))


def plain(spec: ModelSpec) -> ModelSpec:
    """The family that a spec is of: without adapters, which merge away, and in any weights."""
    return replace(spec, adapters=None, seed=0, pretrained=False)


@lru_cache(maxsize=64)
def _found(spec: ModelSpec) -> str:
    from torch.nn import Linear

    from talaria.model import answers

    model = build(spec)
    if any(key.startswith("head.") for key in model.state_dict()):
        return "head"
    linear = {name: one.out_features for name, one in model.named_modules() if isinstance(one, Linear) and name}
    if not linear and (convolution := answers.last_convolution(model, spec.classes)):
        return convolution
    last: str | None = next(reversed(linear), None)
    if last is not None and linear[last] != spec.classes:  # the order in which layers are made need not be theirs
        last = answers.last_linear(model, example(spec, 2)) or last
    if last is None or linear[last] != spec.classes:
        if last is not None:
            answers.require(model, example(spec, 2), spec.classes, f"model {shown(spec.name)}")
        require_layers(model, f"model {shown(spec.name)}")
        found = "it has no Linear layer" if last is None else f"{last!r} gives {linear[last]}"
        raise ModelError(
            f"model {shown(spec.name)}: its last layer must be Linear and give classes={spec.classes}, "
            f"but {found}; name the last layer (--head, ModelSpec(head=...), [run.spec] head), or correct the factory"
        )
    return last


def require_form(spec: ModelSpec, form: Sequence[str], task: str) -> None:
    """Raise :class:`~talaria.errors.ModelError` unless what the model gives has the dimensions of ``form``, which
    ``task`` takes."""
    _require_form(plain(spec), tuple(form), task)


@lru_cache(maxsize=64)
def _require_form(spec: ModelSpec, form: tuple[str, ...], task: str) -> None:
    from talaria.model import answers

    answers.require_form(build(spec), example(spec, 2), form, f"model {shown(spec.name)}: task={shown(task)}")


@lru_cache(maxsize=64)
def _require_answers(spec: ModelSpec) -> None:
    from talaria.model import answers

    answers.require(build(spec), example(spec, 2), spec.classes, f"model {shown(spec.name)}")


def keep(module: Module, input_shape: Sequence[int], classes: int, head: str | None = None) -> ModelSpec:
    """The spec of a torch module of this process, for simulation: all clients start from its present weights.

    The module is copied, and kept until the process ends: keep it once and use the spec for many runs. Raises
    :class:`~talaria.errors.ConfigError` for what is no module, and :class:`~talaria.errors.ModelError` where its head
    is neither found nor named.
    """
    from torch.nn import Module

    from talaria.model import answers, several
    from talaria.model.cloning import clone

    if not isinstance(module, Module):
        raise ConfigError(f"model: {shown(module)} must be a torch module")
    answers.require_own_weights(module, "model")
    several.require_one(module, "model")
    own = clone(module)
    name = f"{type(module).__module__}:{type(module).__qualname__}"
    kept = GROUP.keep(name, _Entry(lambda shape, answers: clone(own), None))
    spec = ModelSpec(kept, tuple(input_shape), classes, head=head)
    split(spec, build(spec))
    return spec


def own(module: Module, example: Tensor) -> Module:
    """``module``, a network of one's own that reads ``example``, as a model of another package is made: its embeddings
    take float32, what it calls of dropout are layers, and a layer has one name."""
    from talaria.model import tokens

    return _in_ways(module, _ways_of(tokens.as_numbers(module), example, "model"))


def _made(spec: ModelSpec, entry: _Entry) -> Module:
    model = _raw(spec, entry)
    if not GROUP.is_foreign(spec.name):
        return model
    return _in_ways(model, _ways(replace(plain(spec), head=None)))


def _in_ways(module: Module, ways: tuple[tuple[str, ...], Calls]) -> Module:
    from talaria.model import aliases, functional_dropout

    spare, calls = ways
    return functional_dropout.as_layers(aliases.without(module, spare), calls)


def _raw(spec: ModelSpec, entry: _Entry) -> Module:
    from torch.nn import Module

    from talaria.model import answers, several, tokens

    what, taken = f"model {shown(spec.name)}", valid.options_of(entry.make)
    options = taken.but(list(taken.known)[:2]).read(what, dict(spec.options))
    if not GROUP.is_foreign(spec.name):
        return entry.make(spec.input_shape, spec.classes, **options)
    model = plugins.make(what, entry.make, spec.input_shape, spec.classes, **options)
    if not isinstance(model, Module):
        raise ConfigError(f"{what}: its factory gave a {type(model).__name__}; it must give a torch module")
    answers.require_own_weights(model, what)
    several.require_one(model, what)
    return tokens.as_numbers(model)


@lru_cache(maxsize=64)
def _ways(spec: ModelSpec) -> tuple[tuple[str, ...], Calls]:
    """Of a model of another package the names that it can spare, and what it calls of dropout as functions."""
    from talaria.model import tokens

    with seeds.aside():
        model = _raw(spec, _entry(spec.name))
        return _ways_of(model, tokens.example(model, spec.input_shape, 2), f"model {shown(spec.name)}")


def _ways_of(module: Module, example: Tensor, what: str) -> tuple[tuple[str, ...], Calls]:
    from talaria.model import aliases, functional_dropout
    from talaria.model.cloning import clone

    spare = aliases.spare(module, example)
    return spare, functional_dropout.calls_of(aliases.without(clone(module), spare), example, what)


def tuned(name: str) -> tuple[str, ...]:
    """Where adapters sit by default on the named model with its published weights; () for every layer."""
    return _entry(name).tuned


def example(spec: ModelSpec, batch: int = 1) -> Tensor:
    """Standard normal float32 input (batch, *input_shape), always the same one; tokens for a network that has
    embeddings."""
    from torch.nn import Identity

    from talaria.model import tokens

    return tokens.example(build(spec) if GROUP.is_foreign(spec.name) else Identity(), spec.input_shape, batch)


def layout(spec: ModelSpec) -> ChannelLayout:
    """The channel groups of the model; worked out once per architecture and process."""
    return surveyed(spec).layout


@lru_cache(maxsize=64)
def whole(spec: ModelSpec) -> frozenset[str]:
    """The linear, convolutional and recurrent layers of which no mask takes an output."""
    from torch import nn

    from talaria.model.inside import base_of

    axes, found = layout(spec).axes, set()
    for name, layer in build(replace(spec, seed=0, pretrained=False)).named_modules():
        kind = type(layer).__mro__[1] if nn.utils.parametrize.is_parametrized(layer) else type(layer)
        recurrent = isinstance(base_of(layer), nn.RNNBase)
        if recurrent or kind in (nn.Linear, nn.Conv1d, nn.Conv2d):
            weight = "weight_ih_l0" if recurrent else "weight"
            own = axes.get(f"{name}.{weight}" if base_of(layer) is layer else f"{name}.base.{weight}")
            if not (own and own[0]):
                found.add(name)
    return frozenset(found)


@lru_cache(maxsize=64)
def surveyed(spec: ModelSpec) -> prunability.Survey:
    """The layout with the reasons for what cannot be pruned."""
    return _surveyed(replace(spec, seed=0, pretrained=False))


@lru_cache(maxsize=64)
def _surveyed(spec: ModelSpec) -> prunability.Survey:
    from talaria.model import prunability

    return prunability.survey(build(spec), example(spec, 2))


def left_whole(spec: ModelSpec) -> str:
    """What of somebody else's model cannot be pruned, and why, in words; of the zoo's, whose layers are known, nothing
    is said."""
    refused = surveyed(spec).refused if GROUP.is_foreign(spec.name) else {}
    return "; ".join(f"{name} {reason}" for name, reason in sorted(refused.items()))


def require(name: str) -> None:
    """Raise :class:`ConfigError`, with the models there are, unless ``name`` is one of them. Where there is no torch,
    another package's is not looked for: nothing could make it, and its programs need no code here. Where torch was not
    imported yet, as in a coordinator, its package is looked for and not imported, which would import torch: whoever
    makes the model finds the rest."""
    if not GROUP.is_foreign(name) or (plugins.has_torch() and "torch" in sys.modules):
        _entry(name)
    elif plugins.has_torch():
        GROUP.require_installed(name)


def require_allowed(name: object, allow: Collection[str], mend: str) -> None:
    """As :meth:`talaria.plugins.Group.require_allowed`, where the code of a model would run at all: with torch."""
    if plugins.has_torch():
        GROUP.require_allowed(name, allow, mend)


def fitting(
    input_shape: Sequence[int], classes: int, samples: int, seed: int = 0, each_step: bool = False
) -> ModelSpec:
    """A small model for data of this shape (without the batch).

    (features,) takes ``mlp``, (channels, length) ``imu_cnn``, or ``steps_cnn`` where ``each_step`` has a class, and
    (channels, H, W) ``fmnist_cnn``; where there is less than about one sample per class to tell channels apart, or the
    window is too short to convolve, ``mlp``. Raises :class:`~talaria.errors.ConfigError` where nothing here fits.
    """
    shape = tuple(input_shape)
    if each_step and len(shape) != 2:
        raise ConfigError(
            f"model: none of the zoo says a class for each step of samples of shape {shape}; give (N, channels, "
            "steps), x[:, None] for one channel, or name a network that gives (N, steps, classes)"
        )
    if samples < 1:
        raise ConfigError(f"fitting: samples={samples} must be at least 1; give labelled data")
    name = "mlp"
    if each_step:
        name = "steps_cnn"
    elif len(shape) == 2 and shape[1] >= 8:
        name = "imu_cnn"
    elif len(shape) == 3 and min(shape[1:]) >= 16:
        name = "fmnist_cnn"
    return ModelSpec(name, shape, classes, seed=seed)


def _entry(name: str) -> _Entry:
    if GROUP.is_foreign(name) and not plugins.has_torch():
        raise ConfigError(
            f"model {shown(name)}: its code needs torch, which is not installed; learn it with programs (a kit), or "
            "install talaria[torch]"
        )
    found = GROUP.find(name)
    if isinstance(found, _Entry):
        return found
    if not callable(found) or (not isinstance(found, type) and hasattr(found, "state_dict")):
        raise ConfigError(f"model {shown(name)}: is a {type(found).__name__}; name a function (input_shape, classes)")
    return _Entry(found, None)
