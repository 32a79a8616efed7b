"""A pass that merges the batch with what stands behind it, ``x.reshape(-1, width)``, for layers that read the last
dimension or each value, and parts them again, as one that keeps both: the values stand in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.nn import LayerNorm, Module, RMSNorm

from talaria.model.inside import base_of
from talaria.programs.layers.base import refused
from talaria.programs.tracing import MANY
from talaria.programs.turning import EACH, LAYERS, name_of


def parted(graph: fx.Graph, module: Module, shape_of: Callable[[fx.Node], Any]) -> None:
    """Rewrites ``graph``, a pass of ``module``, so that no batch is merged. ``shape_of`` tells the sizes of what a node
    gives. Raises :class:`~talaria.errors.ModelError` for what is not known of a merged batch."""
    if not any(name_of(node) in _FORMS and _may_merge(node, module) for node in graph.nodes):
        return
    shapes = {node: shape_of(node) for node in graph.nodes}  # as they are before anything is rewritten
    merged = dict[fx.Node, tuple[int, ...]]()
    for node in graph.nodes:
        read = merged.keys() & {*node.all_input_nodes}
        if read:
            _follow(node, module, shapes, merged, merged[next(iter(read))])
        elif name_of(node) in _FORMS and (between := _between(shapes, node)):
            merged[node] = between
            _shape(node, between, shapes[node][1:])


_FORMS = ("view", "reshape", "flatten")


def _may_merge(node: Any, module: Module) -> bool:
    """Whether a node of :data:`_FORMS` may put another size first than its batch, by what it says alone: to run a pass
    for its sizes makes torch import its compiler, seconds and a hundred MB."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "start_dim", 0) == 0)
    if name_of(node) == "flatten":
        return bool((*node.args, node.kwargs.get("start_dim", 0))[1] == 0)
    first = (*node.args, *node.kwargs.values())[1]
    first = first[0] if isinstance(first, tuple | list) else first
    asked = isinstance(first, fx.Node) and name_of(first) in ("size", "getitem") and first.args[1:] == (0,)
    return not asked and first != MANY


def _between(shapes: dict[fx.Node, Any], node: Any) -> tuple[int, ...]:
    """The sizes behind the batch that ``node`` merges with it; none where it does not, or changes more."""
    before, after = shapes.get(node.args[0]), shapes[node]
    if not before or not after or before[0] != MANY or after[0] <= MANY or after[0] % MANY:
        return ()
    many = len(before) - len(after)
    return tuple(before[1 : 1 + many]) if many > 0 and before[1 + many :] == after[1:] else ()


def _follow(
    node: Any, module: Module, shapes: dict[fx.Node, Any], merged: dict[fx.Node, tuple[int, ...]], own: tuple[int, ...]
) -> None:
    shape = shapes.get(node)
    if node.op == "call_module":
        reads = base_of(module.get_submodule(str(node.target)))
        last = isinstance(reads, LayerNorm | RMSNorm) and len(reads.normalized_shape) < len(shape or ())
        if type(reads) in LAYERS or last:
            merged[node] = own
            return
    elif name_of(node) in _FORMS and shape and shape[0] == MANY:
        _shape(node, (), shape[1:])
        return
    elif name_of(node) in EACH and all(merged.get(one) == own for one in node.all_input_nodes):
        merged[node] = own
        return
    layer = str(node.target) if node.op == "call_module" else node.name
    what = "reads the batch as one with what stands behind it"
    raise refused(layer, what, "keep the batch first and whole, as Linear reads (batch, length, width)")


def _shape(node: Any, between: tuple[int, ...], behind: tuple[int, ...]) -> None:
    told = [one for one in node.all_input_nodes if one is not node.args[0]]
    node.op, node.target = "call_method", "reshape"
    node.args, node.kwargs = (node.args[0], -1, *between, *behind), {}
    while told:  # sizes that nobody reads any more
        one = told.pop()
        if not one.users and name_of(one) in ("mul", "floordiv", "getitem", "size", "getattr"):
            told += one.all_input_nodes
            node.graph.erase_node(one)
