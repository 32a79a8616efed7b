"""RNN, GRU and LSTM in one direction or both, unrolled over the length of their sequence, layer on layer, from zeros or
from what is given, each sample to the last moment or to its own.

Values that all moments share are (moments x batch, channels) here; those of both directions stand side by side, the
forward one first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from talaria.programs.layers.sequence import closed, filled, opened, sizes

LONGEST = 256
"""Moments up to which a layer is unrolled: each takes some fifteen operators."""
CELLS = {RNN: cells.rnn, GRU: cells.gru, LSTM: cells.lstm}
"""What a layer of each kind does."""
Form = Literal["all", "last", "ends", "lasts", "whole"]
"""What of the layer's states is read: ``layer(x)[0]``, all of its last layer; ``layer(x)[0][:, -1]``, those at the last
moment; the end of each direction, ``layer(x)[1]`` of a GRU or an RNN and ``layer(x)[1][0]`` of an LSTM; the last states
of all layers, and cells, as rows; or these behind all states, direction by direction."""
ROWS = ("lasts", "whole")
"""The forms of rows."""
Slopes = list[str | None]
"""By moment, the gradients of one direction's states."""


@dataclass(frozen=True)
class Asked:
    """How a layer is called: what of its states is read, whether it is given its first state, and cell, or these are
    zeros, and whether it is given each sample's length."""

    form: Form
    first: tuple[bool, ...] = ()
    lengths: bool = False


def states(step: Step, layer: str, module: Module, given: Sequence[Map], asked: Asked) -> tuple[Map, Pullback]:
    """The last layer's states in a ``form``: (batch, moments, channels), or (batch, channels) of one moment; where more
    is asked, (batch, rows, channels of one direction). ``given`` are the sequence, the first states that there are,
    (batch, layers x directions, channels) each, and the lengths."""
    own, draft, (x, *more), form = cast(RNNBase, base_of(module)), step.draft, given, asked.form
    _known(layer, own, x)
    (moments,), weights = x.lead, Matrices(step, layer, module)
    below, wide = closed(step, draft.transpose(opened(step, x.value, x), 1, 0, 2), x), x.channels
    lengths = _Lengths(step, more.pop()) if asked.lengths else None
    first = _First(step, layer, own, [more.pop(0) if one else None for one in asked.first])
    layers, between = list[_Layer](), places(own, weights.place) if own.training else []
    draws = [_draw(step, place, moments, added([layer] * (1 + own.bidirectional))) for place in between]
    for number in range(own.num_layers):
        short = form == "last" and number == own.num_layers - 1
        walks = [
            cells.Walk(first.at(number * (1 + own.bidirectional) + way), lengths.going(moments) if lengths else ())
            for way in range(1 + own.bidirectional)
        ]
        layers.append(_layer(weights, number, below, wide, moments, short, walks))
        below, wide = layers[-1].whole, added([layer] * len(layers[-1].ways))
        below = draft.op("Mul", below, draws[number]) if number < len(draws) else below
    top = layers[-1]

    def back(slopes: list[Slopes], wanted: Sequence[bool], ends: Sequence[str] = ()) -> Sequence[str | None]:
        flat = ""
        for number, one in reversed(list(enumerate(layers))):
            slopes = one.ending(slopes, ends, number, own.num_layers) if ends else slopes
            flat = one.back(slopes, number > 0 or wanted[0])
            flat = draft.op("Mul", flat, draws[number - 1]) if number and draws else flat
            if number:
                slopes = layers[number - 1].apart(cells.by_moments(draft, flat, moments))
        others = first.slopes([walk for one in layers for walk in one.walks])
        others += [None] * asked.lengths
        if not wanted[0]:
            return [None, *others]
        if isinstance(x.channels, int):
            apart = draft.reshape(flat, moments, -1, x.channels)
        else:
            apart = cells.by_moments(draft, flat, moments)
        return [closed(step, draft.transpose(apart, 1, 0, 2), x), *others]

    if form in ROWS:
        return _rows(step, layers, lengths, asked, moments, back)
    if form == "all":
        out = Map("", wide, (), (moments,))
        apart = cells.by_moments(draft, below, moments)
        apart = lengths.within(apart, moments) if lengths else apart
        y = out.like(closed(step, draft.transpose(apart, 1, 0, 2), out))

        def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
            slope = draft.transpose(opened(step, g, out), 1, 0, 2)
            return back(top.apart(lengths.within(slope, moments) if lengths else slope), wanted)

        return y, turned
    ends = [-1, 0 if form == "ends" else -1][: len(top.ways)]
    found = [side[end] for side, end in zip(top.states, ends, strict=True)]
    y = Map(found[0] if len(found) == 1 else draft.op("Concat", *found, axis=1), wide)
    return y, lambda g, wanted: back(top.at(ends, g), wanted)


