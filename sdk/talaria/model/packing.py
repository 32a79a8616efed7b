"""Sequences that torch packs by their lengths, as whole ones beside these: who follows a pass, or writes it as a graph,
knows no other form.

Beyond its length a sample is not walked. What stands there is 0, and its last states are those at its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.nn.utils import rnn

from talaria.seeds import ALONE

RUNS: dict[str, Callable[..., Any]] = {
    "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm,
}  # fmt: skip
"""Torch's function of one layer, by the layer's mode."""
FAR = 100.0
"""A sigmoid of this is 1 in float32, and of as much below zero nothing beside what it is added to."""


@dataclass(frozen=True)
class Padded:
    """What stands for a packed sequence: ``whole`` (batch, length, width), or (length, batch, width) unless the batch
    is ``first``, and ``lengths`` (batch,)."""

    whole: Any
    lengths: Any
    first: bool

    def ordered(self, first: bool) -> Any:
        """The whole sequence with the batch first, or second."""
        return self.whole if self.first == first else self.whole.transpose(0, 1)


def pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Padded:
    """As torch's ``pack_padded_sequence``, of samples in any order."""
    return Padded(input, lengths, batch_first)


def pad(sequence: Padded, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None) -> Any:
    """As torch's ``pad_packed_sequence`` with the whole length: what lies beyond a sample's own is 0."""
    return sequence.ordered(batch_first), sequence.lengths


@contextmanager
def replaced(module: Module, by: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """In this context functions, such as those of ``torch.nn.utils.rnn``, are others wherever the passes of ``module``
    find them: there, and under any name in the files of Python that these stand in. Other threads call them as ever."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    own = [getattr(vars(kind).get("forward"), "__globals__", None) for kind in kinds]
    spaces = {id(space): space for space in [vars(rnn), *own] if space is not None}.values()
    others = {id(one): other for one, other in by.items()}
    with ALONE:
        found = [(space, name, one) for space in spaces for name, one in space.items() if id(one) in others]
        for space, name, one in found:
            space[name] = _here(others[id(one)], one)
        try:
            yield
        finally:
            for space, name, one in found:
                space[name] = one


def _here(other: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    here = get_ident()

    def called(*args: Any, **named: Any) -> Any:
        return other(*args, **named) if get_ident() == here else plain(*args, **named)

    return called


MOMENTS = "moments"
"""Under which name a packed sequence keeps how many moments it had."""


def told(module: Module) -> AbstractContextManager[None]:
    """In this context sequences that a pass of ``module`` packs keep how many moments they had."""

    def keeping(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
        found = _PACK(input, lengths, batch_first, enforce_sorted)
        setattr(found, MOMENTS, input.shape[1 if batch_first else 0])
        return found

    return replaced(module, {_PACK: keeping})


_PACK = rnn.pack_padded_sequence


@contextmanager
def unpacked(module: Module) -> Iterator[None]:
    """In this context a pass of ``module`` packs nothing, and its recurrent layers walk whole sequences beside their
    lengths by operators that a graph has."""
    layers = [one for one in module.modules() if isinstance(one, RNNBase)]
    for layer in layers:
        layer.forward = _walking(layer)
    try:
        with replaced(module, {rnn.pack_padded_sequence: pack, rnn.pad_packed_sequence: pad}):
            yield
    finally:
        for layer in layers:
            del layer.forward


def _walking(layer: RNNBase) -> Callable[..., Any]:
    plain = layer.forward

    def forward(input: Any, hx: Any = None) -> Any:
        return walked(layer, input, hx) if isinstance(input, Padded) else plain(input, hx)

    return forward


def walked(layer: RNNBase, given: Padded, hx: Any = None) -> tuple[Padded, Any]:
    """What ``layer`` gives of whole sequences and their lengths, in eval mode: its states and the last ones."""
    x, lengths, long = given.ordered(True), given.lengths.to(torch.int64), layer.mode == "LSTM"
    ways = 2 if layer.bidirectional else 1
    if hx is None:
        zeros = x.new_zeros(layer.num_layers * ways, x.shape[0], layer.hidden_size)
        hx = (zeros, zeros) if long else zeros
    begin = hx if long else (hx,)
    places = torch.arange(x.shape[1])
    over = places >= lengths[:, None]
    turned = torch.where(over, places, lengths[:, None] - 1 - places)
    ends = list[tuple[Tensor, ...]]()
    for number in range(layer.num_layers):
        sides = list[Tensor]()
        for way in range(ways):
            at = number * ways + way
            own: list[Tensor] = [getattr(layer, name) for name in layer._all_weights[at]]
            read, first = _at(x, turned) if way else x, tuple(one[at : at + 1] for one in begin)
            if long:  # whose cells torch gives at the end alone
                read, own[0] = torch.cat([read, over[:, :, None].to(x.dtype)], 2), _keeping(own[0])
            out, *last = RUNS[layer.mode](
                read, first if long else first[0], own, layer.bias, 1, 0.0, False, False, True
            )
            at_end = _at(out, lengths[:, None] - 1)[:, 0]
            ends.append((at_end, *(one[0] for one in last[1:])))
            sides.append(_at(out, turned) if way else out)
        x = torch.cat(sides, 2)
    states = torch.where(over[:, :, None], torch.zeros((), dtype=x.dtype), x)
    joined = tuple(torch.stack(one) for one in zip(*ends, strict=True))
    return Padded(states, lengths, True), joined if long else joined[0]


def _at(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))


def _keeping(weight: Tensor) -> Tensor:
    """The weight of an LSTM's inputs with one more: where that is 1, the cells stay as they are."""
    unit = weight.new_full((weight.shape[0] // 4, 1), FAR)
    return torch.cat([weight, torch.cat([-unit, unit, unit * 0, unit * 0])], 1)
