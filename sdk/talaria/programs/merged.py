"""A pass that merges the batch with what stands behind it, ``x.reshape(-1, width)``, and parts them again.

Where all between the two read the last dimension or each value, the pass is one that keeps both: the values stand in
the same order. Else what is between them, such as convolutions over each frame, reads a batch that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.nn import LayerNorm, Module, RMSNorm

from talaria.errors import ModelError
from talaria.model.inside import base_of
from talaria.programs.layers.base import refused
from talaria.programs.layers.batches import apart, together
from talaria.programs.tracing import MANY
from talaria.programs.turning import EACH, LAYERS, name_of

_Shapes = Mapping[fx.Node, Any]


def parted(graph: fx.Graph, module: Module, shape_of: Callable[[fx.Node], Any]) -> dict[fx.Node, int]:
    """Rewrites ``graph``, a pass of ``module``, so that a batch is merged and parted by functions of their own alone
    (:mod:`talaria.programs.layers.batches`), if at all, and gives for each node that has to do with a batch how many of
    each sample stand in that. ``shape_of`` tells the sizes of what a node gives.

    Raises :class:`~talaria.errors.ModelError` for what reads the batch merged with time and apart from it.
    """
    if not any(name_of(node) in _FORMS and _may_merge(node, module) for node in graph.nodes):
        return {}
    shapes = {node: shape_of(node) for node in graph.nodes}  # as they are before anything is rewritten
    many = _many(graph, shapes)
    if max(many.values(), default=1) == 1:
        return {}
    apart_alike = all(_keeps(node, module, shapes, many) for node in many)
    found = {} if apart_alike else dict(many)
    for one, own in many.items():
        node: Any = one
        before = many.get(node.args[0], own) if name_of(node) in _FORMS else own
        if apart_alike and before != own:
            _form(node, node.args[0], (*_between(shapes, node), *shapes[node][1:]))
        elif before * own > 1 and name_of(node) in _FORMS:
            found |= _reformed(node, shapes, before, own)
        elif any(many.get(read, own) != own for read in node.all_input_nodes) and name_of(node) not in _JOINS:
            raise _mixes(node)
    return found


_JOINS = ("cat", "concat", "concatenate")
"""What puts samples behind samples, which is refused where it is written."""
_FORMS = ("view", "reshape", "flatten", "unflatten")


def _many(graph: fx.Graph, shapes: _Shapes) -> dict[fx.Node, int]:
    """How many of each sample stand in the batch of what a node gives, if it has one that has been first."""
    many, others = dict[fx.Node, int](), set[fx.Node]()
    for node in graph.nodes:
        has = _batch_of(shapes[node])
        begins = shapes.get(node.args[0]) if name_of(node) in _FORMS else None
        turned = begins is not None and node.args[0] in many and begins[0] % MANY
        if has > MANY and (turned or others.intersection(node.all_input_nodes)):
            others.add(node)  # a sequence before the batch, which others follow
        elif has:
            many[node] = has // MANY
    return many


def _batch_of(shape: Any) -> int:
    """The batch's size in a shape, or in the first one of several; 0 where there is none."""
    if isinstance(shape, list):
        return next(filter(None, map(_batch_of, shape)), 0)
    return next((size for size in shape or () if size and size % MANY == 0), 0)