def _rows(
    step: Step,
    layers: Sequence[_Layer],
    lengths: _Lengths | None,
    asked: Asked,
    moments: int,
    back: Callable[[list[Slopes], Sequence[bool], Sequence[str]], Sequence[str | None]],
) -> tuple[Map, Pullback]:
    """All that a layer gives as rows, (batch, rows, channels of one direction): the states of moments, direction by
    direction, where they are read, the last ones of each layer and direction, the cells of these."""
    draft, top = step.draft, layers[-1]
    parts = list[str]()
    for side in top.states if asked.form == "whole" else ():
        apart = cells.by_moments(draft, draft.op("Concat", *side, axis=0), moments)
        parts.append(lengths.within(apart, moments) if lengths else apart)
    ends = [side[end] for one in layers for side, end in zip(one.states, _ENDS, strict=False)]
    ends += [walk.cell for one in layers for walk in one.walks if walk.cell]
    parts += [draft.op("Unsqueeze", one, draft.ints(0)) for one in ends]
    many = (moments * len(top.ways) if asked.form == "whole" else 0) + len(ends)
    out = Map("", top.name, (), (many,))
    y = filled(step, draft.transpose(draft.op("Concat", *parts, axis=0), 1, 0, 2), out)

    def turned(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = draft.transpose(opened(step, g, out), 1, 0, 2)
        slopes, at = [list[str | None]([None] * moments) for _ in top.ways], 0
        for side in slopes if asked.form == "whole" else ():
            own = draft.op("Slice", slope, *(draft.ints(one) for one in (at, at + moments, 0, 1)))
            own = lengths.within(own, moments) if lengths else own
            side[:] = [draft.op("Gather", own, draft.constant(i, "int64"), axis=0) for i in range(moments)]
            at += moments
        return back(
            slopes, wanted, [draft.op("Gather", slope, draft.constant(i, "int64"), axis=0) for i in range(at, many)]
        )

    return y, turned


def outputs(step: Step, x: Map, many: int, ways: int) -> tuple[Map, Pullback]:
    """The states of all moments, (batch, moments, channels), of which the first ``many`` rows of ``x`` are each
    direction's in turn."""
    draft, (rows,) = step.draft, x.lead
    out = Map("", added([x.channels] * ways), (), (many // ways,))
    ends = (draft.ints(one) for one in (0, many, 1, 1))
    own = draft.op("Slice", opened(step, x.value, x), *ends)
    if ways > 1:
        apart = draft.reshape(own, 0, ways, many // ways, -1)
        own = draft.reshape(draft.transpose(apart, 0, 2, 1, 3), 0, 0, -1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = opened(step, g, out)
        if ways > 1:
            apart = draft.reshape(slope, 0, 0, ways, -1)
            slope = draft.reshape(draft.transpose(apart, 0, 2, 1, 3), 0, many, -1)
        pads = draft.ints(0, 0, 0, 0, rows - many, 0)
        return [closed(step, draft.op("Pad", slope, pads, draft.constant(0.0)), x)]

    return filled(step, own, out), back


_ENDS = (-1, 0)
"""Where a direction ends."""


@dataclass(frozen=True)
class _Lengths:
    """For how long each sample goes on, of which ``own`` is one number."""

    step: Step
    own: Map

    def going(self, moments: int) -> list[str]:
        """Whether it does, by moment: bool (batch, 1)."""
        draft = self.step.draft
        return [draft.op("Greater", self._number, draft.constant(float(one))) for one in range(moments)]

    def within(self, states: str, moments: int) -> str:
        """``states`` (moments, batch, channels), and zeros beyond."""
        draft = self.step.draft
        places = draft.constant([[[float(one)]] for one in range(moments)])
        return draft.op("Where", draft.op("Greater", self._number, places), states, draft.constant(0.0))

    @property
    def _number(self) -> str:
        value = self.own.value
        return self.step.draft.op("Cast", value, to=1) if self.step.draft.whole(value) else value


@dataclass(frozen=True)
class _First:
    """The first states of the layers and directions of ``layer``, and cells; None where these are zeros."""

    step: Step
    layer: str
    own: RNNBase
    maps: Sequence[Map | None]

    def __post_init__(self) -> None:
        whole = [self.own.num_layers * (1 + self.own.bidirectional), self.own.hidden_size]
        for one in self.maps:
            if one is not None and [self.step.known(size) for size in sizes(one)] != whole:
                what = f"begins with {sizes(one)} for each sample"
                raise refused(self.layer, what, f"give it ({whole[0]}, batch, {whole[1]})")

    def at(self, place: int) -> tuple[str, ...]:
        """Those of a layer and direction, (batch, channels) each; none where all are zeros."""
        if not any(self.maps):
            return ()
        return tuple(self._zeros if one is None else self._row(one, place) for one in self.maps)

    def slopes(self, walks: Sequence[cells.Walk]) -> list[str | None]:
        """The slopes of those that there are, of all layers and directions in turn."""
        draft, found = self.step.draft, list[str | None]()
        for place, one in enumerate(self.maps):
            if one is not None:
                rows = [draft.op("Unsqueeze", walk.slopes[place], draft.ints(1)) for walk in walks]
                found.append(closed(self.step, draft.op("Concat", *rows, axis=1), one))
        return found

    def _row(self, one: Map, place: int) -> str:
        draft = self.step.draft
        apart = draft.transpose(opened(self.step, one.value, one), 1, 0, 2)
        return draft.op("Gather", apart, draft.constant(place, "int64"), axis=0)

    @property
    def _zeros(self) -> str:
        (one, *_) = [one for one in self.maps if one is not None]
        return self.step.draft.op("Mul", self._row(one, 0), self.step.draft.constant(0.0))


@dataclass(frozen=True)
class _Layer:
    """One layer: for each of its directions the states that it gives, of all moments or of the last ones, and the way
    back."""

    step: Step
    name: str
    moments: int
    states: list[list[str]]
    ways: list[cells.Way]
    walks: list[cells.Walk]

    @property
    def whole(self) -> str:
        """The states of all moments, (moments x batch, channels), as far as each direction has them."""
        draft = self.step.draft
        sides = [draft.op("Concat", *side, axis=0) for side in self.states if len(side) == self.moments]
        return sides[0] if len(sides) == 1 else draft.op("Concat", *sides, axis=1)

    def apart(self, slope: str) -> list[Slopes]:
        """The slope (moments, batch, channels) by direction and moment."""
        flat = (self.step.draft.op("Flatten", side, axis=2) for side in self._sides(slope, 2))
        return [[*cells.each(self.step, side, self.moments)] for side in flat]

    def at(self, ends: Sequence[int], slope: str) -> list[Slopes]:
        """The slope (batch, channels) of one state of each direction, likewise."""
        found: list[Slopes] = [[None] * len(side) for side in self.states]
        for side, end, own in zip(found, ends, self._sides(slope, 1), strict=True):
            side[end] = own
        return found

    def ending(self, slopes: list[Slopes], ends: Sequence[str], number: int, layers: int) -> list[Slopes]:
        """The slopes with those of this layer's last states, of all ``ends`` in turn; the cells' are told the walks."""
        draft, many = self.step.draft, len(self.ways)
        for way, (side, end) in enumerate(zip(slopes, _ENDS, strict=False)):
            at = number * many + way
            side[end] = draft.total([side[end], ends[at]])
            if self.walks[way].cell:
                self.walks[way].cell_slope = ends[layers * many + at]
        return slopes

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


def _layer(
    weights: Matrices,
    number: int,
    below: str,
    wide: Size,
    moments: int,
    short: bool,
    walks: list[cells.Walk],
) -> _Layer:
    """The layer of this ``number`` over ``below``; ``short``: of its states those at the last moment alone are read,
    where the way from the last moment to the first has no more than begun."""
    own, step = cast(RNNBase, base_of(weights.module)), weights.step
    cell, draft = CELLS[type(own)], step.draft
    runs = [cell(weights, f"l{number}", below, wide, moments, walks[0])]
    if own.bidirectional:
        if short:
            at = draft.constant(moments - 1, "int64")
            below = draft.op("Gather", cells.by_moments(draft, below, moments), at, axis=0)
        runs.append(cell(weights, f"l{number}{cells.REVERSE}", below, wide, 1 if short else moments, walks[1]))
    return _Layer(step, weights.layer, moments, [side for side, _ in runs], [way for _, way in runs], walks)


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
