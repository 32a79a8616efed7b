"""What dropout draws in torch: the numbers that every engine draws, by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Dropout1d, Dropout2d, Dropout3d, Module, MultiheadAttention, RNNBase

from talaria.model import attention, recurrent
from talaria.model.packing import told
from talaria.model.state import tensor_of
from talaria.seeds import ALONE, Draws
from talaria.training.batching import kept, layer_draws
from talaria.training.interface import Task

_OF_CHANNELS = (Dropout1d, Dropout2d, Dropout3d)


class LayerDraws:
    """Inside this context the dropout layers of the task's module, attention that drops weights, and recurrent
    layers between theirs, draw what :func:`talaria.training.batching.kept` gives, each place from a stream of its own,
    which goes on where it stopped.

    What else draws at random (a function's own dropout, say) does so from torch's global generator, which is seeded for
    one purpose here, goes on in the same way, and is outside as it was.
    """

    def __init__(self, task: Task, purpose: str) -> None:
        named = list(task.model.named_modules())
        self._places = {name: [name] if draws(layer) else recurrent.places(layer, name) for name, layer in named}
        self._layers = {name: layer for name, layer in named if self._places[name]}
        self._model, self._walks = task.model, any(isinstance(one, RNNBase) for one in self._layers.values())
        self._streams = {at: layer_draws(task, purpose, at) for name in self._layers for at in self._places[name]}
        self._rest = torch.Generator().manual_seed(int(task.draws(f"{purpose}/layers").words(1)[0]) >> 1).get_state()

    def copy(self) -> LayerDraws:
        """The same draws once more, from where these stand."""
        again = object.__new__(LayerDraws)
        again._places, again._layers, again._rest = self._places, self._layers, self._rest
        again._model, again._walks = self._model, self._walks
        again._streams = {name: stream.copy() for name, stream in self._streams.items()}
        return again

    def __enter__(self) -> None:
        ALONE.acquire()
        self._packing = told(self._model) if self._walks else nullcontext()
        self._packing.__enter__()
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._rest)
        for name, layer in self._layers.items():
            layer.forward = _drawn(layer, [self._streams[at] for at in self._places[name]])

    def __exit__(self, *_: object) -> None:
        self._packing.__exit__(None, None, None)
        for layer in self._layers.values():
            del layer.forward
        self._rest = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        ALONE.release()


def draws(layer: Module) -> bool:
    """Whether a layer lets values fall away; recurrent ones do at places of their own."""
    if isinstance(layer, MultiheadAttention):
        return layer.dropout > 0 and attention.prunable(layer)
    return isinstance(layer, (Dropout, *_OF_CHANNELS)) or type(layer).__name__ == "StochasticDepth"


def _drawn(layer: Module, streams: Sequence[Draws]) -> Callable[..., Any]:
    if isinstance(layer, RNNBase):
        share = float(layer.dropout)
        return recurrent.dropping(layer, lambda n, x: tensor_of(kept(streams[n], share, *x.shape)).to(x.device))
    (stream,) = streams
    if isinstance(layer, MultiheadAttention):
        return attention.dropping(layer, _weights_of(layer, stream))

    def forward(input: Tensor) -> Tensor:
        x = input
        if not layer.training:
            return x
        factors = tensor_of(kept(stream, float(layer.p), *_shape(layer, x)))  # type: ignore[arg-type]  # its share
        return x * factors.to(x.device).reshape(*factors.shape, *(1 for _ in range(x.dim() - factors.dim())))

    return forward


def _weights_of(layer: MultiheadAttention, stream: Draws) -> attention.Drop:
    """Draws for all heads that there were, whichever a mask has left: those that are left take the first ones."""

    def drop(share: Tensor) -> Tensor:
        *batch, heads, queries, keys = share.shape
        factors = kept(stream, float(layer.dropout), *batch, attention.heads_of(layer), queries, keys)
        return share * tensor_of(factors).to(share.device)[..., :heads, :, :]

    return drop


def _shape(layer: Module, x: Tensor) -> tuple[int, ...]:
    """For which parts of ``x`` (N, ...) is drawn: values, channels, samples, or the batch."""
    if isinstance(layer, Dropout):
        return tuple(x.shape)
    if isinstance(layer, _OF_CHANNELS):
        return tuple(x.shape[:2])
    return tuple(x.shape[:1]) if getattr(layer, "mode", "row") == "row" else (1,)
