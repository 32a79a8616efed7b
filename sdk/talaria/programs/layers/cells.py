"""What one layer of RNN, GRU and LSTM does at each moment in one direction, and the way back over all of them.

What meets all moments alike, the products with the inputs and the gradients of the weights, is one product each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    n = tanh(W x + b + r (V h + c)). ``r`` and ``z`` stand in one value, ``n`` apart.

    ``place`` is what the names of its weights end in, such as ``l0_reverse``; ``below`` (moments x batch, inputs) is
    what it reads, and its states are given by moment, in whichever order they are walked.
    """
    draft, own = weights.step.draft, cast(RNNBase, base_of(weights.module))
    named = {name: f"{name}_{place}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    into, over, bias, hidden = _held(weights, place, 3, inputs)
    assert into is not None
    assert over is not None
    none, one_wide, two, three, _ = _multiples(draft, over)
    gates, new = rows(draft, over, none, two), rows(draft, over, two, three)
    given = draft.op("Gemm", below, into, *([bias] if bias else []), transB=1)
    shift = [rows(draft, hidden, two, three)] if hidden else []
    given_gates, given_new = (
        by_moments(draft, columns(draft, given, *cut), moments) for cut in ((none, two), (two, three))
    )
    if hidden:
        given_gates = draft.op("Add", given_gates, rows(draft, hidden, none, two))
    order, (h,) = _order(place, moments), walk.first or (_zeros(weights.step, one_wide),)
    states, before, kept = dict[int, str](), dict[int, str](), dict[int, tuple[str, ...]]()
    for moment in order:
        at, before[moment] = draft.constant(moment, "int64"), h
        rz = draft.op("Sigmoid", draft.op("Gemm", h, gates, draft.op("Gather", given_gates, at, axis=0), transB=1))
        r, z = columns(draft, rz, none, one_wide), columns(draft, rz, one_wide, two)
        hn = draft.op("Gemm", h, new, *shift, transB=1)
        n = draft.op("Tanh", draft.op("Add", draft.op("Gather", given_new, at, axis=0), draft.op("Mul", r, hn)))
        away = draft.op("Sub", h, n)
        h = states[moment] = walk.held(draft, moment, draft.op("Add", n, draft.op("Mul", z, away)), h)
        kept[moment] = rz, r, z, hn, n, away

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        one = draft.constant(1.0)
        by_gates, by_new, by_hidden = dict[int, str](), dict[int, str](), dict[int, str]()
        later: str | None = None
        for moment in order[::-1]:
            rz, r, z, hn, n, away = kept[moment]
            slope, past = walk.parted(draft, moment, draft.total([slopes[moment], later]))
            dn = draft.op("Mul", slope, draft.op("Sub", one, z))
            dn = draft.op("Mul", dn, draft.op("Sub", one, draft.op("Mul", n, n)))
            both = draft.op("Concat", draft.op("Mul", dn, hn), draft.op("Mul", slope, away), axis=1)
            drz = draft.op("Mul", both, draft.op("Mul", rz, draft.op("Sub", one, rz)))
            dhn = draft.op("Mul", dn, r)
            by_gates[moment], by_new[moment], by_hidden[moment] = drz, dn, dhn
            if moment != order[0] or walk.first:
                through = draft.op("Gemm", dhn, new, draft.op("Mul", slope, z))
                later = draft.total([draft.op("Gemm", drz, gates, through), past])
        walk.slopes = [later] if walk.first and later is not None else []
        d_gates, d_new, d_hidden = (joined(draft, part) for part in (by_gates, by_new, by_hidden))
        states_before = joined(draft, before)
        d_given = draft.op("Concat", d_gates, d_new, axis=1)
        d_over = draft.op("Concat", d_gates, d_hidden, axis=1)
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
    none, one_wide, two, three, four = _multiples(draft, over)
    shift = [draft.op("Add", bias, hidden)] if bias and hidden else []
    given = by_moments(draft, draft.op("Gemm", below, into, *shift, transB=1), moments)
    order, (h, c) = _order(place, moments), walk.first or (_zeros(weights.step, one_wide),) * 2
    states, before, kept = dict[int, str](), dict[int, str](), dict[int, tuple[str, ...]]()
    for moment in order:
        at, before[moment] = draft.constant(moment, "int64"), h
        whole = draft.op("Gemm", h, over, draft.op("Gather", given, at, axis=0), transB=1)
        gates = draft.op("Sigmoid", columns(draft, whole, none, two))
        i, f = columns(draft, gates, none, one_wide), columns(draft, gates, one_wide, two)
        g = draft.op("Tanh", columns(draft, whole, two, three))
        o = draft.op("Sigmoid", columns(draft, whole, three, four))
        last, new = c, draft.op("Add", draft.op("Mul", f, c), draft.op("Mul", i, g))
        seen = draft.op("Tanh", new)
        h = states[moment] = walk.held(draft, moment, draft.op("Mul", o, seen), h)
        c = walk.held(draft, moment, new, c)
        kept[moment] = gates, i, f, g, o, last, seen
    walk.cell = c

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        one, found = draft.constant(1.0), dict[int, str]()
        later: str | None = None
        carried = walk.cell_slope
        for moment in order[::-1]:
            gates, i, f, g, o, cell, seen = kept[moment]
            slope, past = walk.parted(draft, moment, draft.total([slopes[moment], later]))
            carried, cell_past = (None, None) if carried is None else walk.parted(draft, moment, carried)
            inner = draft.op("Mul", draft.op("Mul", slope, o), draft.op("Sub", one, draft.op("Mul", seen, seen)))
            inner = inner if carried is None else draft.op("Add", inner, carried)
            both = draft.op("Concat", draft.op("Mul", inner, g), draft.op("Mul", inner, cell), axis=1)
            by_gates = draft.op("Mul", both, draft.op("Mul", gates, draft.op("Sub", one, gates)))
            by_new = draft.op("Mul", draft.op("Mul", inner, i), draft.op("Sub", one, draft.op("Mul", g, g)))
            out = draft.op("Mul", draft.op("Mul", slope, seen), draft.op("Mul", o, draft.op("Sub", one, o)))
            found[moment] = draft.op("Concat", by_gates, by_new, out, axis=1)
            if moment != order[0] or walk.first:
                carried = draft.total([draft.op("Mul", inner, f), cell_past])
                later = draft.total([draft.op("MatMul", found[moment], over), past])
        walk.slopes = [one for one in (later, carried) if one is not None and walk.first]
        return _learned(weights, place, joined(draft, found), below, joined(draft, before), into, wanted)

    return [states[moment] for moment in range(moments)], way


def rnn(weights: Matrices, place: str, below: str, inputs: Size, moments: int, walk: Walk) -> tuple[list[str], Way]:
    """One layer of torch.nn.RNN (Elman 1990): the new state is tanh(W x + V h + b), or relu of that. Given what
    :func:`gru` is."""
    draft, own = weights.step.draft, cast(RNNBase, base_of(weights.module))
    into, over, bias, hidden = _held(weights, place, 1, inputs)
    assert into is not None
    assert over is not None
    shift = [draft.op("Add", bias, hidden)] if bias and hidden else []
    given = by_moments(draft, draft.op("Gemm", below, into, *shift, transB=1), moments)
    order, (h,) = _order(place, moments), walk.first or (_zeros(weights.step, _multiples(draft, over)[1]),)
    bend, states, before = "Tanh" if own.mode == "RNN_TANH" else "Relu", dict[int, str](), dict[int, str]()
    made = dict[int, str]()
    for moment in order:
        at, before[moment] = draft.constant(moment, "int64"), h
        whole = draft.op("Gemm", h, over, draft.op("Gather", given, at, axis=0), transB=1)
        made[moment] = draft.op(bend, whole)
        h = states[moment] = walk.held(draft, moment, made[moment], h)

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        one, none, found = draft.constant(1.0), draft.constant(0.0), dict[int, str]()
        later: str | None = None
        for moment in order[::-1]:
            slope, past = walk.parted(draft, moment, draft.total([slopes[moment], later]))
            seen = made[moment]
            if bend == "Tanh":
                found[moment] = draft.op("Mul", slope, draft.op("Sub", one, draft.op("Mul", seen, seen)))
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
    """0, 1, 2, 3 and 4 times the number of hidden units, which a mask may narrow: int64 (1,) each."""
    wide = draft.op("Shape", over, start=1, end=2)
    found = [draft.ints(0), wide]
    for _ in range(3):
        found.append(draft.op("Add", found[-1], wide))
    return found


def _order(place: str, moments: int) -> range:
    """The moments as they are walked."""
    return range(moments)[::-1] if place.endswith(REVERSE) else range(moments)


def joined(draft: Draft, parts: Mapping[int, str]) -> str:
    """What was found at each moment, one below the other."""
    return draft.op("Concat", *(parts[moment] for moment in sorted(parts)), axis=0)


def _zeros(step: Step, wide: str) -> str:
    """The first state: zeros (batch, wide)."""
    draft = step.draft
    return draft.op("Expand", draft.constant(0.0), draft.op("Concat", step.batch, wide, axis=0))


def by_moments(draft: Draft, value: str, moments: int) -> str:
    """(moments x batch, channels) as (moments, batch, channels)."""
    return draft.reshape(draft.op("Unsqueeze", value, draft.ints(1)), moments, -1, 0)


def rows(draft: Draft, value: str, begin: str, end: str) -> str:
    """Some rows of a matrix."""
    return draft.op("Slice", value, begin, end, draft.ints(0), draft.ints(1))


def columns(draft: Draft, value: str, begin: str, end: str) -> str:
    """Some columns of a matrix."""
    return draft.op("Slice", value, begin, end, draft.ints(1), draft.ints(1))
