"""The same step by torch, in float64 for the truth and in float32 for what torch itself loses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, RNNBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from talaria.errors import ModelError
from talaria.model import attention, recurrent
from talaria.model.batch_norm import lone_sample_in_eval
from talaria.model.cloning import clone
from talaria.model.state import load, state_of, to_arrays
from talaria.model.twice import TwiceDifferentiable
from talaria.programs.layers.table import DRAWN
from talaria.programs.tangent import along
from talaria.programs.vector import distance
from talaria.tensors import Array
from talaria.training import loop
from talaria.training.sgd import SGD
from talaria.training.taps import Taps
from talaria.types import Recipe

_SUSPECT = 1e-4
"""Float32 seldom errs by as much, and float64 does not."""


def step(
    module: Module, recipe: Recipe, only: Collection[str] | None, feed: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Array]:
    """The outputs that a program gives on ``feed``, its inputs by name, worked out in ``dtype``."""
    own, trained = _given(module, only, feed, dtype)
    before, ran = {key: value.clone() for key, value in own.named_buffers()}, _running(own)
    rate = float(feed["lr"])
    optimizer = SGD(trained, recipe.but(lr=rate))
    if recipe.momentum:
        held = [k for k in trained if f"momentum/{k}" in feed]  # what no layer reads has none
        optimizer.momentum = {k: torch.from_numpy(feed[f"momentum/{k}"]).to(dtype) / -rate for k in held}
    x, y = torch.from_numpy(feed["x"]).to(dtype), torch.from_numpy(feed["y"])
    with lone_sample_in_eval(own, len(y)), _In(dtype):
        loss = loop.cross_entropy(recipe.smoothing)(own, x, y)
    try:
        loss.backward()
    except RuntimeError as why:
        raise ModelError(f"program: torch does not train this model ({' '.join(str(why).split())[:160]})") from None
    reached = {name: parameter for name, parameter in trained.items() if parameter.grad is not None}
    if "pull" in feed:
        for name, parameter in reached.items():
            loop.add_pull(parameter, torch.from_numpy(feed[f"anchor/{name}"]).to(dtype), float(feed["pull"]))
    optimizer.step()
    moved = {f"next/weight/{k}": v for k, v in state_of(own).items() if _follows(own, k, reached, before, ran)}
    momenta = {f"next/momentum/{k}": v * -rate for k, v in optimizer.momentum.items()}
    return {"loss": loss.detach().numpy(), **moved, **to_arrays(momenta)}


def derivative(
    module: Module, only: Collection[str] | None, taps: Sequence[str], feed: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Array]:
    """The outputs that a derivative (:func:`talaria.programs.differentiate.graph_of`) gives on ``feed``, likewise."""
    own, trained = _given(module, only, feed, dtype)
    before, ran = {key: value.clone() for key, value in own.named_buffers()}, _running(own)
    x = torch.from_numpy(feed["x"]).to(dtype)
    with Taps(own, taps) as opened, lone_sample_in_eval(own, len(x)), _In(dtype), TwiceDifferentiable():
        own(x)
    seen = opened.seen
    slopes = {tap: torch.from_numpy(feed[f"slope/{tap}"]).to(dtype) for tap in taps if f"slope/{tap}" in feed}
    if any(along(f"slope/{tap}") in feed for tap in taps):
        try:
            return _moving(trained, seen, slopes, feed)
        except RuntimeError as why:
            raise ModelError(
                f"program: torch does not differentiate this model twice ({str(why)[:100]}); use differences instead"
            ) from None
    torch.autograd.backward([seen[tap] for tap in slopes], list(slopes.values()))
    moved = {f"next/weight/{k}": v for k, v in state_of(own).items() if _follows(own, k, (), before, ran)}
    gradients = {f"gradient/{k}": p.grad for k, p in trained.items() if p.grad is not None}
    return {**to_arrays({f"tap/{tap}": value.detach() for tap, value in seen.items()}), **moved, **to_arrays(gradients)}


def require_undrawn(torch_errs: float, exact: Mapping[str, Array], again: Callable[[], Mapping[str, Array]]) -> None:
    """Raise :class:`~talaria.errors.ModelError` for a pass that gives something else each time: a program would keep
    what was drawn when it was made, and pass beside torch, which errs as much then. ``again`` makes ``exact`` anew."""
    if torch_errs > _SUSPECT and distance(again(), exact) > _SUSPECT:
        raise ModelError(f"program: the forward pass draws numbers; {DRAWN}, or train this model with torch")


def _moving(
    trained: Mapping[str, Tensor], seen: Mapping[str, Tensor], slopes: dict[str, Tensor], feed: Mapping[str, Array]
) -> dict[str, Array]:
    """What taps and gradients are, and how they move along with the weights and slopes, by differentiating more often:
    the derivative of (gradient times u) along a way is linear in u, and its gradient by u is what is asked for."""
    kind = next(iter(slopes.values())).dtype
    learned = {key: p for key, p in trained.items() if along(f"weight/{key}") in feed}
    points = [*learned.values(), *(slope.requires_grad_() for slope in slopes.values())]
    names = [*(f"weight/{key}" for key in learned), *(f"slope/{tap}" for tap in slopes)]
    ways = [torch.from_numpy(feed[along(name)]).to(kind) for name in names]
    gradients = torch.autograd.grad(
        [seen[tap] for tap in slopes], list(learned.values()), list(slopes.values()), create_graph=True
    )
    values = {f"tap/{tap}": seen[tap] for tap in slopes} | {
        f"gradient/{key}": slope for key, slope in zip(learned, gradients, strict=True)
    }
    duals = {name: torch.zeros_like(value).requires_grad_() for name, value in values.items()}
    product = torch.stack([(values[name] * dual).sum() for name, dual in duals.items()]).sum()
    bent = torch.autograd.grad(product, points, create_graph=True, allow_unused=True)
    turned = torch.stack([(b * way).sum() for b, way in zip(bent, ways, strict=True) if b is not None]).sum()
    moved = torch.autograd.grad(turned, list(duals.values()))
    found = {name: value.detach() for name, value in values.items()}
    return to_arrays(found | {along(name): way for name, way in zip(duals, moved, strict=True)})


def _given(
    module: Module, only: Collection[str] | None, feed: Mapping[str, Array], dtype: torch.dtype
) -> tuple[Module, dict[str, Tensor]]:
    """A copy of ``module`` in ``dtype`` with the weights of ``feed`` and its draws for dropout, and what is trained."""
    own = clone(module).to(dtype)
    before = state_of(own)
    load(own, {key: feed.get(f"weight/{key}", value) for key, value in before.items()})
    trained = loop.freeze_but(own, only)
    for name, layer in own.named_modules():
        if f"draw/{name}" in feed:
            draws = _calls(name, feed, dtype)
            attends = isinstance(layer, MultiheadAttention)
            # in place of its own pass: one with inplace=True would change what a hook is given
            layer.forward = _without(layer, draws) if attends else partial(_times, draws)
        between = [_calls(place, feed, dtype) for place in recurrent.places(layer, name) if f"draw/{place}" in feed]
        if between and isinstance(layer, RNNBase):
            layer.forward = recurrent.dropping(layer, _among(between))
    return own, trained


def _calls(place: str, feed: Mapping[str, Array], dtype: torch.dtype) -> Iterator[Tensor]:
    """The draws at a ``place`` of a layer, call by call, in each pass again."""
    names = (name for name in feed if name == f"draw/{place}" or name.startswith(f"draw/{place}#"))
    return cycle([torch.from_numpy(feed[name]).to(dtype) for name in names])


class _In(TorchFunctionMode):
    """What a forward pass makes of its own, such as zeros to begin with, is made in ``dtype`` where it is float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.to(self.dtype) if isinstance(found, Tensor) and found.dtype == torch.float32 else found


