"""What a network reads of a recurrent layer, in the pass as torch.fx traced it.

``layer(x)`` gives the states of all moments, (batch, moments, channels), and the last ones of each layer and direction,
(layers x directions, batch, channels), beside which an LSTM gives its cells. One map holds whatever is read of the last
layer's states, and is as short as that allows; who reads a part of it cuts it out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.nn import LSTM, Module, RNNBase

from talaria.programs.layers.base import Map, Pullback, Rule, Step, refused
from talaria.programs.layers.broadcast import indexed
from talaria.programs.layers.plumbing import identity
from talaria.programs.layers.recurrent import Form

_LAST = (slice(None), -1)


@dataclass(frozen=True)
class States:
    """What a recurrent layer's call at ``node`` gave, or the part of it at the end of a ``way``, before that is a map;
    the map at ``node`` holds the states in a ``form``."""

    node: fx.Node
    layer: str
    own: RNNBase
    form: Form
    way: tuple[object, ...] = ()


def form_of(node: fx.Node, own: RNNBase) -> Form:
    """The shortest form that holds all that is read of the call at ``node``."""
    forms = {_form(user, own) for user in node.users if _read(user)}
    return forms.pop() if len(forms) == 1 else "all"


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
    ends = (1, 0) if isinstance(own, LSTM) else (1,)
    if way in ((1,), ends):
        return replace(states, way=way)
    if way == (0,):
        return identity if states.form == "all" else replace(states, way=way)
    if way == (0, _LAST):
        return identity
    directions = 2 if own.bidirectional else 1
    many = own.num_layers * directions
    number = 0 if way[-1] == "squeeze" and many == 1 else way[-1]
    if way[:-1] != ends or not isinstance(number, int) or not -many <= number < many:
        raise _refused(states, node)
    direction = number % many - (many - directions)
    if direction < 0:
        raise _refused(states, node)
    return _cut(states, direction)


def _cut(states: States, direction: int) -> Rule:
    wide = states.own.hidden_size
    moment: tuple[object, ...] = ((-1, 0)[direction],) if states.form == "all" else ()
    units = (slice(direction * wide, (direction + 1) * wide),) if states.own.bidirectional else ()

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        index = (slice(None), *moment, *units)
        return indexed(step, layer, given[0], index) if index[1:] else identity(step, layer, module, given)

    return rule


def _refused(states: States, node: fx.Node) -> Exception:
    cells = isinstance(states.own, LSTM) and (*states.way, _index(node))[:2] == (1, 1)
    what = "its cells" if cells else f"{node.name} takes {node.args[1:]!r}"[:120]
    two = "h[-2] and h[-1]" if states.own.bidirectional else "h[-1]"
    return refused(states.layer, f"gives several values, of which {what}", f"take all its states, or the last {two}")
