"""A pass whose sequences stand before the batch, as torch's own layers read them unless they are told otherwise, as one
whose batch comes first.

What has the batch second, (length, batch, ...), is followed with these two dimensions in each other's place, until it
is turned back, averaged over the length or taken at a moment.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx
from torch.nn import Dropout, Embedding, Identity, LayerNorm, Linear, Module, MultiheadAttention, RMSNorm, RNNBase

from talaria.errors import ModelError
from talaria.model.inside import base_of
from talaria.programs.layers import activation, elementwise
from talaria.programs.layers.base import listed, refused
from talaria.programs.reading import simply
from talaria.programs.tracing import MANY, takes


def batch_first(graph: fx.Graph, module: Module, shape_of: Callable[[fx.Node], Any]) -> frozenset[fx.Node]:
    """Rewrites ``graph``, a pass of ``module``, so that the batch comes first in all that it makes, and gives the nodes
    in which torch has it second. ``shape_of`` tells the sizes of what a node gives, or of each of several values.

    Raises :class:`~talaria.errors.ModelError` for what is not known of a sequence that stands before the batch.
    """
    if not any(_begins(node) or _gives_lasts(node, module) for node in graph.nodes):
        return frozenset()
    turning = _Turning(graph, module)
    for node in graph.nodes:  # as they are before anything is rewritten
        turning.look(node, shape_of)
    for node in list(graph.nodes):
        turning.follow(node)
    return frozenset(turning.second)


@contextmanager
def counted_with_the_batch_first(node: fx.Node, second: frozenset[fx.Node]) -> Iterator[None]:
    """Has a refusal of ``node`` say that it counts dimensions as rewritten, where the network counts otherwise."""
    try:
        yield
    except ModelError as error:
        if second.isdisjoint((node, *node.all_input_nodes)):
            raise
        raise ModelError(
            f"{error}. Dimensions are counted with the batch first here: this sequence stands before the batch, and "
            "what the network calls 0 is 1, and 1, the batch, is 0"
        ) from None


def _gives_lasts(node: fx.Node, module: Module) -> bool:
    """Whether a recurrent layer gives last states as (layers x directions, batch, channels)."""
    own = base_of(module.get_submodule(str(node.target))) if node.op == "call_module" else None
    return isinstance(own, RNNBase) and not simply(node, own)


_BEGINNINGS = ("permute", "transpose", "swapaxes", "t", "stack", "expand", "repeat", "unsqueeze")
"""What puts a sequence before the batch."""


def _begins(node: fx.Node) -> bool:
    """Whether ``node`` may put a sequence before the batch."""
    return name_of(node) in _BEGINNINGS or (node.target is operator.getitem and _index(node)[:1] == (None,))


def _index(node: Any) -> tuple[Any, ...]:
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


_DIM: Mapping[str, int] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "softmax", "log_softmax", "softmin", "logsumexp"), 1),
    **dict.fromkeys(("std", "var", "unbind", "squeeze"), 1),
    **dict.fromkeys(("norm", "normalize", "chunk", "split"), 2),
}
"""By what goes along a dimension, where it is told which."""
_DEFAULT = {"unbind": 0, "chunk": 0, "split": 0, "normalize": 1}
EACH = {
    *(str(getattr(one, "__name__", one)) for one in (*elementwise.EACH, *activation.FUNCTIONS)),
    *("add", "iadd", "sub", "isub", "mul", "imul", "truediv", "itruediv", "div", "pow", "maximum", "minimum"),
    *("dropout", "clamp", "clamp_min", "clamp_max", "masked_fill", "where", "invert", "logical_not", "detach"),
    *("float", "long", "int", "to", "type", "type_as", "contiguous", "clone", "gelu", "silu", "hardtanh"),
    *("eq", "ne", "gt", "lt", "ge", "le", "zeros_like"),
}
"""What looks at each value alone."""
LAYERS = (Linear, Embedding, Identity, Dropout, *activation.OF)
"""Layers that look at the last dimension, or at each value."""


_PLACES = {0: 1, 1: 0}
"""Where a dimension is once the first two are in each other's place, of those that move."""


