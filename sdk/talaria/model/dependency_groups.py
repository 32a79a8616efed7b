"""Which channels of a network stand and fall together, read from torch-pruning's dependency graph.

Every conv and linear layer's outputs are followed to all that consumes them; positions that one channel touches form
a class, and classes that touch the same layers form a channel group. The graph takes an operator that it does not
know for an element-wise one, so nothing here is believed before :mod:`talaria.model.prunability` has checked it by
computing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Module

from talaria.model import attention, recurrent
from talaria.model.cloning import clone
from talaria.model.inside import Inside, matrices
from talaria.model.masks import Axis, ChannelLayout
from talaria.model.packing import unpacked
from talaria.model.split import tied

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers with values per channel, in and out alike."""
INSTANCES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""The same, where they have weights: without any, nothing says how many channels are left."""

Side = tuple[str, str]
"""A layer's name and which of its dimensions: ``out`` or ``in``, or the ``heads`` of attention."""
Position = tuple[Side, int]

LONGEST, MOST = 8, 20
"""Where a walk through the graph ends: at this many times the widest dimension's channels, or visits per dependency.
ResNet-18, DenseNet-121 and ViT-B/16 need 1 of each."""

TRACE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    ArithmeticError,
)
"""What tracing or running a network of unknown make may raise."""


@dataclass
class Coupling:
    """Classes of coupled positions, before they are ordered into groups."""

    sides: dict[Side, int]
    """Channels of each layer's dimension."""
    parent: dict[Position, Position] = field(default_factory=dict)
    pinned: dict[Position, str] = field(default_factory=dict)
    """Positions that must all stay, with the reason."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layer name -> why its channels cannot be pruned safely."""

    def find(self, at: Position) -> Position:
        """The representative of the class of ``at``."""
        root = at
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        while self.parent[at] != root:
            self.parent[at], at = root, self.parent[at]
        return root

    def join(self, a: Position, b: Position) -> None:
        """Puts two positions into one class; the smaller name represents it, whatever the order."""
        low, high = sorted((self.find(a), self.find(b)))
        self.parent[high] = low

    def pin(self, at: Position, reason: str) -> None:
        self.pinned.setdefault(self.find(at), reason)


def is_depthwise(layer: Module) -> bool:
    """True for a convolution that maps each channel to itself alone."""
    return isinstance(layer, CONVS) and layer.groups == layer.in_channels == layer.out_channels and layer.groups > 1


def _of_groups(layer: Module) -> TypeGuard[nn.GroupNorm]:
    """True for a norm with weights over several groups of channels, of which each is normalized alone."""
    return isinstance(layer, nn.GroupNorm) and layer.affine and layer.num_groups > 1


def trace(model: Module, example: Tensor) -> Coupling:
    """The coupled positions of ``model`` on an input like ``example`` (batch, ...). ``model`` stays untouched."""
    twin = clone(model).eval()  # building leaves its model in eval mode and needs gradients everywhere
    for parameter in twin.parameters():
        parameter.requires_grad_(True)
    for layer in twin.modules():
        if isinstance(layer, Inside):  # whose factors follow what they stand beside
            layer.adapter = nn.ModuleDict()
    reused = dict(_reused(twin, example))
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, nn.RNNBase) and not (name and recurrent.prunable(layer)):
            reused.setdefault(name, f"is a {type(layer).__name__} of another form than torch's without proj_size")
        elif isinstance(layer, nn.MultiheadAttention) and not attention.prunable(layer):
            reused.setdefault(name, f"is a {type(layer).__name__} of another form than torch's with one in_proj_weight")
        elif isinstance(layer, nn.RNNBase):
            twin.set_submodule(name, recurrent.StandIn(layer).to(next(layer.parameters())))
    coupling = Coupling(dict(_sides(twin)))
    suspects = {**dict(_odd(twin)), **reused}
    coupling.refused.update(suspects)
    with torch.enable_grad(), unpacked(twin):
        graph = _graph(twin, example)
    walk = _Walk(graph, LONGEST * max(coupling.sides.values(), default=0))
    names = {module: name for name, module in _named(twin)}
    for layer, name in names.items():
        if isinstance(layer, (*CONVS, nn.Linear)) and layer in graph.module2node:
            walk.begin()
            try:
                _follow(graph, layer, names, coupling, suspects)
            except _RoundAndRoundError:
                _leave_whole(coupling, name, "reaches itself in a circle that tracing cannot follow")
            except TRACE_ERRORS as error:  # this layer's channels cannot be followed; those of the others may be
                _leave_whole(coupling, name, f"cannot be followed to what reads it ({type(error).__name__}: {error})")
        elif isinstance(layer, (*CONVS, nn.Linear)):
            # Not seen as a layer of its own (a functional call, an unused branch): nothing is known about it.
            suspects.setdefault(name, "is not reached by tracing")
    _tie_groups(twin, coupling)
    for name, reason in suspects.items():
        for side in ((name, "out"), (name, "in"), (name, "heads")):
            _pin_all(coupling, side, range(coupling.sides.get(side, 0)), f"layer {name!r} {reason}")
        coupling.refused.setdefault(name, reason)
    return coupling


