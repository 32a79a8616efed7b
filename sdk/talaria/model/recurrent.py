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
from torch.nn.utils.rnn import PackedSequence

from talaria.model.masks import Axis

GATES: dict[type[Module], int] = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
"""How many times a unit stands in the rows of a weight."""
RUNS: dict[str, Callable[..., Any]] = {
    "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm,
}  # fmt: skip
"""Torch's function of one layer, by the layer's mode."""


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
        self.units = nn.Linear(own.input_size, own.hidden_size)
        for name in _SAID:  # which the network's own forward may read
            setattr(self, name, getattr(own, name))
        self.several = own.num_layers * (2 if own.bidirectional else 1)

    def forward(self, x: Any, hx: Any = None) -> tuple[Any, Any]:
        """``(states, last)``, as the layer's own; every first state enters every moment."""
        states: Any
        if isinstance(x, PackedSequence):
            data = self.units(x.data)
            last, states = data[: int(x.batch_sizes[0])], PackedSequence(self._beside(data), *x[1:])
        else:
            time = 1 if self.batch_first and x.dim() == 3 else 0
            data = self.units(x)
            for first in () if hx is None else hx if isinstance(hx, tuple) else (hx,):
                for one in first:
                    data = data + one.unsqueeze(time)
            last, states = data.select(time, -1), self._beside(data)
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
    where torch would draw some of its own. What is no plain batch stays torch's."""

    def forward(x: Any, hx: Any = None) -> Any:
        if not layer.training or not isinstance(x, Tensor) or x.dim() != 3 or layer.proj_size:
            return type(layer).forward(layer, x, hx)
        long, directions, ends = layer.mode == "LSTM", 2 if layer.bidirectional else 1, list[list[Tensor]]()
        if hx is None:
            batch = x.shape[0 if layer.batch_first else 1]
            zeros = x.new_zeros(layer.num_layers * directions, batch, layer.hidden_size)
            hx = (zeros, zeros) if long else zeros
        for number in range(layer.num_layers):
            x = x * factors(number - 1, x) if number else x
            here = slice(number * directions, (number + 1) * directions)  # of each direction
            own: list[Tensor] = [getattr(layer, name) for each in layer._all_weights[here] for name in each]
            run, begin = RUNS[layer.mode], tuple(one[here] for one in hx) if long else hx[here]
            x, *last = run(x, begin, own, layer.bias, 1, 0.0, True, layer.bidirectional, layer.batch_first)
            ends.append(last)
        joined = tuple(torch.cat(one) for one in zip(*ends, strict=True))
        return x, joined if long else joined[0]

    return forward
