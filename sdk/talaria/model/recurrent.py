"""GRU, LSTM and RNN as the survey sees them: a hidden unit is one channel, in all gates, layers and directions.

A layer of torch's has one hidden size, so a unit goes from all of its layers and both directions at once. With its rows
and biases at zero a unit stays at zero: tanh(0) is 0, and what a state begins with is 0 unless the network says
otherwise, which measuring shows.

Between their layers values may fall away: what is drawn there is named and given, as that of any dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, RNNBase
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from talaria import seeds
from talaria.model.masks import Axis
from talaria.model.packing import MOMENTS, RUNS, Padded

GATES: dict[type[Module], int] = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
"""How many times a unit stands in the rows of a weight."""


def prunable(layer: Module) -> bool:
    """Whether ``layer`` is torch's own, with plain weights and no projection behind its states."""
    if type(layer) not in GATES or not isinstance(layer, RNNBase) or layer.proj_size:
        return False
    return {*layer.state_dict()} == {*layer._flat_weights_names}


_SAID = ("mode", "input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")


class StandIn(Module):
    """What couples the channels as a recurrent layer does, in operators that tracing follows: one linear layer."""

    def __init__(self, own: RNNBase) -> None:
        super().__init__()
        with seeds.aside():
            self.units = nn.Linear(own.input_size, own.hidden_size)
        for name in _SAID:  # which the network's own forward may read
            setattr(self, name, getattr(own, name))
        self.several = own.num_layers * (2 if own.bidirectional else 1)

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """``(states, last)``, as the layer's own; every first state enters every moment."""
        x, first_is = input, bool(self.batch_first)
        time = 1 if first_is and (isinstance(x, Padded) or x.dim() == 3) else 0
        data = self.units(x.ordered(first_is) if isinstance(x, Padded) else x)
        for first in () if hx is None else hx if isinstance(hx, tuple) else (hx,):
            for one in first:
                data = data + one.unsqueeze(time)
        last, beside = data.select(time, -1), self._beside(data)
        states = Padded(beside, x.lengths, first_is) if isinstance(x, Padded) else beside
        ends = torch.stack([last] * self.several)
        return states, (ends, ends) if self.mode == "LSTM" else ends

    def _beside(self, data: Tensor) -> Tensor:
        return torch.cat([data, data], -1) if self.bidirectional else data


def axes_of(name: str, layer: RNNBase, rows: Axis, columns: Axis) -> dict[str, tuple[Axis, ...]]:
    """The axes of the layer's tensors, where ``rows`` rule its units and ``columns`` what it reads."""
    gates = rows * GATES[type(layer)]
    out: dict[str, tuple[Axis, ...]] = {}
    for key in layer._flat_weights_names:
        read = rows if key.startswith("weight_hh") else rows * (2 if layer.bidirectional else 1)
        if key.startswith("weight_ih_l0"):
            read = columns
        axes = (gates, read) if key.startswith("weight") else (gates,)
        if any(axes):
            out[f"{name}.{key}" if name else key] = axes
    return out


def resize(layer: RNNBase) -> None:
    """Makes the layer's own record of its sizes agree with its tensors."""
    sizes = (layer.get_parameter(f"weight_{kind}_l0").shape[1] for kind in ("hh", "ih"))
    layer.hidden_size, layer.input_size = sizes


def places(layer: Module, name: str) -> list[str]:
    """The names of the places between the layers of a recurrent layer called ``name`` where values fall away in train
    mode, ``<name>.l0`` behind the first; none of any other module."""
    if type(layer) not in GATES or not isinstance(layer, RNNBase) or not layer.dropout:
        return []
    return [f"{name}.l{number}" for number in range(layer.num_layers - 1)]


def dropping(layer: RNNBase, factors: Callable[[int, Tensor], Tensor]) -> Callable[..., Any]:
    """The layer's pass in train mode with ``factors(number, states)`` on the states behind its layer of that number,
    where torch would draw some of its own: for all moments of a packed sequence that keeps how many there are
    (:func:`talaria.model.packing.told`). What is no batch stays torch's."""

    def forward(input: Any, hx: Any = None) -> Any:
        x, packed = input, isinstance(input, PackedSequence)
        if not layer.training or not (packed or x.dim() == 3) or layer.proj_size:
            return type(layer).forward(layer, x, hx)
        order = x.sorted_indices if packed else None
        long, directions, ends = layer.mode == "LSTM", 2 if layer.bidirectional else 1, list[list[Tensor]]()
        if hx is None:
            batch = int(x.batch_sizes[0]) if packed else x.shape[0 if layer.batch_first else 1]
            zeros = (x.data if packed else x).new_zeros(layer.num_layers * directions, batch, layer.hidden_size)
            hx = (zeros, zeros) if long else zeros
        elif order is not None:
            hx = tuple(one[:, order] for one in hx) if long else hx[:, order]
        data, more = (x.data, (x.batch_sizes,)) if packed else (x, ())
        for number in range(layer.num_layers):
            if number:
                data = data * (_packed_as(x, data, layer, factors, number) if packed else factors(number - 1, data))
            here = slice(number * directions, (number + 1) * directions)  # of each direction
            own: list[Tensor] = [getattr(layer, name) for each in layer._all_weights[here] for name in each]
            run, begin = RUNS[layer.mode], tuple(one[here] for one in hx) if long else hx[here]
            rest = () if packed else (layer.batch_first,)
            data, *last = run(data, *more, begin, own, layer.bias, 1, 0.0, True, layer.bidirectional, *rest)
            ends.append(last)
        joined = tuple(torch.cat(one) for one in zip(*ends, strict=True))
        if not packed:
            return data, joined if long else joined[0]
        if order is not None:
            joined = tuple(one[:, x.unsorted_indices] for one in joined)
        return PackedSequence(data, *x[1:]), joined if long else joined[0]

    return forward


def _packed_as(
    x: PackedSequence, data: Tensor, layer: RNNBase, factors: Callable[[int, Tensor], Tensor], number: int
) -> Tensor:
    """The factors of all moments, packed as ``x`` is."""
    many, longest = int(x.batch_sizes[0]), len(x.batch_sizes)
    whole = getattr(x, MOMENTS, longest)
    shape = (many, whole) if layer.batch_first else (whole, many)
    drawn = factors(number - 1, data.new_empty(*shape, data.shape[1]))
    drawn = drawn if layer.batch_first else drawn.transpose(0, 1)
    drawn = drawn[:, :longest] if x.sorted_indices is None else drawn[x.sorted_indices, :longest]
    lengths = (x.batch_sizes > torch.arange(many)[:, None]).sum(1)
    return pack_padded_sequence(drawn, lengths, batch_first=True).data
