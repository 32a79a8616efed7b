"""GRU and LSTM in one direction, unrolled over the length of their sequence, layer on layer.

Values that all moments share are (moments x batch, channels) here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch.nn import LSTM, Module, RNNBase

from talaria.model.inside import base_of
from talaria.programs.layers import cells
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.matrices import Matrices
from talaria.programs.layers.sequence import closed, opened

LONGEST = 256
"""Moments up to which a layer is unrolled: each takes about thirty operators."""


def sequences(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The states of the last layer at every moment: ``layer(x)[0]``."""
    states, back = _stack(step, layer, module, given)
    draft, moments = step.draft, len(states)
    out = Map("", layer, (), (moments,))
    stacked = cells.by_moments(draft, draft.op("Concat", *states, axis=0), moments)
    y = out.like(closed(step, draft.transpose(stacked, 1, 0, 2), out))

    def pull(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        turned = draft.transpose(opened(step, g, out), 1, 0, 2)
        return back([draft.op("Gather", turned, draft.constant(t, "int64"), axis=0) for t in range(moments)], wanted)

    return y, pull


def final(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The last layer's state after the last moment: ``layer(x)[0][:, -1]``, ``layer(x)[1][-1]`` of a GRU, and
    ``layer(x)[1][0][-1]`` of an LSTM."""
    states, back = _stack(step, layer, module, given)
    none = [None] * (len(states) - 1)
    return Map(states[-1], layer), lambda g, wanted: back([*none, g], wanted)


def _stack(
    step: Step, layer: str, module: Module, given: Sequence[Map]
) -> tuple[list[str], Callable[[Sequence[str | None], Sequence[bool]], Sequence[str | None]]]:
    """The states of the last layer, and the way back through all layers."""
    own, draft, (x,) = cast(RNNBase, base_of(module)), step.draft, given
    _known(layer, own, x)
    cell = cells.lstm if isinstance(own, LSTM) else cells.gru
    (moments,), weights = x.lead, Matrices(step, layer, module)
    turned = draft.transpose(opened(step, x.value, x), 1, 0, 2)
    below, states, ways = closed(step, turned, x), list[str](), list[cells.Way]()
    for number in range(own.num_layers):
        wide = x.channels if number == 0 else layer
        states, way = cell(weights, number, below, wide, moments)
        ways.append(way)
        below = draft.op("Concat", *states, axis=0)

    def back(slopes: Sequence[str | None], wanted: Sequence[bool]) -> Sequence[str | None]:
        flat = ""
        for number in reversed(range(len(ways))):
            flat = ways[number](slopes, number > 0 or wanted[0])
            if number:
                apart = cells.by_moments(draft, flat, moments)
                slopes = [draft.op("Gather", apart, draft.constant(t, "int64"), axis=0) for t in range(moments)]
        if not wanted[0]:
            return [None]
        if isinstance(x.channels, int):
            apart = draft.reshape(flat, moments, -1, x.channels)
        else:
            apart = draft.reshape(draft.op("Unsqueeze", flat, draft.ints(1)), moments, -1, 0)
        return [closed(step, draft.transpose(apart, 1, 0, 2), x)]

    return states, back


def _known(layer: str, own: RNNBase, x: Map) -> None:
    if not own.batch_first or len(x.lead) != 1:
        raise refused(layer, "reads sequences in another order", "use batch_first=True, and (batch, length, width)")
    if own.proj_size:
        raise refused(layer, f"has proj_size={own.proj_size}", "leave it out, and use Linear behind it")
    if own.bidirectional:
        raise refused(layer, "is bidirectional", "use one direction, or a second layer")
    if own.training and own.dropout and own.num_layers > 1:
        raise refused(layer, f"has dropout={own.dropout}", "use layers of their own with Dropout between them")
    if x.lead[0] > LONGEST:
        raise refused(layer, f"runs over {x.lead[0]} moments, at most {LONGEST}", "shorten the sequence before it")