def _graph(twin: Module, example: Tensor) -> Any:
    """torch-pruning's graph of ``twin``. A concatenation whose parts are of unknown widths, as in a cell that a network
    runs moment by moment, has no mapping of places there, where torch-pruning would end in a TypeError."""
    import torch_pruning
    from torch_pruning.dependency import shape_infer

    base: Any = torch_pruning.DependencyGraph  # the package ships no types
    shapes: Any = shape_infer

    class Graph(base):  # type: ignore[misc]
        def _build_dependency(self, module2node: Any) -> None:
            super()._build_dependency(module2node)
            shapes.init_shape_information(self)
            for node in module2node.values():
                if node.type == self.ops.OPTYPE.CONCAT:
                    widths = [shapes.infer_channels_between(self, part, node) for part in node.inputs]
                    if None in widths:
                        node.module.concat_sizes, node.enable_index_mapping = [], False

    return Graph().build_dependency(twin, example_inputs=example, verbose=False)


def _named(twin: Module) -> Iterable[tuple[str, Module]]:
    """All modules by name; a recurrent layer is the linear layer that stands in for it, and attention one with its
    output's."""
    for name, layer in twin.named_modules():
        owner = twin.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, recurrent.StandIn):
            yield name, layer.units
        elif owner is layer or not (isinstance(owner, recurrent.StandIn) or attention.prunable(owner)):
            yield name, layer


def _sides(model: Module) -> Iterable[tuple[Side, int]]:
    for name, layer in _named(model):
        if isinstance(layer, CONVS):
            yield (name, "out"), layer.out_channels
            if not is_depthwise(layer):
                yield (name, "in"), layer.in_channels
        elif isinstance(layer, nn.MultiheadAttention) and attention.prunable(layer):
            yield (name, "heads"), layer.num_heads
        elif isinstance(layer, nn.Linear):
            yield (name, "out"), layer.out_features
            yield (name, "in"), layer.in_features
        elif isinstance(layer, nn.PReLU):
            if layer.num_parameters > 1:
                yield (name, "out"), layer.num_parameters
        elif isinstance(layer, NORMS) or (isinstance(layer, INSTANCES) and layer.affine):
            yield (name, "out"), layer.num_features
        elif _of_groups(layer):
            yield (name, "out"), layer.num_channels


_KNOWN = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def _odd(model: Module) -> Iterable[tuple[str, str]]:
    for name, layer in model.named_modules():
        if isinstance(layer, (*CONVS, *NORMS, nn.Linear)):
            more = sorted(set(layer.state_dict()) - _KNOWN)
            if more:
                yield name, f"computes its weight from {more[0]!r}"


def _reused(model: Module, example: Tensor) -> Iterable[tuple[str, str]]:
    calls: Counter[str] = Counter()
    hooks = []
    for name, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            hooks.append(layer.register_forward_hook(lambda *_, name=name: calls.update([name])))
    try:
        with torch.no_grad():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    for name, count in calls.items():
        if count > 1:
            again = f"runs {count} times in one pass"
            yield name, f"{again}; a layer of its own for each would let it go, or nn.GRU for a cell"
    for shared in tied(model):
        for key in shared:
            yield key.rpartition(".")[0], f"shares its weights ({' and '.join(shared)})"


class _RoundAndRoundError(Exception):
    """A walk through the graph does not end."""


class _Walk:
    """Ends what torch-pruning would follow for ever: channels that a reshape spreads over more each time round."""

    def __init__(self, graph: Any, longest: int) -> None:
        dependencies = [dep for node in graph.module2node.values() for dep in node.dependencies]
        self._longest, self._most, self._left = longest, MOST * len(dependencies), 0
        for dep in dependencies:
            dep.index_mapping = _Watched(dep.index_mapping, self)

    def begin(self) -> None:
        """The walk from one more layer."""
        self._left = self._most

    def visit(self, mapping: Any, places: list[Any]) -> list[Any]:
        """What ``mapping`` makes of ``places``; looked at with one of them first, for some make a thousand of each."""
        if len(mapping(places[:1])) * len(places) > self._longest:
            raise _RoundAndRoundError
        out: list[Any] = mapping(places)
        return out

    def count(self) -> None:
        """One more dependency was looked at."""
        self._left -= 1
        if self._left < 0:
            raise _RoundAndRoundError