def _without(layer: Module, draws: Iterator[Tensor]) -> Callable[..., object]:
    def drop(share: Tensor) -> Tensor:
        draw = next(draws)
        draw = draw if draw.dim() == share.dim() else draw.flatten(0, 1)
        return share * draw[:, : share.shape[1]]

    return attention.dropping(cast(MultiheadAttention, layer), drop)


def _among(draws: Sequence[Iterator[Tensor]]) -> Callable[[int, Tensor], Tensor]:
    def factors(number: int, states: Tensor) -> Tensor:
        draw = next(draws[number])
        return draw if draw.dim() == states.dim() else draw.reshape(states.shape)

    return factors


def _times(draws: Iterator[Tensor], input: Tensor) -> Tensor:
    return input * _beside(next(draws), input)


def _beside(draw: Tensor, x: Tensor) -> Tensor:
    """A draw for each sample, channel or value, so that it multiplies ``x``, in which the batch may be merged."""
    if draw.numel() == x.numel():
        return draw.reshape(x.shape)
    draw = draw if len(draw) == len(x) else draw.flatten(0, 1)
    return draw.reshape(*draw.shape, *(1 for _ in range(x.dim() - draw.dim())))


def _running(module: Module) -> set[str]:
    """The names of the BatchNorm layers that will have been called."""
    found = set[str]()
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(lambda *_, name=name: found.add(name))
    return found


def _follows(
    module: Module, key: str, trained: Collection[str], before: Mapping[str, Tensor], ran: Collection[str]
) -> bool:
    """Whether a step writes this tensor: what is trained, statistics of BatchNorm that was called in train mode, and
    other buffers that have changed; a table of numbers, such as positions, stays."""
    if key in trained:
        return True
    layer, _, name = key.rpartition(".")
    owner = module.get_submodule(layer)
    if not owner.training or key not in before:
        return False
    return layer in ran or not torch.equal(before[key], owner.get_buffer(name))
