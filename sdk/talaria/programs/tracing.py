"""A module's forward pass as a list of calls, followed without values; what it asks of shapes is answered.

The pass may loop over a shape, compare sizes or cut a table by one. Only the batch's size has no value here, and what
depends on it cannot be followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cached_property, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Variable
from torch.fx.proxy import TraceError
from torch.nn import LSTM, Embedding, Module, RNNBase
from torch.nn.utils import rnn

from talaria.model.called import by_place
from talaria.model.dependency_groups import TRACE_ERRORS
from talaria.model.following import Follower
from talaria.model.inside import Inside, base_of
from talaria.model.packing import Padded, pack, pad, replaced
from talaria.programs.in_place import Filling, changes, require_seen
from talaria.programs.layers.base import refused
from talaria.programs.layers.placing import placed
from talaria.programs.layers.spelled import spelled
from talaria.programs.layers.table import pass_of, rule_of
from talaria.seeds import ALONE

MANY = 9973
"""What ``len(x)`` is for a batch: Python wants a number there. No layer is as wide, and what would be is measured."""


_LOOKING_UP = (torch.gather, "gather", operator.getitem)
"""Calls whose arguments behind the first one are places."""


class Tracer(Follower):
    """Follows a module, and keeps which value enters and which leaves each module inside."""

    proxy_buffer_attributes = True

    def __init__(self, input_shape: Callable[[], Sequence[int]]) -> None:
        """``input_shape`` are the sizes of one sample, asked for when the pass looks at a shape."""
        super().__init__()
        self.into: dict[str, fx.Node] = {}
        self.out_of: dict[str, fx.Node] = {}
        self._input_shape = input_shape
        self._known: dict[tuple[fx.Node, int], Any] = {}
        self.answering = False
        self.said: str | None = None
        """The call that is being put together of others: a refusal names what the pass says."""
        self.changed: dict[fx.Node, fx.Node] = {}
        """By what the pass changed in place, what it became."""
        self.unpacked = False
        """Whether sequences were unpacked to a length that the batch decides."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """As fx follows it, without sizes and pieces that nobody reads."""
        others: dict[Callable[..., Any], Callable[..., Any]] = {
            rnn.pack_padded_sequence: _packed,
            rnn.pad_packed_sequence: self._padded,
            Variable: lambda x, *_, **named: x,  # which is a tensor's old name
        }
        with ALONE, _followed_sizes(self), replaced(root, others), _as_it_was(root):
            graph = super().trace(root, concrete_args)
        require_seen(graph, self.changed)
        for node in reversed(graph.nodes):
            if not node.users and node.target in _LOOKS:
                graph.erase_node(node)
        return graph

    def call_module(self, m: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As fx follows it; of a module that is used twice the last time stays, as with a hook."""
        if self.answering or self.elsewhere:
            return forward(*args, **kwargs)
        args, kwargs = by_place(m, args, kwargs)
        given, own = (args or (None,))[0], base_of(m)
        if isinstance(own, RNNBase):
            args, kwargs = _beginning(own, *args, **kwargs), {}
        plain = pass_of(m)
        forward = forward if plain is None else partial(plain, m)
        name, found = self.path_of_module(m), super().call_module(m, forward, args, kwargs)
        if args and isinstance(args[0], fx.Proxy):
            self.into[name] = args[0].node
        if isinstance(found, fx.Proxy):
            self.out_of[name] = found.node
        return _ended(own, given, found) if isinstance(own, RNNBase) else found

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whatever has a rule is one layer, and so are torch's own; the rest is looked into."""
        if pass_of(m) is not None:
            return False
        return rule_of(m) is not None or isinstance(m, Inside) or super().is_leaf_module(m, module_qualified_name)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any, **rest: Any
    ) -> Any:
        """A call as a value that is followed; of functions that are others put together, what these come to."""
        if (does := changes(target)) and kind == "call_method" and isinstance(args[0], _Value):
            return args[0].become(self.create_proxy(kind, does, args, kwargs))
        said = spelled(target, args, kwargs) if kind in ("call_function", "call_method") else None
        if not said:
            if self.said and not more:
                rest["name"] = self.said
            return super().create_proxy(kind, target, args, kwargs, *more, **rest)
        before = self.said
        self.said = before or (target if isinstance(target, str) else target.__name__)
        try:
            return said(*args, **kwargs)
        finally:
            self.said = before

    def create_arg(self, a: Any) -> Any:
        """As fx has it; of a tensor that is laid out by a batch's size, :data:`MANY`, behind another, one of it is."""
        axis = a.shape.index(MANY) if type(a) is Tensor and MANY in a.shape else 0
        if axis and bool(a.any()) and torch.equal(a, a.narrow(axis, 0, 1).expand(a.shape)):
            return self.create_proxy("call_method", "expand", (a.narrow(axis, 0, 1).clone(), *a.shape), {}).node
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A tensor of the module, as a value to be followed."""
        return attr_val if self.answering else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for a value."""
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """What a comparison of sizes says."""
        return bool(self.number(obj, "a condition"))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """One size after the other, or one moment where these stand before the batch."""
        few = self._answered(obj.node, MANY)
        each = isinstance(few, tuple) or (isinstance(few, Tensor) and few.dim() > 0 and len(few) != MANY)
        return iter([operator.getitem(obj, i) for i in range(len(few))]) if each else super().iter(obj)

    def number(self, obj: fx.Proxy, where: str) -> int:
        """A size as a number. Raises TraceError for what is none, and what the batch decides."""
        found, alone = (self._answered(obj.node, batch) for batch in (MANY, 1))
        if not isinstance(found, int):
            raise TraceError(f"{obj.node.name} is {where}")
        if found != alone:
            raise TraceError(f"the batch's size is {where}")
        return found

    def sizes(self, obj: fx.Proxy) -> Any:
        """The sizes of a value: numbers, but what the batch decides."""
        whole = self.create_proxy("call_method", "size", (obj,), {})
        try:
            found, alone = (self._answered(obj.node, batch).shape for batch in (MANY, 1))
        except (AttributeError, TraceError):  # whoever reads it next says what it is
            return whole
        pairs = enumerate(zip(found, alone, strict=True))
        return tuple(many if many == one else operator.getitem(whole, i) for i, (many, one) in pairs)

    def kind(self, obj: fx.Proxy) -> torch.dtype:
        """What a value's numbers are: float32 where it cannot be told."""
        try:
            found = self._answered(obj.node, MANY)
        except TraceError:
            return torch.float32
        return found.dtype if isinstance(found, Tensor) else torch.float32

    def length(self, obj: fx.Proxy) -> int:
        """The first size of a value: :data:`MANY` for a batch."""
        found = self._answered(obj.node, MANY)
        return len(found)

    def rank(self, obj: fx.Proxy) -> int:
        """How many dimensions a value has."""
        rank: int = self._answered(obj.node, MANY).ndim
        return rank

    def shape(self, node: fx.Node) -> Any:
        """The sizes of what a node gives for a batch of :data:`MANY`, or a list of those of several values; None of
        what is no tensor, or cannot be told."""
        try:
            return _shape(self._answered(node, MANY)) if node.op != "output" else None
        except TraceError:
            return None

    def _answered(self, node: fx.Node, batch: int) -> Any:
        """What a node gives for a batch of this size: of a tensor the shape alone (it lies on torch's ``meta``)."""
        wanted, ahead = set[fx.Node](), [node]
        while ahead:
            one = ahead.pop()
            if one not in wanted and (one, batch) not in self._known:
                wanted.add(one)
                ahead.extend(one.all_input_nodes)
        for one in self.graph.nodes:
            if one in wanted:
                self.answering = True
                try:
                    self._known[one, batch] = self._run(one, batch)
                except TRACE_ERRORS as why:
                    raise TraceError(f"{one.name}: {str(why)[:80]}") from None
                finally:
                    self.answering = False
        return self._known[node, batch]

    def _padded(
        self, sequence: Padded, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
    ) -> Any:
        """What a packed sequence is unpacked to."""
        whole = sequence.ordered(True).shape[1]
        if padding_value or total_length not in (None, whole):
            what = f"pads by {padding_value} to {total_length}"
            raise refused("pad_packed_sequence", what, f"let it pad by 0 to {whole}, total_length=x.size(1)")
        self.unpacked |= total_length is None
        return pad(sequence, batch_first)

    def _run(self, node: fx.Node, batch: int) -> Any:
        if node.op == "placeholder":
            return torch.empty((batch, *self._input_shape()), device="meta")
        target: Any = node.target
        if node.op == "get_attr":
            layer, _, name = target.rpartition(".")
            return getattr(self.root.get_submodule(layer), name).detach().to("meta")
        args, named = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: self._known[one, batch])
        with torch.no_grad():
            if node.op == "call_module":
                own = self.root.get_submodule(target)
                args = args[:2] if isinstance(base_of(own), RNNBase) else args  # without lengths
                args = _whole(args) if isinstance(own, Embedding) else args
                return deepcopy(own).to("meta").eval()(*args, **named)
            if target in _LOOKING_UP:
                args = (*args[:1], *_whole(args[1:]))
                named = {name: _whole(one) if name == "index" else one for name, one in named.items()}
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **named)
            found = target(*args, **named)
        return found.to("meta") if isinstance(found, Tensor) else found


