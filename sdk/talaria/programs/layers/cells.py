"""What one layer of RNN, GRU and LSTM does at each moment in one direction, and the way back over all of them.

What meets all moments alike, the products with the inputs and the gradients of the weights, is one product each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch.nn import RNNBase

from talaria.model.inside import base_of
from talaria.programs.graph import Draft, Size, times
from talaria.programs.layers.base import Step
from talaria.programs.layers.matrices import Matrices

Way = Callable[[Sequence[str | None], bool], str]
"""``(slope of each moment's state, whether the inputs want theirs) -> the slope of the inputs``, empty if unwanted. The
moment that is walked last has a slope."""
REVERSE = "_reverse"
"""How the names of weights end that walk from the last moment to the first."""


@dataclass
class Walk:
    """What a layer begins with in one direction, and for how long: ``first`` the state, and the cell of an LSTM,
    (batch, channels) each, zeros where there is none; ``going`` by moment whether a sample goes on there, bool
    (batch, 1), where some end before others. A sample that has ended, or not begun, stays as it is.

    It is told what comes of that: the ``cell`` of an LSTM at the end, given ``cell_slope``, and the ``slopes`` of what
    it began with, kept where there is any.
    """

    first: tuple[str, ...] = ()
    going: Sequence[str] = ()
    cell: str = ""
    cell_slope: str | None = None
    slopes: list[str] = field(default_factory=list)

    def held(self, draft: Draft, moment: int, new: str, old: str) -> str:
        """What a moment leaves: of who goes on the ``new`` value."""
        return draft.op("Where", self.going[moment], new, old) if self.going else new

    def parted(self, draft: Draft, moment: int, slope: str) -> tuple[str, str | None]:
        """The slope of what a moment left: of its new value, and of the one before."""
        if not self.going:
            return slope, None
        none = draft.constant(0.0)
        return draft.op("Where", self.going[moment], slope, none), draft.op("Where", self.going[moment], none, slope)


def gru(weights: Matrices, place: str, below: str, inputs: Size, moments: int, walk: Walk) -> tuple[list[str], Way]:
    """One layer of torch.nn.GRU (Cho et al. 2014): r and z are sigmoids, the new state is n + z (h - n) with
    n = tanh(W x + b + r (V h + c)).

    ``place`` is what the names of its weights end in, such as ``l0_reverse``; ``below`` (moments x batch, inputs) is
    what it reads, and its states are given by moment, in whichever order they are walked.
    """
    draft, own = weights.step.draft, cast(RNNBase, base_of(weights.module))
    named = {name: f"{name}_{place}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    into, over, bias, hidden = _held(weights, place, 3, inputs)
    assert into is not None
    assert over is not None
    none, one_wide, two, three = _multiples(draft, over)
    gates, new = rows(draft, over, none, two), rows(draft, over, two, three)
    given = draft.op("Gemm", below, into, *([bias] if bias else []), transB=1)
    shift = [rows(draft, hidden, two, three)] if hidden else []
    of_gates, of_new = (columns(draft, given, *cut) for cut in ((none, two), (two, three)))
    if hidden:
        of_gates = draft.op("Add", of_gates, rows(draft, hidden, none, two))
    given_gates, given_new = (each(weights.step, value, moments) for value in (of_gates, of_new))
    order, (h,) = _order(place, moments), walk.first or (_zeros(weights.step, one_wide),)
    states, before, kept = dict[int, str](), dict[int, str](), dict[int, tuple[str, ...]]()
    wide = draft.op("Concat", one_wide, one_wide, axis=0)
    for moment in order:
        before[moment] = h
        rz = draft.op("Sigmoid", draft.op("Gemm", h, gates, given_gates[moment], transB=1))
        r, z = draft.several("Split", 2, rz, wide, axis=1)
        hn = draft.op("Gemm", h, new, *shift, transB=1)
        n = draft.op("Tanh", draft.op("Add", given_new[moment], draft.op("Mul", r, hn)))
        away = draft.op("Sub", h, n)
        h = states[moment] = walk.held(draft, moment, draft.op("Add", n, draft.op("Mul", z, away)), h)
        kept[moment] = r, z, hn, n, away

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        r, z, hn, n, away = _stacked(draft, kept)
        to_new = draft.op("Mul", draft.op("Sub", draft.constant(1.0), z), _tanh_slope(draft, n))
        sums = draft.op("Concat", _sigmoid_slope(draft, r, hn), _sigmoid_slope(draft, z, away), r, axis=1)
        inner, outer = (each(weights.step, one, moments) for one in (to_new, sums))
        by_new, by_over, slope = dict[int, str](), dict[int, str](), slopes[order[-1]]
        for moment, earlier in _backwards(order):
            assert slope is not None
            left, past = walk.parted(draft, moment, slope)
            dn = by_new[moment] = draft.op("Mul", left, inner[moment])
            by_over[moment] = draft.op("Mul", draft.op("Concat", dn, left, dn, axis=1), outer[moment])
            if earlier is not None or walk.first:
                stays = draft.op("Mul", left, kept[moment][1])
                more = draft.total([stays, past, None if earlier is None else slopes[earlier]])
                slope = draft.op("Gemm", by_over[moment], over, more)
        walk.slopes = [slope] if walk.first and slope is not None else []
        states_before, d_over = joined(draft, before), joined(draft, by_over)
        d_given = draft.op("Concat", columns(draft, d_over, none, two), joined(draft, by_new), axis=1)
        weights.trained(named["weight_ih"], lambda: draft.product(d_given, below, rank=2, turn_a=True))
        weights.trained(named["weight_hh"], lambda: draft.product(d_over, states_before, rank=2, turn_a=True))
        if own.bias:
            weights.trained(named["bias_ih"], lambda: draft.sum(d_given, 0))
            weights.trained(named["bias_hh"], lambda: draft.sum(d_over, 0))
        return draft.op("MatMul", d_given, into) if wanted else ""

    return [states[moment] for moment in range(moments)], way


def lstm(weights: Matrices, place: str, below: str, inputs: Size, moments: int, walk: Walk) -> tuple[list[str], Way]:
    """One layer of LSTM (Hochreiter and Schmidhuber 1997): the cell is c' = f c + i g, its state o tanh c'. Given what
    :func:`gru` is."""
    draft = weights.step.draft
    into, over, bias, hidden = _held(weights, place, 4, inputs)
    assert into is not None
    assert over is not None
    one_wide = _multiples(draft, over)[1]
    shift = [draft.op("Add", bias, hidden)] if bias and hidden else []
    given = each(weights.step, draft.op("Gemm", below, into, *shift, transB=1), moments)
    order, (h, c) = _order(place, moments), walk.first or (_zeros(weights.step, one_wide),) * 2
    states, before, kept = dict[int, str](), dict[int, str](), dict[int, tuple[str, ...]]()
    wide = draft.op("Concat", *[one_wide] * 4, axis=0)
    for moment in order:
        before[moment] = h
        whole = draft.op("Gemm", h, over, given[moment], transB=1)
        i, f, g, o = draft.several("Split", 4, whole, wide, axis=1)
        i, f, o = (draft.op("Sigmoid", gate) for gate in (i, f, o))
        g, last = draft.op("Tanh", g), c
        new = draft.op("Add", draft.op("Mul", f, c), draft.op("Mul", i, g))
        seen = draft.op("Tanh", new)
        h = states[moment] = walk.held(draft, moment, draft.op("Mul", o, seen), h)
        c = walk.held(draft, moment, new, c)
        kept[moment] = i, f, g, o, last, seen
    walk.cell = c

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        inner, outer = (each(weights.step, one, moments) for one in _bends(draft, kept))
        found = dict[int, str]()
        slope, carried = slopes[order[-1]], walk.cell_slope
        for moment, earlier in _backwards(order):
            assert slope is not None
            left, past = walk.parted(draft, moment, slope)
            carried, cell_past = (None, None) if carried is None else walk.parted(draft, moment, carried)
            cell = draft.total([draft.op("Mul", left, inner[moment]), carried])
            found[moment] = draft.op("Mul", draft.op("Concat", cell, cell, cell, left, axis=1), outer[moment])
            if earlier is not None or walk.first:
                carried = draft.total([draft.op("Mul", cell, kept[moment][1]), cell_past])
                more = [one for one in (past, None if earlier is None else slopes[earlier]) if one is not None]
                slope = draft.op("Gemm", found[moment], over, *([draft.total(more)] if more else []))
        walk.slopes = [one for one in (slope, carried) if one is not None and walk.first]
        return _learned(weights, place, joined(draft, found), below, joined(draft, before), into, wanted)

    return [states[moment] for moment in range(moments)], way


def _bends(draft: Draft, kept: Mapping[int, tuple[str, ...]]) -> tuple[str, str]:
    """What an LSTM's way back multiplies slopes with, of all moments at once: the state's to the cell's, (moments x
    batch, wide), and the cell's and the state's to those of the four sums, (moments x batch, 4 wide)."""
    i, f, g, o, last, seen = _stacked(draft, kept)
    by_new = draft.op("Mul", i, _tanh_slope(draft, g))
    sums = (_sigmoid_slope(draft, i, g), _sigmoid_slope(draft, f, last), by_new, _sigmoid_slope(draft, o, seen))
    return draft.op("Mul", o, _tanh_slope(draft, seen)), draft.op("Concat", *sums, axis=1)


def _stacked(draft: Draft, kept: Mapping[int, tuple[str, ...]]) -> list[str]:
    """Each of what was kept of every moment, (moments x batch, wide)."""
    return [joined(draft, dict(zip(kept, part, strict=True))) for part in zip(*kept.values(), strict=True)]


def _sigmoid_slope(draft: Draft, y: str, times: str) -> str:
    """The slope of a sigmoid that gave ``y``, ``times`` what it was multiplied with."""
    return draft.op("Mul", draft.op("Mul", times, y), draft.op("Sub", draft.constant(1.0), y))


def _tanh_slope(draft: Draft, y: str) -> str:
    """The slope of a tanh that gave ``y``."""
    return draft.op("Sub", draft.constant(1.0), draft.op("Mul", y, y))


def rnn(weights: Matrices, place: str, below: str, inputs: Size, moments: int, walk: Walk) -> tuple[list[str], Way]:
    """One layer of torch.nn.RNN (Elman 1990): the new state is tanh(W x + V h + b), or relu of that. Given what
    :func:`gru` is."""
    draft, own = weights.step.draft, cast(RNNBase, base_of(weights.module))
    into, over, bias, hidden = _held(weights, place, 1, inputs)
    assert into is not None
    assert over is not None
    shift = [draft.op("Add", bias, hidden)] if bias and hidden else []
    given = each(weights.step, draft.op("Gemm", below, into, *shift, transB=1), moments)
    order, (h,) = _order(place, moments), walk.first or (_zeros(weights.step, _multiples(draft, over)[1]),)
    bend, states, before = "Tanh" if own.mode == "RNN_TANH" else "Relu", dict[int, str](), dict[int, str]()
    made = dict[int, str]()
    for moment in order:
        before[moment] = h
        whole = draft.op("Gemm", h, over, given[moment], transB=1)
        made[moment] = draft.op(bend, whole)
        h = states[moment] = walk.held(draft, moment, made[moment], h)

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        none, found = draft.constant(0.0), dict[int, str]()
        later: str | None = None
        for moment in order[::-1]:
            slope, past = walk.parted(draft, moment, draft.total([slopes[moment], later]))
            seen = made[moment]
            if bend == "Tanh":
                found[moment] = draft.op("Mul", slope, _tanh_slope(draft, seen))
            else:
                found[moment] = draft.op("Where", draft.op("Greater", seen, none), slope, none)
            if moment != order[0] or walk.first:
                later = draft.total([draft.op("MatMul", found[moment], over), past])
        walk.slopes = [later] if walk.first and later is not None else []
        return _learned(weights, place, joined(draft, found), below, joined(draft, before), into, wanted)

    return [states[moment] for moment in range(moments)], way


def _learned(weights: Matrices, place: str, slope: str, below: str, before: str, into: str, wanted: bool) -> str:
    """Keeps the gradients of weights whose products with inputs and states are added up, of the ``slope`` of that sum
    at all moments; gives the slope of the inputs, if it is ``wanted``."""
    draft = weights.step.draft
    for name, value in (("weight_ih", below), ("weight_hh", before)):
        weights.trained(f"{name}_{place}", partial(draft.product, slope, value, rank=2, turn_a=True))
    if cast(RNNBase, base_of(weights.module)).bias:
        for name in ("bias_ih", "bias_hh"):
            weights.trained(f"{name}_{place}", lambda: draft.sum(slope, 0))
    return draft.op("MatMul", slope, into) if wanted else ""


def _held(
    weights: Matrices, place: str, gates: int, inputs: Size
) -> tuple[str | None, str | None, str | None, str | None]:
    """The weights of inputs and states and their biases, of so many ``gates``."""
    wide, many = weights.layer, times(weights.layer, gates)
    shapes = {"weight_ih": (many, inputs), "weight_hh": (many, wide), "bias_ih": (many,), "bias_hh": (many,)}
    into, over, bias, hidden = (weights.value(f"{name}_{place}", shape) for name, shape in shapes.items())
    return into, over, bias, hidden


def _multiples(draft: Draft, over: str) -> list[str]:
    """0, 1, 2 and 3 times the number of hidden units, which a mask may narrow: int64 (1,) each."""
    wide = draft.op("Shape", over, start=1, end=2)
    found = [draft.ints(0), wide]
    for _ in range(2):
        found.append(draft.op("Add", found[-1], wide))
    return found


def _order(place: str, moments: int) -> range:
    """The moments as they are walked."""
    return range(moments)[::-1] if place.endswith(REVERSE) else range(moments)


def _backwards(order: range) -> Iterator[tuple[int, int | None]]:
    """Each moment with the one that was walked before it, from the last one on; None before the first."""
    return zip(order[::-1], [*order[-2::-1], None], strict=True)


def joined(draft: Draft, parts: Mapping[int, str]) -> str:
    """What was found at each moment, one below the other."""
    return draft.op("Concat", *(parts[moment] for moment in sorted(parts)), axis=0)


def _zeros(step: Step, wide: str) -> str:
    """The first state: zeros (batch, wide)."""
    draft = step.draft
    return draft.op("Expand", draft.constant(0.0), draft.op("Concat", step.batch, wide, axis=0))


def each(step: Step, value: str, moments: int) -> list[str]:
    """(moments x batch, channels) as one (batch, channels) for each moment."""
    draft = step.draft
    sizes = draft.op("Mul", draft.ints(*[1] * moments), step.batch)
    return [*draft.several("Split", moments, value, sizes, axis=0)] if moments > 1 else [value]


def by_moments(draft: Draft, value: str, moments: int) -> str:
    """(moments x batch, channels) as (moments, batch, channels)."""
    return draft.reshape(draft.op("Unsqueeze", value, draft.ints(1)), moments, -1, 0)


def rows(draft: Draft, value: str, begin: str, end: str) -> str:
    """Some rows of a matrix."""
    return draft.op("Slice", value, begin, end, draft.ints(0), draft.ints(1))


def columns(draft: Draft, value: str, begin: str, end: str) -> str:
    """Some columns of a matrix."""
    return draft.op("Slice", value, begin, end, draft.ints(1), draft.ints(1))