class _Watched(list[Any]):
    """The index mappings of one dependency, under the eyes of a walk."""

    def __init__(self, mappings: Iterable[Any], walk: _Walk) -> None:
        super().__init__(mappings)
        self._walk = walk

    def __iter__(self) -> Iterator[Any]:
        self._walk.count()
        return (None if mapping is None else partial(self._walk.visit, mapping) for mapping in super().__iter__())


def _follow(graph: Any, layer: Module, names: dict[Module, str], coupling: Coupling, suspects: dict[str, str]) -> None:
    root = (names[layer], "out")
    pruner = graph.get_pruner_of_module(layer)
    group = graph.get_pruning_group(layer, pruner.prune_out_channels, list(range(coupling.sides[root])))
    for item in group:
        dep, places = item
        node, origins = dep.target, item.root_idxs
        module = node.module
        if isinstance(module, nn.Parameter) or (isinstance(module, Module) and module in names):
            name = names[module] if isinstance(module, Module) else str(graph._param_to_name[module])
            inward = not graph.is_out_channel_pruning_fn(dep.handler)
            side = (name, "in" if inward else "out")
            if isinstance(module, nn.PReLU) and module.num_parameters == 1:
                continue
            if side not in coupling.sides or len(places) != len(origins):
                if (name, "heads") not in coupling.sides:
                    suspects.setdefault(name, f"is a {type(module).__name__}, whose channels cannot be taken out")
                for origin in origins:
                    coupling.pin((root, origin), f"reach {name!r}, a {type(module).__name__}")
                continue
            for place, origin in zip(places, origins, strict=True):
                coupling.join((root, origin), (side, place))
            if not inward and not node.outputs:
                _pin_all(coupling, root, origins, "are the model's output")
        elif node.type == graph.ops.OPTYPE.OUTPUT:
            _pin_all(coupling, root, origins, "are the model's output")


def _leave_whole(coupling: Coupling, name: str, reason: str) -> None:
    coupling.refused.setdefault(name, reason)
    _pin_all(coupling, (name, "out"), range(coupling.sides[name, "out"]), f"layer {name!r} {reason}")


def _pin_all(coupling: Coupling, root: Side, origins: Iterable[int], reason: str) -> None:
    for origin in origins:
        coupling.pin((root, origin), reason)


def _tie_groups(model: Module, coupling: Coupling) -> None:
    """The blocks of a grouped convolution lose the same relative channels, for its weight is one rectangle; channels of
    which GroupNorm takes one mean go together."""
    for name, layer in model.named_modules():
        if _of_groups(layer):
            each = layer.num_channels // layer.num_groups
            for at in range(layer.num_channels):
                coupling.join(((name, "out"), at - at % each), ((name, "out"), at))
        if not isinstance(layer, CONVS) or layer.groups == 1 or is_depthwise(layer):
            continue
        for side in ((name, "out"), (name, "in")):
            block = coupling.sides[side] // layer.groups
            for at in range(block, coupling.sides[side]):
                coupling.join((side, at % block), (side, at))


@dataclass(frozen=True)
class Draft:
    """A layout that has not been checked by computing yet."""

    layout: ChannelLayout
    refused: dict[str, str]


