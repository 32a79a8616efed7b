"""What a network gives a recurrent layer and reads of it, in the pass as torch.fx traced it.

``layer(x)`` gives the states of all moments, (batch, moments, channels), and the last ones of each layer and direction,
(layers x directions, batch, channels), beside which an LSTM gives its cells. One map holds whatever is read, and is as
short as that allows; who reads a part of it cuts it out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import LSTM, Module, RNNBase

from talaria.programs.layers.base import Map, Pullback, Rule, Step, refused
from talaria.programs.layers.broadcast import cut, indexed
from talaria.programs.layers.plumbing import identity
from talaria.programs.layers.recurrent import ROWS, Asked, Form, outputs
from talaria.programs.layers.zeros import ZeroMap, Zeros

_LAST = (slice(None), -1)


@dataclass(frozen=True)
class States:
    """What a recurrent layer's call at ``node`` gave, or the part of it at the end of a ``way``, before that is a map;
    the map at ``node`` holds the states as they are ``asked`` for."""

    node: fx.Node
    layer: str
    own: RNNBase
    asked: Asked
    way: tuple[object, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether no more is read than single last states of the last layer."""
        return simply(self.node, self.own)


def given(node: fx.Node) -> tuple[list[Any], Any]:
    """The first states that a call is given, and the lengths, None where there are none."""
    _, hx, lengths = (*node.args, None, None)[:3]
    hx = node.kwargs.get("hx", hx)
    return ([] if hx is None else list(hx) if isinstance(hx, tuple | list) else [hx]), lengths


def asked(
    node: fx.Node, layer: str, own: RNNBase, held: Mapping[fx.Node, Any], tapped: bool
) -> tuple[list[fx.Node], Asked]:
    """The nodes that a call reads as maps, and what is asked of the layer; ``tapped``: all its states at least. Raises
    :class:`~talaria.errors.ModelError` for first states that are neither maps nor zeros."""
    first, lengths = given(node)
    begins = [one for one in first if not isinstance(held.get(one), Zeros | ZeroMap)]
    if any(not isinstance(held.get(one), Map) for one in begins):
        what = "is called with a first state that is no map"
        raise refused(layer, what, "make it of the sample, of a parameter for each sample, or of zeros")
    if lengths is not None and not (isinstance(number := held.get(lengths), Map) and number.single):
        raise refused(layer, "is given lengths that are not one number of each sample", "make them of the sample")
    form = form_of(node, own, lengths is not None)
    if tapped and form not in ROWS:
        form = "all" if lengths is None else "whole"
    read = [node.args[0], *begins, *([] if lengths is None else [lengths])]
    return read, Asked(form, tuple(one in begins for one in first) if begins else (), lengths is not None)


def form_of(node: fx.Node, own: RNNBase, lengths: bool = False) -> Form:
    """The shortest form that holds all that is read of the call at ``node``."""
    places = {user.args[1] for user in node.users if user.target is operator.getitem and _read(user)}
    if not simply(node, own) or (lengths and places == {0, 1}):
        return "whole" if 0 in places else "lasts"
    forms = {_form(user, own) for user in node.users if _read(user)}
    return forms.pop() if len(forms) == 1 and not (lengths and places == {0}) else "all"


def simply(node: fx.Node, own: RNNBase) -> bool:
    """Whether of last states a network reads single ones of the last layer alone, and no cells."""
    ends = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1 and _read(user)]
    if isinstance(own, LSTM):
        pairs = [user for one in ends for user in one.users if _read(user)]
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in pairs):
            return False
        ends = pairs
    return all(_direction(own, user) is not None for one in ends for user in one.users if _read(user))


def _direction(own: RNNBase, node: fx.Node) -> int | None:
    """The direction of the last layer of which ``node`` takes the last state; None for all else."""
    directions = 2 if own.bidirectional else 1
    many, index = own.num_layers * directions, _index(node)
    number = 0 if index == "squeeze" and many == 1 else index
    if not isinstance(number, int) or not -many <= number < many or number % many < many - directions:
        return None
    return number % many - (many - directions)


