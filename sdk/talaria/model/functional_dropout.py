"""Dropout that a network calls as a function, as layers of it: both engines draw for a layer by its name, and a device
without torch has no other.

``F.dropout(x, p, training=self.training)`` in the pass of a module becomes the first of its layers ``dropout_call_0``,
``dropout_call_1``, ... in the order of the calls, and so do the weights of ``F.scaled_dot_product_attention`` that its
``dropout_p`` takes away. A layer of dropout that one pass calls several times, such as a ``self.drop`` behind two
layers, is called so too: each of its calls becomes a layer. What torch's own modules call inside stays as it is.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from itertools import count
from math import inf, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from talaria import seeds
from talaria.errors import ModelError
from talaria.model import attention
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS

KINDS: Mapping[Callable[..., Any], type[Module]] = {
    F.dropout: nn.Dropout,
    torch.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
}
"""The layer that does what a function does."""
NAME = "dropout_call_{}"
_PASSED = frozenset({__name__, "torch.overrides", "torch.nn.functional"})

Call = tuple[type[Module], float]
"""The kind of a layer, and the share that falls away."""


@dataclass(frozen=True)
class Calls:
    """What is to become layers: by the path of a module the calls of its own pass, and the names of the layers that
    are called so several times."""

    made: Mapping[str, Sequence[Call]]
    several: Sequence[str] = ()


class OfCalls(Module):
    """In the place of a layer of dropout that a pass calls several times: each call is one of the pass's own."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.p, self._function = float(own.p), next(one for one, kind in KINDS.items() if kind is type(own))
        self.train(own.training)

    def forward(self, input: Tensor) -> Tensor:
        """What dropout leaves of ``input``."""
        left: Tensor = self._function(input, self.p, self.training)
        return left


def calls_of(module: Module, example: Tensor, what: str) -> Calls:
    """The calls that a pass of ``example`` makes. ``module`` stays as it is, and torch's global generator too.

    Raises :class:`ModelError`, beginning with ``what``, for a call that drops outside of training too.
    """
    several = _several(module, example)
    module = _opened(clone(module), several)
    always = _seen(module, example, training=False)
    for path, calls in always.items():
        if any(share > 0 for _, share in calls):
            raise ModelError(
                f"{what}: {path or 'it'} drops values when it is evaluated too, so that no two answers agree; write "
                "F.dropout(x, p, training=self.training)"
            )
    return Calls(_seen(module, example, training=True), several)


def as_layers(module: Module, found: Calls) -> Module:
    """``module``, in which the calls ``found`` have become layers."""
    module = _opened(module, found.several)
    for path, calls in found.made.items():
        own: Any = module.get_submodule(path)
        for place, (kind, share) in enumerate(calls):
            own.add_module(NAME.format(place), kind(share).train(own.training))
        own.__class__ = _rerouted(own.__class__)
    return module


@lru_cache(maxsize=256)
def _rerouted(kind: Any) -> Any:
    """The kind of a module whose pass in training calls layers where that of ``kind`` calls functions."""

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **named)
        with _Calls(partial(_call, self, count())):
            return kind.forward(self, *args, **named)

    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__")}
    return type(kind.__name__, (kind,), {"forward": forward, **same})


def _call(own: Module, number: Iterator[int], kind: type[Module], share: float, x: Tensor, training: bool) -> Any:
    """The layer of the next call; of a call that no pass had made before, what torch does."""
    layer = getattr(own, NAME.format(next(number)), None)
    if type(layer) is kind and training:
        return layer(x)
    return kind(share).train(training)(x)


def _opened(module: Module, several: Sequence[str]) -> Module:
    """``module``, in which these layers are :class:`OfCalls`."""
    for name in several:
        module.set_submodule(name, OfCalls(module.get_submodule(name)))
    return module


def _several(module: Module, example: Tensor) -> list[str]:
    """The names of the layers of dropout that one run of a module's own pass calls several times, or several modules'
    passes call."""
    twin, callers, found = clone(module).train(), defaultdict[Module, set[str]](set), set[Module]()
    running = [("", Counter[Module]())]

    def count(one: Module, *_: object) -> None:
        path, calls = running[-1]
        calls[one] += 1
        callers[one].add(path)
        if float(cast(Any, one).p) > 0 and (calls[one] > 1 or len(callers[one]) > 1):
            found.add(one)

    for path, one in twin.named_modules():
        if type(one) in KINDS.values():
            one.register_forward_pre_hook(count)
        elif path and not type(one).__module__.startswith("torch.nn."):
            one.register_forward_pre_hook(lambda *_, path=path: running.append((path, Counter())))
            one.register_forward_hook(lambda *_: running.pop() and None)
    with torch.no_grad(), seeds.aside():
        try:
            twin(example)
        except TRACE_ERRORS:  # who cannot be called so is told by those who call it next
            return []
    return [name for name, one in twin.named_modules(remove_duplicate=False) if one in found]


def _seen(module: Module, example: Tensor, training: bool) -> Mapping[str, Sequence[Call]]:
    """The calls that drop, by the innermost module that is no part of torch; of one that is called again the first
    time counts."""
    twin, found = clone(module).train(training), dict[str, Sequence[Call]]()
    running = [("", list[Call]())]
    for path, one in twin.named_modules():
        if path and type(one) is not OfCalls and not type(one).__module__.startswith("torch.nn."):
            one.register_forward_pre_hook(lambda *_, path=path: running.append((path, [])))
            one.register_forward_hook(lambda *_: _ended(*running.pop(), found))

    def note(kind: type[Module], share: float, x: Tensor, training: bool) -> Tensor:
        if training:
            running[-1][1].append((kind, share))
        return x

    with torch.no_grad(), seeds.aside(), _Calls(note):
        try:
            twin(example)
        except TRACE_ERRORS:  # who cannot be called so is told by those who call it next
            return {}
    _ended(*running.pop(), found)
    return found


def _ended(path: str, calls: Sequence[Call], found: dict[str, Sequence[Call]]) -> None:
    if calls:
        found.setdefault(path, calls)


class _Calls(TorchFunctionMode):
    """Inside this context ``do(kind, share, x, training)`` takes the place of calls of dropout."""

    def __init__(self, do: Callable[[type[Module], float, Tensor, bool], Any]) -> None:
        super().__init__()
        self._do = do

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func)
        attends = func is F.scaled_dot_product_attention
        if (kind is None and not attends) or _of_torch():
            return func(*args, **(kwargs or {}))
        if kind is None:
            return _attended(self._do, *args, **(kwargs or {}))
        return self._do(kind, *_given(*args, **(kwargs or {})))


def _attended(
    do: Callable[[type[Module], float, Tensor, bool], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    """Attention by plain products, whose weights are at hand where some of them fall away."""
    if not dropout_p or more.get("enable_gqa"):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    scale = more.get("scale") or 1 / sqrt(query.shape[-1])
    met = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None:
        bool_mask = attn_mask.dtype == torch.bool
        met = met.masked_fill(attn_mask.logical_not(), -inf) if bool_mask else met + attn_mask
    share = torch.softmax(met, -1) if attn_mask is None or is_causal else attention.seen(met)
    return do(nn.Dropout, dropout_p, share, True) @ value


def _given(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[float, Tensor, bool]:
    return p, input, training if train is None else train


def _of_torch() -> bool:
    """Whether one of torch's own modules is calling."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in _PASSED and frame.f_back is not None:
        if frame.f_code is OfCalls.forward.__code__:
            return False
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("torch.nn.modules")
