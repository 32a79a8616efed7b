"""GRU, unrolled over the length of its sequence.

The gates are torch.nn.GRU's (Cho et al. 2014): r and z are sigmoids, the new state is n + z (h - n) with
n = tanh(W x + b + r (V h + c)). What meets all moments alike, the products with the inputs and the gradients of the
weights, is one product each; values are (moments x batch, channels) there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch.nn import GRU, Module

from talaria.programs.graph import Draft, Size
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, opened

LONGEST = 256
"""Moments up to which a layer is unrolled: each takes about thirty operators."""
Way = Callable[[Sequence[str | None], bool], str]
"""``(slope of each moment's state, whether the inputs want theirs) -> the slope of the inputs``, empty if unwanted."""


def sequences(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The states of the last layer at every moment: ``layer(x)[0]``."""
    states, back = _stack(step, layer, module, given)
    draft, wide, moments = step.draft, cast(GRU, module).hidden_size, len(states)
    out = Map("", wide, (), (moments,))
    stacked = draft.reshape(draft.op("Concat", *states, axis=0), moments, -1, wide)
    y = out.like(closed(step, draft.transpose(stacked, 1, 0, 2), out))

    def pull(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        turned = draft.transpose(opened(step, g, out), 1, 0, 2)
        return back([draft.op("Gather", turned, draft.constant(t, "int64"), axis=0) for t in range(moments)], wanted)

    return y, pull


def final(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The last layer's state after the last moment: ``layer(x)[0][:, -1]`` and ``layer(x)[1][-1]``."""
    states, back = _stack(step, layer, module, given)
    none = [None] * (len(states) - 1)
    return Map(states[-1], cast(GRU, module).hidden_size), lambda g, wanted: back([*none, g], wanted)


def _stack(
    step: Step, layer: str, module: Module, given: Sequence[Map]
) -> tuple[list[str], Callable[[Sequence[str | None], Sequence[bool]], Sequence[str | None]]]:
    """The states of the last layer, and the way back through all layers."""
    own, draft, (x,) = cast(GRU, module), step.draft, given
    _known(layer, own, x)
    (moments,) = x.lead
    turned = draft.transpose(opened(step, x.value, x), 1, 0, 2)
    below, states, ways = closed(step, turned, x), list[str](), list[Way]()
    for number in range(own.num_layers):
        wide = x.channels if number == 0 else own.hidden_size
        states, way = _layer(step, layer, own, number, below, wide, moments)
        ways.append(way)
        below = draft.op("Concat", *states, axis=0)

    def back(slopes: Sequence[str | None], wanted: Sequence[bool]) -> Sequence[str | None]:
        flat = ""
        for number in reversed(range(len(ways))):
            flat = ways[number](slopes, number > 0 or wanted[0])
            if number:
                apart = draft.reshape(flat, moments, -1, own.hidden_size)
                slopes = [draft.op("Gather", apart, draft.constant(t, "int64"), axis=0) for t in range(moments)]
        if not wanted[0]:
            return [None]
        if isinstance(x.channels, int):
            apart = draft.reshape(flat, moments, -1, x.channels)
        else:
            apart = draft.reshape(draft.op("Unsqueeze", flat, draft.ints(1)), moments, -1, 0)
        return [closed(step, draft.transpose(apart, 1, 0, 2), x)]

    return states, back


def _known(layer: str, own: GRU, x: Map) -> None:
    if not own.batch_first or len(x.lead) != 1:
        raise refused(layer, "reads sequences in another order", "use batch_first=True, and (batch, length, width)")
    if own.bidirectional:
        raise refused(layer, "is bidirectional", "use one direction, or a second GRU")
    if own.training and own.dropout and own.num_layers > 1:
        raise refused(layer, f"has dropout={own.dropout}", "use layers of their own with Dropout between them")
    if x.lead[0] > LONGEST:
        raise refused(layer, f"runs over {x.lead[0]} moments, at most {LONGEST}", "shorten the sequence before it")


def _layer(
    step: Step, layer: str, own: GRU, number: int, below: str, inputs: Size, moments: int
) -> tuple[list[str], Way]:
    """One layer: its states, and the way back. ``r`` and ``z`` stand in one value, ``n`` apart."""
    draft, wide = step.draft, own.hidden_size
    named = {name: f"{name}_l{number}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    shapes: dict[str, tuple[Size, ...]] = {"weight_ih": (3 * wide, inputs), "weight_hh": (3 * wide, wide)}
    held = {
        name: step.weight(layer, full, getattr(own, full, None), shapes.get(name, (3 * wide,)))
        for name, full in named.items()
    }
    into, over, bias, hidden = (held[name] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    assert into is not None
    assert over is not None
    gates, new = _rows(draft, over, 0, 2 * wide), _rows(draft, over, 2 * wide, 3 * wide)
    given = draft.op("Gemm", below, into, *([bias] if bias else []), transB=1)
    shift = [_rows(draft, hidden, 2 * wide, 3 * wide)] if hidden else []
    given_gates, given_new = (
        draft.reshape(_columns(draft, given, *cut), moments, -1, cut[1] - cut[0])
        for cut in ((0, 2 * wide), (2 * wide, 3 * wide))
    )
    if hidden:
        given_gates = draft.op("Add", given_gates, _rows(draft, hidden, 0, 2 * wide))
    shape = draft.op("Concat", draft.op("Shape", "x", start=0, end=1), draft.ints(wide), axis=0)
    states = [draft.op("Expand", draft.constant(0.0), shape)]
    kept = []
    for moment in range(moments):
        at, h = draft.constant(moment, "int64"), states[-1]
        rz = draft.op("Sigmoid", draft.op("Gemm", h, gates, draft.op("Gather", given_gates, at, axis=0), transB=1))
        r, z = _columns(draft, rz, 0, wide), _columns(draft, rz, wide, 2 * wide)
        hn = draft.op("Gemm", h, new, *shift, transB=1)
        n = draft.op("Tanh", draft.op("Add", draft.op("Gather", given_new, at, axis=0), draft.op("Mul", r, hn)))
        away = draft.op("Sub", h, n)
        states.append(draft.op("Add", n, draft.op("Mul", z, away)))
        kept.append((rz, r, z, hn, n, away))

    def way(slopes: Sequence[str | None], wanted: bool) -> str:
        one = draft.constant(1.0)
        by_gates, by_new, by_hidden = list[str](), list[str](), list[str]()
        later: str | None = None
        for moment in reversed(range(moments)):
            rz, r, z, hn, n, away = kept[moment]
            slope = draft.total([part for part in (slopes[moment], later) if part is not None])
            dn = draft.op("Mul", slope, draft.op("Sub", one, z))
            dn = draft.op("Mul", dn, draft.op("Sub", one, draft.op("Mul", n, n)))
            both = draft.op("Concat", draft.op("Mul", dn, hn), draft.op("Mul", slope, away), axis=1)
            drz = draft.op("Mul", both, draft.op("Mul", rz, draft.op("Sub", one, rz)))
            dhn = draft.op("Mul", dn, r)
            by_gates.append(drz)
            by_new.append(dn)
            by_hidden.append(dhn)
            if moment:
                through = draft.op("Gemm", dhn, new, draft.op("Mul", slope, z))
                later = draft.op("Gemm", drz, gates, through)
        d_gates, d_new, d_hidden = (draft.op("Concat", *part[::-1], axis=0) for part in (by_gates, by_new, by_hidden))
        before = draft.op("Concat", *states[:-1], axis=0)
        d_given = draft.op("Concat", d_gates, d_new, axis=1)
        d_over = draft.op("Concat", d_gates, d_hidden, axis=1)
        step.trained(own, layer, named["weight_ih"], lambda: draft.product(d_given, below, rank=2, turn_a=True))
        step.trained(own, layer, named["weight_hh"], lambda: draft.product(d_over, before, rank=2, turn_a=True))
        if own.bias:
            step.trained(own, layer, named["bias_ih"], lambda: draft.sum(d_given, 0))
            step.trained(own, layer, named["bias_hh"], lambda: draft.sum(d_over, 0))
        return draft.op("MatMul", d_given, into) if wanted else ""

    return states[1:], way


def _rows(draft: Draft, value: str, begin: int, end: int) -> str:
    return draft.op("Slice", value, draft.ints(begin), draft.ints(end), draft.ints(0), draft.ints(1))


def _columns(draft: Draft, value: str, begin: int, end: int) -> str:
    return draft.op("Slice", value, draft.ints(begin), draft.ints(end), draft.ints(1), draft.ints(1))