def _whole(given: Any) -> Any:
    """Places, which are numbers as all others where a pass is followed, as torch wants them."""
    return fx.node.map_aggregate(
        given, lambda one: one.long() if isinstance(one, Tensor) and one.is_floating_point() else one
    )


def _packed(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Padded:
    if enforce_sorted:
        what = "packs samples in the order of their lengths, which a batch has not"
        raise refused("pack_padded_sequence", what, "give it enforce_sorted=False")
    return pack(input, lengths, batch_first)


def _beginning(own: RNNBase, input: Any, hx: Any = None) -> tuple[Any, ...]:
    """What a recurrent layer is called with: its sequence, its first state or both of an LSTM, and the lengths of a
    packed one."""
    if isinstance(own, LSTM) and isinstance(hx, fx.Proxy):
        hx = operator.getitem(hx, 0), operator.getitem(hx, 1)
    if isinstance(input, Padded):
        return input.ordered(own.batch_first), hx, input.lengths
    return (input,) if hx is None else (input, hx)


def _ended(own: RNNBase, given: Any, found: Any) -> Any:
    """What a recurrent layer gives: its states, packed as what it was given, and the last ones, of an LSTM a pair."""
    states = Padded(found[0], given.lengths, own.batch_first) if isinstance(given, Padded) else found[0]
    last = found[1]
    return states, (last[0], last[1]) if isinstance(own, LSTM) else last


def takes(user: fx.Node) -> bool:
    """Whether ``user`` takes a part of what it reads, or asks for its sizes."""
    return user.target in (operator.getitem, torch.unbind, "unbind", "size", getattr)


def _shape(found: Any) -> Any:
    if isinstance(found, Tensor):
        return tuple(found.shape)
    return [_shape(one) for one in found] if isinstance(found, tuple | list) else None


_LOOKS = ("size", operator.getitem, getattr, "detach", torch.empty, "new", "new_empty")
"""What nothing comes of that nobody reads."""


@contextmanager
def _followed_sizes(tracer: Tracer) -> Iterator[None]:
    """In this context what makes tensors takes a batch's size, which has no value, where torch wants one that has."""
    makers, here = {name: getattr(torch, name) for name in ("zeros", "ones", "full", "empty")}, get_ident()

    def followed(plain: Callable[..., Any], kind: str, target: Any, skips: int = 0) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            given = [*args, *named.values()]
            each = [leaf for one in given for leaf in (one if isinstance(one, tuple | list) else (one,))]
            sizes = kind == "call_function" and not tracer.answering and get_ident() == here
            if any(isinstance(one, fx.Proxy) or (sizes and type(one) is int and one == MANY) for one in each):
                return tracer.create_proxy(kind, target, args[skips:], named)
            return plain(*args, **named)

        return made

    put: list[tuple[Any, str, Any]] = [
        (torch, name, followed(one, "call_function", one)) for name, one in makers.items()
    ]
    put += [(Tensor, name, followed(getattr(Tensor, name), "call_method", name)) for name in ("expand", "repeat")]
    put.append((Tensor, "new", followed(Tensor.new, "call_function", makers["empty"], 1)))
    plain = Module.__setattr__

    def keeps(self: Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and (name in self._buffers or name in self._parameters):
            layer = f"{tracer.path_of_module(self)}.{name}".lstrip(".")
            raise refused(layer, "is given another value by the pass", "leave it as it is")
        plain(self, name, value)

    put.append((Module, "__setattr__", keeps))
    with ExitStack() as others:
        for owner, name, one in put:
            others.enter_context(_in_place_of(owner, name, one))
        yield


@contextmanager
def _as_it_was(root: Module) -> Iterator[None]:
    """Afterwards no module has what its pass kept there to be looked at (``self.attention = share``); the tensors that
    are constants of the graph stay, which fx put there."""
    own = [(vars(module), dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        for now, before in own:
            constants = {name: value for name, value in now.items() if isinstance(value, Tensor) and name not in before}
            now.clear()
            now.update(before | constants)


@contextmanager
def _in_place_of(owner: Any, name: str, one: Any) -> Iterator[None]:
    """In this context ``owner`` has ``one`` under a name, which it may have from another class."""
    own = vars(owner).get(name)
    setattr(owner, name, one)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class _Value(fx.Proxy):
    """A value whose sizes are known as numbers, apart from the batch's, and which lies where all lie."""

    tracer: Tracer
    _node: fx.Node
    _filling: Filling | None = None
    _behind = False
    """Whether places were filled since the whole was read."""

    @property
    def node(self) -> fx.Node:
        """What gives the value: what it has become, where it was changed in place."""
        if self._behind and self._filling is not None:
            self._behind = False
            self._become(self._filling.whole().node)
        return self._node

    @node.setter
    def node(self, node: fx.Node) -> None:
        self._node = node

    def become(self, found: Any) -> Any:
        """This value from now on, where it is changed in place."""
        self._filling = None
        self._become(found.node)
        return self

    def _become(self, node: fx.Node) -> None:
        self.tracer.changed[self._node] = node
        self._node = node

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._filling is None:
            self._filling = Filling.of(self, index)
        if self._filling is not None and self._filling.take(index, value, self._wide):
            self._behind = True
        else:
            self.become(placed(self, index, value))

    @cached_property
    def _wide(self) -> tuple[Any, ...]:
        """Its shape, which does not change in place."""
        found = self.tracer.sizes(self.tracer.proxy(self._node))
        return found if isinstance(found, tuple) else ()

    @property
    def shape(self) -> Any:
        """As of a tensor."""
        return self.size()

    @property
    def values(self) -> Any:
        """The first of two values that come with names, as a maximum and its place."""
        return self.tracer.create_proxy("call_function", getattr, (self, "values"), {})

    @property
    def T(self) -> Any:  # noqa: N802 - as torch has it
        """With its dimensions the other way round."""
        return self.permute(*range(len(self.shape))[::-1])

    @property
    def mT(self) -> Any:  # noqa: N802
        """With its last two dimensions in each other's place."""
        return self.transpose(-2, -1)

    @property
    def data(self) -> Any:
        """Without what is learned by it."""
        return self.detach()

    @property
    def device(self) -> torch.device:
        """As of a tensor."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """As of a tensor."""
        return self.tracer.kind(self)

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return self.tracer.rank(self)

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        found = self.tracer.sizes(self)
        return found if dim is None else found[dim]

    def __len__(self) -> int:
        return self.tracer.length(self)

    def __index__(self) -> int:
        return self.tracer.number(self, "a number")