def name_of(node: fx.Node) -> str:
    """What a node calls, by its name; nothing of what calls nothing."""
    return str(getattr(node.target, "__name__", node.target)) if node.op.startswith("call_") else ""


@dataclass
class _Turning:
    graph: fx.Graph
    module: Module
    shapes: dict[fx.Node, Any] = field(default_factory=dict)
    second: set[fx.Node] = field(default_factory=set)
    """What has the batch second."""
    giving: set[fx.Node] = field(default_factory=set)
    """What gives several values, of which some have."""
    asked: set[fx.Node] = field(default_factory=set)
    """The sizes of such values."""
    behind: dict[fx.Node, int] = field(default_factory=dict)
    """Last states (layers, directions, batch, ...), and behind how many dimensions the batch is there."""
    lasts: set[fx.Node] = field(default_factory=set)
    """What gives last states, or the pairs of these and cells."""

    def look(self, node: Any, shape_of: Callable[[fx.Node], Any]) -> None:
        """Keep the sizes of what a node gives."""
        own = base_of(self.module.get_submodule(str(node.target))) if node.op == "call_module" else None
        if isinstance(own, RNNBase) and own.batch_first and self._at(node.all_input_nodes[0]) == 1:
            raise self._reads_first(node)  # which would take the batch for as many moments
        self.shapes[node] = shape_of(node)

    def follow(self, node: Any) -> None:
        """Rewrite one node."""
        taken = node.args[0] if node.args else None
        if _gives_lasts(node, self.module):
            self.lasts.add(node)
        if node.target is operator.getitem and taken in self.lasts and (taken.op != "call_module" or node.args[1] == 1):
            self._last(node)
        elif (
            node.target in (operator.getitem, getattr)
            and isinstance(taken, fx.Node)
            and taken in self.giving | self.asked
        ):
            self._took(node, taken)
        elif node.target is operator.getitem and taken in self.behind:
            self._nearer(node, self.behind[taken])
        elif self.second.intersection(node.all_input_nodes):
            if node.op == "output":
                raise self._unknown(node, "gives")
            (self._module if node.op == "call_module" else self._call)(node)
        elif node.op.startswith("call_"):
            self._begin(node)

    def _at(self, node: Any) -> int:
        """Where the batch is in what a node gives; -1 where it is not."""
        shape = self.shapes.get(node)
        return shape.index(MANY) if isinstance(shape, tuple) and MANY in shape else -1

    def _gave(self, node: Any) -> None:
        if self._at(node) == 1:
            self.second.add(node)

    def _begin(self, node: Any) -> None:
        """What puts a sequence before the batch, if it does."""
        name, x = name_of(node), node.args[0] if node.args else None
        if not _begins(node) or self._at(node) != 1:
            return
        if name == "stack":
            maps = node.args[0]
            if all(self._at(one) == 0 for one in maps if isinstance(one, fx.Node)):
                node.args, node.kwargs = (maps, 1), {}
                self.second.add(node)
        elif name in ("expand", "repeat") and isinstance(x, fx.Node) and self._at(x) == -1:
            shape, wanted = self.shapes.get(x), listed(node.args[1:])
            if shape is None or (len(shape) == len(wanted) - 1 and shape[0] != 1):
                return
            own = self._before(node, "transpose", x, 0, 1) if len(shape) == len(wanted) else x
            node.args = (own, wanted[1], wanted[0], *wanted[2:])
            self.second.add(node)
        elif name in ("unsqueeze", "getitem"):
            if isinstance(x, fx.Node) and self._at(x) == 0:
                first, *rest = (_index(node)[1:] if name == "getitem" else ()) or (slice(None),)
                node.target, node.args, node.kwargs = operator.getitem, (x, (first, None, *rest)), {}
                node.op = "call_function"
                self.second.add(node)
        elif isinstance(x, fx.Node) and self._at(x) == 0 and not (node.users and all(map(takes, node.users))):
            self._ordered(node, self._order(node, len(self.shapes[x])))

    def _order(self, node: Any, rank: int) -> list[int]:
        name = name_of(node)
        given = listed(node.args[1:]) or [*node.kwargs.values()]
        if name == "permute":
            return [one % rank for one in given]
        order = list(range(rank))
        a, b = (0, 1) if name == "t" else (one % rank for one in given)
        order[a], order[b] = order[b], order[a]
        return order

    def _ordered(self, node: Any, order: Sequence[int]) -> None:
        """A permutation, by the places that the dimensions have where the batch is first."""
        order, at = list(order), self._at(node)
        if at == 1:
            order[:2] = order[1::-1]
            self.second.add(node)
        elif at != 0:
            raise self._unknown(node, "orders the dimensions")
        node.target, node.args, node.kwargs = "permute", (node.args[0], *order), {}
        node.op = "call_method"

    def _module(self, node: Any) -> None:
        own, rank = base_of(self.module.get_submodule(str(node.target))), self._rank(node)
        if isinstance(own, RNNBase):
            if node.args[0] in self.second:
                if own.batch_first:
                    raise self._reads_first(node)
                self.second.add(node)
                self.giving.add(node)
        elif isinstance(own, MultiheadAttention):
            read = [one for one in node.all_input_nodes if self._at(one) == 1]
            if own.batch_first or not self.second.issuperset(read):
                raise self._reads_first(node)
            self.second.add(node)
            self.giving.add(node)
        elif type(own) in LAYERS or (isinstance(own, LayerNorm | RMSNorm) and len(own.normalized_shape) <= rank - 2):
            self.second.add(node)
        else:
            raise self._unknown(node, f"reads by {type(own).__name__}")

    def _last(self, node: Any) -> None:
        """The last states of all layers and directions, or the cells; of an LSTM both first."""
        pairs = isinstance(self.shapes[node], list)
        (self.lasts if pairs else self.second).add(node)

    def _nearer(self, node: Any, many: int) -> None:
        """A place of what stands before the batch, layers and directions."""
        index = _index(node)
        places = index[:many]
        if any(not isinstance(one, int) for one in places) or any(one != slice(None) for one in index[many:]):
            raise self._unknown(node, f"takes {node.args[1]!r}"[:80])
        node.args = (node.args[0], (slice(None), *places))
        if many - len(places) > 1:
            self.behind[node] = many - len(places)
        elif len(places) < many:
            self.second.add(node)

    def _rank(self, node: Any) -> int:
        return max((len(shape) for one in node.all_input_nodes if (shape := self.shapes.get(one))), default=0)

    def _call(self, node: Any) -> None:
        name, rank = name_of(node), self._rank(node)
        if name in ("permute", "transpose", "swapaxes", "t"):
            self._ordered(node, [_PLACES.get(one, one) for one in self._order(node, rank)])
        elif name in EACH or (name in ("max", "min") and len(node.args) > 1 and isinstance(node.args[1], fx.Node)):
            self._each(node)
        elif name in ("view", "reshape", "squeeze") and self._at(node) == 0 and self._first(node.args[0]) == 1:
            node.target, node.args, node.kwargs = "reshape", (node.args[0], -1, *self.shapes[node][1:]), {}
            node.op = "call_method"
        elif name in _DIM:
            self._along(node, name, rank)
        elif name in ("cat", "concat", "concatenate", "stack"):
            self._joined(node, name)
        elif node.target is operator.getitem:
            self._piece(node)
        elif (
            name in ("view", "reshape")
            and self._at(node) == 2
            and prod(self.shapes[node][:2]) == self._first(taken := node.args[0])
        ):
            node.args = (taken, listed(node.args[1:])[2], *self.shapes[node][:2], *self.shapes[node][3:])
            self.behind[node] = 2
        elif name in ("view", "reshape", "expand", "repeat") and self._at(node) == 1:
            wanted = listed(node.args[1:])
            if len(wanted) < 2 or (name in ("view", "reshape") and self._first(node) != self._first(node.args[0])):
                raise self._unknown(node, "shapes")
            node.args = (node.args[0], wanted[1], wanted[0], *wanted[2:])
            self.second.add(node)
        elif (name == "flatten" and (node.args[1:] or [*node.kwargs.values()] or [0])[0] not in (0, 1)) or (
            name == "unsqueeze" and (node.args[1:] or [*node.kwargs.values()])[0] % (rank + 1) > 1
        ):
            self.second.add(node)
        elif name in ("size", "getattr"):
            self._size(node)
        elif name != "dim":
            raise self._unknown(node, f"does {name}")

    def _first(self, node: Any) -> int:
        return int(self.shapes[node][0])

    def _size(self, node: Any) -> None:
        if name_of(node) == "size" and len(node.args) > 1:
            node.args = (node.args[0], _PLACES.get(node.args[1], node.args[1]))
        else:
            self.asked.add(node)

    def _each(self, node: Any) -> None:
        """Other values beside a sequence, in the places that they have then."""
        rank, beside = len(self.shapes[node]), dict[fx.Node, fx.Node]()
        for one in node.all_input_nodes:
            shape = self.shapes.get(one)
            if one in self.second or not isinstance(shape, tuple) or len(shape) < rank - 1 or not shape:
                continue
            if len(shape) == rank and MANY not in shape:
                beside[one] = self._before(node, "transpose", one, 0, 1)
            elif len(shape) == rank - 1 and self._at(one) == 0:
                beside[one] = self._before(node, "unsqueeze", one, 1)
            elif len(shape) == rank or shape[0] != 1:
                raise self._unknown(node, "reckons with what has another order beside")
        for one, turned in beside.items():
            node.replace_input_with(one, turned)
        self.second.add(node)

    def _before(self, node: Any, method: str, *args: Any) -> fx.Node:
        with self.graph.inserting_before(node):
            return self.graph.call_method(method, args)

    def _along(self, node: Any, name: str, rank: int) -> None:
        args, named = list(node.args), dict(node.kwargs)
        key = next((one for one in ("dim", "axis") if one in named), None)
        at = _DIM[name]
        if key is None and len(args) <= at:
            if name not in _DEFAULT:
                raise self._unknown(node, f"does {name} without a dimension")
            key, named["dim"] = "dim", _DEFAULT[name]
        told = named[key] if key else args[at]
        if isinstance(told, tuple | list):
            told = [_PLACES.get(one % rank, one % rank) for one in told]
        else:
            told = _PLACES.get(told % rank, told % rank)
        if key:
            named[key] = told
        else:
            args[at] = told
        node.args, node.kwargs = tuple(args), named
        if isinstance(self.shapes[node], list):
            self.giving.add(node)
        self._gave(node)

    def _joined(self, node: Any, name: str) -> None:
        maps, rank = node.args[0], self._rank(node)
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        place = dim % (rank + (name == "stack"))
        known = not isinstance(maps, tuple | list) or not self.second.issuperset(maps)
        if known or place == 1 or (name == "stack" and place == 0):
            raise self._unknown(node, f"does {name}")
        node.args, node.kwargs = (maps, 1 if place == 0 else place), {}
        self.second.add(node)

    def _piece(self, node: Any) -> None:
        index = node.args[1]
        first, *rest = index if isinstance(index, tuple) else (index,)
        second, *rest = rest or [slice(None)]
        if second != slice(None) or any(one is None or one is Ellipsis for one in (first, *rest)):
            raise self._unknown(node, f"takes {index!r}"[:80])
        node.args = (node.args[0], (slice(None), first, *rest))
        self._gave(node)

    def _took(self, node: Any, taken: Any) -> None:
        """One of several values, or of the sizes of one."""
        if taken in self.asked:
            node.args = (taken, _PLACES.get(node.args[1], node.args[1]))
        elif taken.op != "call_module" or node.args[1] == 0:
            self._gave(node)

    def _reads_first(self, node: Any) -> ModelError:
        return self._unknown(node, "reads with batch_first=True")

    def _unknown(self, node: Any, does: str) -> ModelError:
        layer = str(node.target) if node.op == "call_module" else node.name
        return refused(
            layer, f"{does} a sequence that stands before the batch", "put the batch first, batch_first=True"
        )
