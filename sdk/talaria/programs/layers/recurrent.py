"""RNN, GRU and LSTM in one direction or both, unrolled over the length of their sequence, layer on layer.

Values that all moments share are (moments x batch, channels) here; those of both directions stand side by side, the
forward one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

from torch.nn import GRU, LSTM, RNN, Module, RNNBase

from talaria.model.inside import base_of
from talaria.model.recurrent import places
from talaria.programs.graph import Size, added
from talaria.programs.layers import cells
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.matrices import Matrices
from talaria.programs.layers.sequence import closed, opened

LONGEST = 256
"""Moments up to which a layer is unrolled: each takes about thirty operators."""
CELLS = {RNN: cells.rnn, GRU: cells.gru, LSTM: cells.lstm}
"""What a layer of each kind does."""
Form = Literal["all", "last", "ends"]
"""What of the last layer's states is read: ``layer(x)[0]``, all; ``layer(x)[0][:, -1]``, those at the last moment; or
the end of each direction, ``layer(x)[1]`` of a GRU or an RNN and ``layer(x)[1][0]`` of an LSTM."""
Slopes = list[str | None]
"""By moment, the gradients of one direction's states."""


def states(step: Step, layer: str, module: Module, given: Sequence[Map], form: Form) -> tuple[Map, Pullback]:
    """The last layer's states in a ``form``: (batch, moments, channels), or (batch, channels) of one moment."""
    own, draft, (x,) = cast(RNNBase, base_of(module)), step.draft, given
    _known(layer, own, x)
    (moments,), weights = x.lead, Matrices(step, layer, module)
    below, wide = closed(step, draft.transpose(opened(step, x.value, x), 1, 0, 2), x), x.channels
    layers, between = list[_Layer](), places(own, weights.place) if own.training else []
    draws = [_draw(step, place, moments, added([layer] * (1 + own.bidirectional))) for place in between]
    for number in range(own.num_layers):
        short = form == "last" and number == own.num_layers - 1
        layers.append(_layer(weights, number, below, wide, moments, short))
        below, wide = layers[-1].whole, added([layer] * len(layers[-1].ways))
        below = draft.op("Mul", below, draws[number]) if number < len(draws) else below
    top = layers[-1]

    def back(slopes: list[Slopes], wanted: bool) -> Sequence[str | None]:
        flat = ""
        for number, one in reversed(list(enumerate(layers))):
            flat = one.back(slopes, number > 0 or wanted)
            flat = draft.op("Mul", flat, draws[number - 1]) if number and draws else flat
            if number:
                slopes = layers[number - 1].apart(cells.by_moments(draft, flat, moments))
        if not wanted:
            return [None]
        if isinstance(x.channels, int):
            apart = draft.reshape(flat, moments, -1, x.channels)
        else:
            apart = cells.by_moments(draft, flat, moments)
        return [closed(step, draft.transpose(apart, 1, 0, 2), x)]

    if form == "all":
        out = Map("", wide, (), (moments,))
        y = out.like(closed(step, draft.transpose(cells.by_moments(draft, below, moments), 1, 0, 2), out))
        return y, lambda g, wanted: back(top.apart(draft.transpose(opened(step, g, out), 1, 0, 2)), wanted[0])
    ends = [-1, 0 if form == "ends" else -1][: len(top.ways)]
    found = [side[end] for side, end in zip(top.states, ends, strict=True)]
    y = Map(found[0] if len(found) == 1 else draft.op("Concat", *found, axis=1), wide)
    return y, lambda g, wanted: back(top.at(ends, g), wanted[0])


@dataclass(frozen=True)
class _Layer:
    """One layer: for each of its directions the states that it gives, of all moments or of the last ones, and the way
    back."""

    step: Step
    name: str
    moments: int
    states: list[list[str]]
    ways: list[cells.Way]

    @property
    def whole(self) -> str:
        """The states of all moments, (moments x batch, channels), as far as each direction has them."""
        draft = self.step.draft
        sides = [draft.op("Concat", *side, axis=0) for side in self.states if len(side) == self.moments]
        return sides[0] if len(sides) == 1 else draft.op("Concat", *sides, axis=1)

    def apart(self, slope: str) -> list[Slopes]:
        """The slope (moments, batch, channels) by direction and moment."""
        draft, places = self.step.draft, range(self.moments)
        return [
            [draft.op("Gather", side, draft.constant(moment, "int64"), axis=0) for moment in places]
            for side in self._sides(slope, 2)
        ]

    def at(self, ends: Sequence[int], slope: str) -> list[Slopes]:
        """The slope (batch, channels) of one state of each direction, likewise."""
        found: list[Slopes] = [[None] * len(side) for side in self.states]
        for side, end, own in zip(found, ends, self._sides(slope, 1), strict=True):
            side[end] = own
        return found

    def back(self, slopes: Sequence[Slopes], wanted: bool) -> str:
        """The slope of what the layer read, (moments x batch, channels); empty if unwanted."""
        draft, found = self.step.draft, list[str]()
        for way, own in zip(self.ways, slopes, strict=True):
            one, before = way(own, wanted), self.moments - len(own)
            if wanted and before:
                edges = draft.ints(before, 0, 0, 0, 0, 0)
                apart = draft.op("Pad", draft.op("Unsqueeze", one, draft.ints(0)), edges, draft.constant(0.0))
                one = draft.op("Flatten", apart, axis=2)
            found.append(one)
        return draft.total(found) if wanted else ""

    def _sides(self, value: str, axis: int) -> list[str]:
        """Each direction's channels of what stands side by side along ``axis``."""
        if len(self.ways) == 1:
            return [value]
        draft, wide = self.step.draft, self.step.extent(self.name)
        ends, at, by = (draft.ints(0), wide, draft.op("Add", wide, wide)), draft.ints(axis), draft.ints(1)
        return [draft.op("Slice", value, begin, end, at, by) for begin, end in pairwise(ends)]


def _layer(weights: Matrices, number: int, below: str, wide: Size, moments: int, short: bool) -> _Layer:
    """The layer of this ``number`` over ``below``; ``short``: of its states those at the last moment alone are read,
    where the way from the last moment to the first has no more than begun."""
    own, step = cast(RNNBase, base_of(weights.module)), weights.step
    cell, draft = CELLS[type(own)], step.draft
    runs = [cell(weights, f"l{number}", below, wide, moments)]
    if own.bidirectional:
        if short:
            at = draft.constant(moments - 1, "int64")
            below = draft.op("Gather", cells.by_moments(draft, below, moments), at, axis=0)
        runs.append(cell(weights, f"l{number}{cells.REVERSE}", below, wide, 1 if short else moments))
    return _Layer(step, weights.layer, moments, [side for side, _ in runs], [way for _, way in runs])


def _draw(step: Step, place: str, moments: int, wide: Size) -> str:
    """Draws for the states at a ``place``, (moments x batch, channels)."""
    given = step.drawn(place, (moments, wide), second=step.second)
    return step.draft.op("Flatten", step.draft.transpose(given, 1, 0, 2), axis=2)


def _known(layer: str, own: RNNBase, x: Map) -> None:
    if len(x.lead) != 1:
        raise refused(layer, "reads sequences of another form", "give it (batch, length, width)")
    if own.proj_size:
        raise refused(layer, f"has proj_size={own.proj_size}", "leave it out, and use Linear behind it")
    if x.lead[0] > LONGEST:
        raise refused(layer, f"runs over {x.lead[0]} moments, at most {LONGEST}", "shorten the sequence before it")