def draft(model: Module, coupling: Coupling, without: Iterable[str] = ()) -> Draft:
    """Orders classes into groups named after their first layer, and groups into the axes of tensors.

    Groups of ``without`` are left out, and with them every group that shares a dimension with unmasked positions.
    """
    members: dict[Position, list[Position]] = defaultdict(list)
    for side, size in coupling.sides.items():
        for at in range(size):
            members[coupling.find((side, at))].append((side, at))
    pinned = {coupling.find(at): reason for at, reason in coupling.pinned.items()}
    refused = dict(coupling.refused)
    order = {side: number for number, side in enumerate(coupling.sides)}
    families: dict[tuple[tuple[int, int], ...], list[Position]] = defaultdict(list)
    for root, places in members.items():
        spread = Counter(order[side] for side, _ in places)
        families[tuple(sorted(spread.items()))].append(root)

    groups: dict[str, list[Position]] = {}
    staying: dict[Position, str] = {}
    """Whose channels cannot go, by class."""
    sides = list(coupling.sides)
    kinds = (*CONVS, nn.Linear, nn.MultiheadAttention, *recurrent.GATES)
    writers = {name for name, layer in model.named_modules() if isinstance(layer, kinds)}
    for signature, roots in sorted(families.items()):
        outs = [sides[n][0] for n, _ in signature if sides[n][1] != "in" and sides[n][0] in writers]
        if not outs or len(roots) < 2:  # the model's input, or a single channel that must stay
            if outs:
                narrow = staying[roots[0]] = min(outs, key=lambda layer: coupling.sides.get((layer, "out"), 0))
                if roots[0] not in pinned and Counter(side for side, _ in members[roots[0]])[narrow, "out"] > 1:
                    refused.setdefault(narrow, "has channels that could only go all at once, for what reads them")
            continue
        name = _fresh(outs[0], groups)
        reasons = {pinned[r] for r in roots if r in pinned}
        if reasons or name in without:
            for reason in sorted(reasons - {"are the model's output"}):
                refused.setdefault(name, reason)
            groups[name] = []
            staying.update(dict.fromkeys(roots, name))
            continue
        groups[name] = sorted(roots, key=lambda root: min((order[s], at) for s, at in members[root]))
    alive = {name: roots for name, roots in groups.items() if roots}
    while True:
        channel = {root: (name, n) for name, roots in alive.items() for n, root in enumerate(roots)}
        axes: dict[Side, Axis] = {}
        broken: dict[str, str] = {}
        for side, size in coupling.sides.items():
            line = [channel.get(coupling.find((side, at))) for at in range(size)]
            touched = {entry[0] for entry in line if entry is not None}
            axis = _parse(line, {name: len(roots) for name, roots in alive.items()}) if touched else ()
            if axis is None:
                roots = [coupling.find((side, at)) for at, entry in enumerate(line) if entry is None]
                what = _beside(sorted({staying.get(root, "") for root in roots}))
                for name in touched:
                    broken.setdefault(name, f"shares {side[0]!r} with {what}")
            elif axis:
                axes[side] = axis
        if not broken:
            break
        refused.update({name: reason for name, reason in broken.items() if name not in refused})
        staying.update({root: name for name in broken for root in alive[name]})
        alive = {name: roots for name, roots in alive.items() if name not in broken}
    sizes = {name: len(roots) for name, roots in alive.items()}
    return Draft(ChannelLayout(sizes, _tensor_axes(model, axes)), refused)


def _beside(layers: list[str]) -> str:
    """What channels stand in one dimension with: those of ``layers``, which stay; "" is what no group is known of."""
    if not layers:
        return "channels in an order that no mask describes"
    if layers[0]:
        return f"channels of {', '.join(layers)}, which stay"
    return (
        "channels that no mask takes: the model's input, a first state, or those of a layer that is left whole; a "
        "layer of its own before the input would let these go"
    )


def _fresh(name: str, taken: dict[str, list[Position]]) -> str:
    number, fresh = 2, name
    while fresh in taken:
        fresh, number = f"{name}:{number}", number + 1
    return fresh


def _parse(line: list[tuple[str, int] | None], sizes: dict[str, int]) -> Axis | None:
    """``line`` as segments: whole groups in channel order, each channel over ``repeat`` neighbours; else None."""
    out: list[tuple[str, int]] = []
    at = 0
    while at < len(line):
        first = line[at]
        if first is None or first[1] != 0:
            return None
        repeat = 1
        while at + repeat < len(line) and line[at + repeat] == first:
            repeat += 1
        size = sizes[first[0]]
        if line[at : at + size * repeat] != [(first[0], n // repeat) for n in range(size * repeat)]:
            return None
        out.append((first[0], repeat))
        at += size * repeat
    return tuple(out)


def _tensor_axes(model: Module, axes: dict[Side, Axis]) -> dict[str, tuple[Axis, ...]]:
    out: dict[str, tuple[Axis, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and (name, "heads") in axes:
            out |= attention.axes_of(name, layer, axes[name, "heads"])
        rows, columns = axes.get((name, "out"), ()), axes.get((name, "in"), ())
        if not rows and not columns:
            continue
        if isinstance(layer, nn.RNNBase):
            out |= recurrent.axes_of(name, layer, rows, columns)
            continue
        if isinstance(layer, CONVS) and not is_depthwise(layer):
            columns = columns[: len(columns) // layer.groups]
        for key, tensor in layer.state_dict(prefix=f"{name}." if name else "").items():
            if tensor.dim() == 1 and rows:
                out[key] = (rows,)
            elif tensor.dim() >= 2:
                out[key] = (rows, columns, *[()] * (tensor.dim() - 2))
    for name, layer in model.named_modules():
        for factors, key in matrices(layer.base).items() if isinstance(layer, Inside) else ():
            rows, columns = out.get(f"{name}.base.{key}", ((), ()))
            if rows:
                out[f"{name}.adapter.{factors}.up.weight"] = (rows, ())
            if columns:
                out[f"{name}.adapter.{factors}.down.weight"] = ((), columns)
    return out