def _form(user: fx.Node, own: RNNBase) -> Form:
    place = user.args[1] if user.target is operator.getitem else None
    if place == 1:
        return "ends" if own.bidirectional else "last"
    return "last" if place == 0 and all(_index(one) == _LAST for one in user.users) else "all"


def _read(node: fx.Node) -> bool:
    """Whether anything comes of what is taken; ``states, (h, c) = lstm(x)`` takes what nobody looks at, too."""
    return any(user.target is not operator.getitem or _read(user) for user in node.users)


def _index(node: fx.Node) -> object:
    """What ``node`` takes of what it reads, without the whole dimensions that a tuple ends in; None for no place."""
    if node.target is not operator.getitem:
        squeezes = node.target in ("squeeze", torch.squeeze) and node.args[1:] == (0,)
        return "squeeze" if squeezes else None
    index = node.args[1]
    if not isinstance(index, tuple):
        return index
    cut = list(index)
    while cut and (cut[-1] == slice(None) or cut[-1] is Ellipsis):
        cut.pop()
    return cut[0] if len(cut) == 1 else tuple(cut)


def taken(states: States, node: fx.Node) -> States | Rule:
    """What ``node`` takes of ``states``: the rule that makes it of the map at the call, or what stands for it where it
    is no map or nobody reads it. Raises :class:`~talaria.errors.ModelError` for what is not known."""
    if not _read(node):
        return states
    own, way = states.own, (*states.way, _index(node))
    long, form = isinstance(own, LSTM), states.asked.form
    rows = form in ROWS
    if way == (0,):
        return _all(states) if form == "whole" else identity if form == "all" else replace(states, way=way)
    if way == (0, _LAST):
        return identity
    if way == (1,) and long:
        return replace(states, way=way)
    if way in (((1, 0), (1, 1)) if long else ((1,),)):
        return replace(states, way=way) if states.alone else _lasts(states, cells=way == (1, 1))
    direction = _direction(own, node) if way[:-1] == ((1, 0) if long else (1,)) else None
    if direction is None or (rows and not states.alone):
        what = f"gives several values, of which {node.name} takes {node.args[1:]!r}"[:160]
        raise refused(states.layer, what, "take its states and its last ones, states, last = layer(x)")
    return _cut(states, direction)


def _cut(states: States, direction: int) -> Rule:
    """The last state of a direction of the last layer."""
    wide, form = states.own.hidden_size, states.asked.form

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        moment: tuple[object, ...] = ((-1, 0)[direction],) if form == "all" else ()
        units = (slice(direction * wide, (direction + 1) * wide),) if states.own.bidirectional else ()
        if form in ROWS:
            _, ends = _places(states, given[0])
            moment, units = (ends[len(ends) - 1 - states.own.bidirectional + direction],), ()
        index = (slice(None), *moment, *units)
        return indexed(step, layer, given[0], index) if index[1:] else identity(step, layer, module, given)

    return rule


def _places(states: States, x: Map) -> tuple[int, range]:
    """How many of the rows of ``x`` are states of moments, and which ones the last states are, before the cells."""
    own = states.own
    many = own.num_layers * (1 + own.bidirectional)
    (rows,) = x.lead
    before = rows - many * (1 + isinstance(own, LSTM))
    return before, range(before, before + many)


def _lasts(states: States, cells: bool) -> Rule:
    """The last states of all layers and directions, or the cells."""

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        _, ends = _places(states, given[0])
        begin = ends.stop if cells else ends.start
        return cut(step, layer, given[0], 1, slice(begin, begin + len(ends)))

    return rule


def _all(states: States) -> Rule:
    """The states of all moments."""

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        many, _ = _places(states, given[0])
        return outputs(step, given[0], many, 1 + states.own.bidirectional)

    return rule