def _may_merge(node: Any, module: Module) -> bool:
    """Whether a node of :data:`_FORMS` may put another size first than its batch, by what it says alone: to run a pass
    for its sizes makes torch import its compiler, seconds and a hundred MB."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "start_dim", 0) == 0)
    if name_of(node) == "unflatten":
        return False
    if name_of(node) == "flatten":
        return bool((*node.args, node.kwargs.get("start_dim", 0))[1] == 0)
    first = (*node.args, *node.kwargs.values())[1]
    first = first[0] if isinstance(first, tuple | list) else first
    asked = isinstance(first, fx.Node) and name_of(first) in ("size", "getitem") and first.args[1:] == (0,)
    return not asked and first != MANY


def whole_batch(shape: Any) -> Any:
    """The sizes ``shape`` as they are where one of each sample stands in the batch."""
    if isinstance(shape, list):
        return [whole_batch(one) for one in shape]
    return shape and tuple(MANY if size and size % MANY == 0 else size for size in shape)


def _between(shapes: _Shapes, node: Any) -> tuple[int, ...]:
    """The sizes behind the batch that ``node`` merges with it; none where it does not, or changes more."""
    before, after = shapes.get(node.args[0]), shapes[node]
    if not before or not after or before[0] != MANY or after[0] <= MANY or after[0] % MANY:
        return ()
    many = len(before) - len(after)
    return tuple(before[1 : 1 + many]) if many > 0 and before[1 + many :] == after[1:] else ()


def _keeps(node: Any, module: Module, shapes: _Shapes, many: Mapping[fx.Node, int]) -> bool:
    """Whether a merged batch is merged of whole dimensions here, read as what is not, or parted."""
    read = [one for one in node.all_input_nodes if many.get(one, 1) > 1]
    if not read:
        return many[node] == 1 or name_of(node) == "unflatten" or bool(_between(shapes, node))
    if node.op == "call_module":
        reads = base_of(module.get_submodule(str(node.target)))
        last = isinstance(reads, LayerNorm | RMSNorm) and len(reads.normalized_shape) < len(shapes[node] or ())
        return type(reads) in LAYERS or last
    if name_of(node) in _FORMS:
        return many[node] == 1 and node.args[0] in read
    return name_of(node) in EACH and {*read} == {*node.all_input_nodes}


def _mixes(node: fx.Node) -> ModelError:
    layer = str(node.target) if node.op == "call_module" else node.name
    what = "reads the batch as one with what stands behind it, and as it is"
    return refused(layer, what, "part it before, as in x.view(len(x), -1, *x.shape[1:])")


def _reformed(node: Any, shapes: _Shapes, before: int, own: int) -> dict[fx.Node, int]:
    """Makes ``node``, of which ``before`` of each sample stand in the batch and ``own`` then, merge or part it alone;
    gives the nodes that bring its other sizes about."""
    x, was, now = node.args[0], shapes[node.args[0]], shapes[node]
    if was[0] != MANY * before or now[0] != MANY * own or max(before, own) % min(before, own):
        raise _mixes(node)
    many, behind, new = max(before, own) // min(before, own), now[1:], dict[fx.Node, int]()

    def inserted(call: Any, *args: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            made: fx.Node = node.graph.create_node(_kind(call), call, args)
        return made

    def formed(x: fx.Node, was: tuple[int, ...], behind: tuple[int, ...], own: int) -> fx.Node:
        """``x`` with other sizes behind the batch."""
        if was == behind:
            return x
        made = inserted("flatten", x, 1) if was and len(behind) == 1 else inserted("reshape", x, -1, *behind)
        new[made] = own
        return made

    if before < own:
        _call(node, together, formed(x, was[1:], (many, *behind), before))
    elif before == own:
        _form(node, x, behind)
    elif behind[:1] == (many,):
        _call(node, apart, formed(x, was[1:], behind[1:], before), many)
    else:
        new[parts := inserted(apart, x, many)] = own
        _form(node, parts, behind)
    return new


def _form(node: Any, x: fx.Node, behind: tuple[int, ...]) -> None:
    """Makes ``node`` give ``x`` with these sizes behind the batch."""
    _call(node, *(("flatten", x, 1) if len(behind) == 1 else ("reshape", x, -1, *behind)))


def _kind(call: Any) -> str:
    """What a node that calls this is called: methods go by their names."""
    return "call_method" if isinstance(call, str) else "call_function"


def _call(node: Any, call: Any, *args: Any) -> None:
    told = [one for one in node.all_input_nodes if one not in args]
    node.op, node.target = _kind(call), call
    node.args, node.kwargs = args, {}
    while told:  # sizes that nobody reads any more
        one = told.pop()
        if not one.users and name_of(one) in ("mul", "floordiv", "getitem", "size", "getattr"):
            told += one.all_input_nodes
            node.graph.erase_node(one)
