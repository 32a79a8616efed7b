"""A whole training step as one graph: forward, cross-entropy, the backward pass of what trains, SGD with momentum.

The rules are :mod:`talaria.training.loop`'s: which layers are in train mode, what is frozen, how a batch of one sample
is normalized.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import fx
from torch.nn import Embedding, Identity, Linear, Module, MultiheadAttention

from talaria.errors import ConfigError, ModelError
from talaria.model.inside import base_of
from talaria.programs.graph import FLOAT, INT, Draft, Graph, Port, Size
from talaria.programs.layers.base import Map, Pullback, Rule, Step, refused
from talaria.programs.layers.broadcast import beside
from talaria.programs.layers.calls import BATCH as ANY_BATCH
from talaria.programs.layers.calls import CALLS, ZEROS, Batch, part, picked_and_turned, turned_weight
from talaria.programs.layers.largest import largest
from talaria.programs.layers.parameters import Places, Weight
from talaria.programs.layers.sequence import sizes
from talaria.programs.layers.table import (
    FUNCTION_MENDS,
    FUNCTIONS,
    LAYERS,
    MENDS,
    PARTS,
    PASSES,
    RECURRENT,
    parts_of,
    recurrent_of,
    rule_of,
    states_in,
)
from talaria.programs.layers.weighing import WIDEST
from talaria.programs.reading import States, form_of, taken
from talaria.programs.tracing import MANY, Tracer
from talaria.programs.updates import updates
from talaria.training import loop
from talaria.types import Recipe

BATCH = "N"


def graph_of(
    module: Module,
    head: str,
    input_shape: Sequence[Size],
    classes: int,
    recipe: Recipe,
    only: Collection[str] | None,
    pulled: bool = False,
) -> Graph:
    """The step that :func:`talaria.training.loop.train` takes on one batch; ``module`` is frozen as it says.

    Inputs: ``x`` float32 (N, *input_shape), ``y`` int64 (N,), ``lr``, ``weight/<key>``, ``momentum/<key>`` of what is
    trained, ``draw/<layer>`` of dropout. Outputs: ``loss`` and ``next/`` of the weights and momenta that change.
    ``recipe`` gives momentum, weight decay and smoothing. Where the step is ``pulled``, ``pull`` is the strength with
    which the trained weights are held near ``anchor/<key>``. Raises :class:`~talaria.errors.ModelError` for a layer
    that no program can hold.
    """
    if recipe.accumulate != 1:
        raise ConfigError(
            f"program: accumulate={recipe.accumulate} is not known to programs; use 1, and a smaller batch"
        )
    trained = loop.freeze_but(module, only)
    if not trained:
        raise ConfigError("program: nothing is trained; name a part that the model has")
    draft = Draft()
    x = entered(draft, input_shape)
    draft.input("y", (BATCH,), INT)
    draft.input("lr", ())
    if pulled:
        draft.input("pull", ())
    step = Step(draft, head)
    done = forward(step, module, x, folded=True)
    if done.out.space or done.out.lead:
        raise ModelError(f"program: the model gives maps of {sizes(done.out)}; end it with Flatten and Linear")
    loss, slope = _cross_entropy(step, done.out.value, classes, recipe.smoothing)
    done.last.slopes.append(slope)
    backward(draft, done.tape)
    return draft.finish([(Port("loss", FLOAT, ()), loss), *updates(step, recipe, pulled)])


def features_of(module: Module, head: str, input_shape: Sequence[int]) -> Graph:
    """What frozen layers make of a batch: ``features`` float32 (N, channels, ...) of ``x`` and ``weight/<key>``."""
    draft = Draft()
    space = tuple(size for size in input_shape[1:] if isinstance(size, int))
    x = Map(draft.input("x", (BATCH, *input_shape)), input_shape[0], space)
    out = forward(Step(draft, head, looks=True), module, x).out
    return draft.finish([(Port("features", FLOAT, (BATCH, out.channels, *out.space)), out.value)])


def statistics_of(module: Module, head: str, input_shape: Sequence[int]) -> Graph:
    """One batch's part in a pass that estimates BatchNorm statistics, as :func:`talaria.training.loop.calibrate` does;
    ``module`` has its BatchNorm layers in train mode, and all others in eval mode.

    Inputs: ``x`` float32 (N, *input_shape), ``rate`` by which the statistics move (1/k for the k-th batch),
    ``weight/<key>``. Outputs: ``next/weight/<key>`` of the statistics and their counters.
    """
    draft = Draft()
    x = entered(draft, input_shape)
    step = Step(draft, head, rate=draft.input("rate", ()))
    forward(step, module, x)
    shapes = {port.name: port for port in draft.inputs}
    ports = {f"next/weight/{key}": shapes[f"weight/{key}"] for key in step.buffers}
    named = [Port(name, port.dtype, port.shape) for name, port in ports.items()]
    return draft.finish(list(zip(named, step.buffers.values(), strict=True)))


def entered(draft: Draft, input_shape: Sequence[Size]) -> Map:
    """The batch ``x`` (N, *input_shape), an input of the graph, as the layers read it."""
    x = draft.input("x", (BATCH, *input_shape))
    space = tuple(size for size in input_shape[1:] if isinstance(size, int))
    return Map(draft.transpose(x, 1, 0, *range(2, 2 + len(space))) if space else x, input_shape[0], space)


@dataclass
class Entry:
    """One layer's place in the pass: what it read, the way back, and whether anything trains up to here."""

    read: list[fx.Node]
    back: Pullback
    trains: bool
    slopes: list[str] = field(default_factory=list)
    """Gradients of its output, one from each layer that read it."""


@dataclass
class Passed:
    """A forward pass: its last map, each layer's place on the tape in the order of the pass (the last one that of the
    last map), and which map enters and leaves the module of a name."""

    out: Map
    tape: dict[fx.Node, Entry]
    maps: dict[fx.Node, Map]
    into: dict[str, fx.Node]
    out_of: dict[str, fx.Node]

    @property
    def last(self) -> Entry:
        """The entry of the last map."""
        return list(self.tape.values())[-1]


def forward(step: Step, module: Module, x: Map, *, folded: bool = False) -> Passed:
    """The pass of ``x`` through ``module``, written into the step's draft; ``folded``: what is normalized may stand
    without its scale and shift, where weights that read it take them in.

    Raises :class:`~talaria.errors.ModelError` for a layer that no program can hold.
    """
    _require_one_name(module)
    tracer = Tracer(lambda: [step.known(one) for one in sizes(x)])
    try:
        traced = tracer.trace(module)
    except (fx.proxy.TraceError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as why:
        raise ModelError(
            f"program: the forward pass of {type(module).__name__} depends on its values ({str(why)[:120]}); "
            "write it as layers without conditions, or train this model with torch"
        ) from None
    maps: dict[fx.Node, Map] = {}
    held: dict[fx.Node, Any] = {}
    tape: dict[fx.Node, Entry] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            if maps:
                raise ModelError(f"program: the model takes {node.name!r} too; give it one input")
            held[node] = maps[node] = x
            continue
        if node.op == "output":
            (last,) = node.args
            if not isinstance(last, fx.Node) or last not in tape:
                raise ModelError("program: the model gives more than the logits of its last layer; give one output")
            ordered = {**{n: e for n, e in tape.items() if n is not last}, last: tape[last]}
            return Passed(maps[last], ordered, maps, tracer.into, tracer.out_of)
        found = _found(step, node, module, held)
        if not isinstance(found, _Layer):
            held[node] = found
            continue
        layer, rule, own, read = found.layer, found.rule, found.own, found.read
        if any(one not in maps for one in read) or not (read or found.alone):
            raise refused(layer, "reads what no program holds", "feed it maps only")
        if _in_place(node, own) and read and len(read[0].users) > 1:
            raise refused(layer, "changes in place what another layer reads", "use inplace=False")
        trains = any(p.requires_grad for p in own.parameters()) or found.trains
        given = [maps[one] for one in read]
        step.folds = folded and all(given and _takes_in(user, node, module, given[0].lead) for user in node.users)
        maps[node], back = rule(step, layer, own, given)
        held[node] = found.gives or maps[node]
        tape[node] = Entry(read, back, trains or any(tape[one].trains for one in read if one in tape))
    raise ModelError("program: the model gives nothing; return its logits")


def _require_one_name(module: Module) -> None:
    """Refuse a tensor of two names: a state has it twice, and a program would write one of these."""
    names = dict[int, str]()
    for key, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), key)
        if first != key:
            mend = "keep a layer under one name, as in a Sequential alone"
            raise refused(key.rpartition(".")[0], f"shares its {key.rpartition('.')[2]} with {first!r}", mend)


@dataclass
class _Layer:
    """What a node of the pass does: its rule, and the nodes that it reads."""

    layer: str
    rule: Rule
    own: Module
    read: list[fx.Node]
    trains: bool = False
    alone: bool = False
    """Whether it reads a parameter, and need read no map."""
    gives: States | None = None
    """What stands for its map where others read it."""


def _takes_in(user: fx.Node, node: fx.Node, module: Module, lead: Sequence[int]) -> bool:
    """Whether what reads ``node`` are weights, narrow enough to take its scale and shift in."""
    if user.op != "call_module" or user.kwargs.get("key_padding_mask") is node:
        return False
    own = module.get_submodule(str(user.target))
    wide = own.out_features if type(own) is Linear else 3 * own.embed_dim if type(own) is MultiheadAttention else None
    return wide is not None and wide <= WIDEST * prod(lead)


_HARMLESS = ("need_weights", "average_attn_weights")


def _alone(own: Module, node: fx.Node, held: Mapping[fx.Node, Any]) -> bool:
    """Whether a layer is called with what its rule reads alone: a recurrent one without a first state."""
    first, *rest = node.args
    rest = [] if all(one in held and held[one] is ZEROS for one in _nodes(rest)) else rest
    nodes = [one for one in (first, *rest) if isinstance(one, fx.Node) and isinstance(held.get(one), Map)]
    return len(nodes) == 1 + len(rest) == (3 if isinstance(base_of(own), MultiheadAttention) else 1)


def _nodes(given: Any) -> list[Any]:
    """What is given, without the tuples and lists around it."""
    return [leaf for one in given for leaf in _nodes(one)] if isinstance(given, tuple | list) else [given]


@dataclass
class _Several:
    """What gives several values: the rule of each, by how it is taken."""

    layer: str
    own: Module
    read: list[fx.Node]
    rules: Mapping[str, Rule]


def _found(step: Step, node: fx.Node, module: Module, held: Mapping[fx.Node, Any]) -> Any:
    """The layer that a node is, or what it stands for where it is none: a shape, a number, a parameter."""
    if node.op == "get_attr":
        layer, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(layer)
        weight = Weight(layer, name, owner)
        if MANY in weight.tensor.shape and not weight.tensor.any():
            return ZEROS
        if weight.tensor.dtype == torch.int64 and (places := weight.tensor.flatten()).numel():
            first, many = int(places[0]), places.numel()
            if torch.equal(places, torch.arange(first, first + many)):
                return Places(first, first + many)
        if weight.tensor.dtype != torch.float32:
            what = f"reads {node.target!r} of {weight.tensor.dtype}"
            raise refused(node.name, what, "make it an nn.Parameter or a buffer of float32")
        return weight
    read = [arg for arg in node.args if isinstance(arg, fx.Node) and held[arg] is not ZEROS]
    if node.op == "call_module":
        layer, own = str(node.target), module.get_submodule(str(node.target))
        if type(own) is Embedding and read and isinstance(held[read[0]], Places):
            return held[read[0]].rows(layer, own)
        given = {key: one for key, one in node.kwargs.items() if key not in _HARMLESS and one not in (None, False)}
        given = {
            key: one for key, one in given.items() if key != "hx" or any(held.get(z) is not ZEROS for z in _nodes(one))
        }
        mask = given.pop("key_padding_mask", None) if isinstance(base_of(own), MultiheadAttention) else None
        rules, base = parts_of(own), recurrent_of(own)
        several = rules is not None or base is not None
        if given or (several and not _alone(own, node, held)):
            raise refused(layer, f"is called with {sorted(given) or 'more than its input'}", "call it with maps alone")
        if base is not None:
            form = "all" if layer in step.tapped else form_of(node, base)
            return _Layer(layer, states_in(form), own, read, gives=States(node, layer, base, form))
        if rules is not None:
            masks = [mask] if isinstance(mask, fx.Node) and isinstance(held.get(mask), Map) else []
            if mask is not None and not masks:
                raise refused(layer, "has a key_padding_mask of no sample", "make it of the sample, as in x == 0")
            return _Several(layer, own, [*read, *masks], rules)
        rule = rule_of(own)
        if rule is None:
            raise _unknown(layer, node, module)
        return _Layer(layer, rule, own, read)
    args, named = fx.node.map_aggregate(
        (node.args, dict(node.kwargs)), lambda one: held[one] if isinstance(one, fx.Node) else _batch(one)
    )
    return _called(step, node, args, named, read)


def _batch(one: Any) -> Any:
    return ANY_BATCH if type(one) is int and one == MANY else one


def _unknown(layer: str, node: fx.Node, module: Module) -> ModelError:
    """The refusal of all layers that have no rule, each with what to use instead."""
    names = [str(one.target) for one in node.graph.nodes if one.op == "call_module"]
    kinds = {name: type(module.get_submodule(name)) for name in names if _ruleless(module.get_submodule(name))}
    known = ", ".join(sorted(kind.__name__ for kind in (*LAYERS, *PARTS, *RECURRENT, *PASSES)))
    also = [f"{name!r} is a {kind.__name__}" for name, kind in kinds.items() if name != layer]
    mends = [MENDS.get(kind, f"use layers among {known}") for kind in dict.fromkeys((kinds[layer], *kinds.values()))]
    what = f"is a {kinds[layer].__name__}{''.join(f', {one}' for one in also)}, which has no rule"
    return refused(layer, what, "; ".join(dict.fromkeys(mends)))


def _ruleless(own: Module) -> bool:
    return parts_of(own) is None and recurrent_of(own) is None and rule_of(own) is None


def _called(step: Step, node: fx.Node, args: tuple[Any, ...], named: dict[str, Any], read: list[fx.Node]) -> Any:
    """A function, with its arguments."""
    target: Any = node.target
    name, first = getattr(target, "__name__", str(target)), args[0] if args else None
    if isinstance(first, _Several) and name == "unbind" and (args[1:] or (named.get("dim", 0),)) == (0,):
        return first
    if isinstance(first, _Several) and name == "getattr" and args[1] == "values":
        return _Layer(first.layer, first.rules["0"], first.own, first.read)
    if isinstance(first, _Several):
        return _part_of(node, first, args[1:], name)
    if isinstance(first, States):
        return _states_of(node, first)
    if target is torch.zeros or name == "new_zeros" or first is ZEROS:
        return ZEROS
    if target is torch.arange and all(isinstance(one, int) for one in args) and len(args) < 3:
        return Places(*(args if len(args) == 2 else (0, *args)))
    if isinstance(first, Places) and name in ("to", "unsqueeze", "expand", "repeat", "long"):
        return first  # the same for each sample
    if isinstance(first, Map) and name == "getattr" and args[1] in ("device", "dtype"):
        return torch.device("cpu") if args[1] == "device" else torch.float32
    if target is torch._assert:  # of what the tracing has answered
        return None
    if isinstance(first, Weight):
        found = _of_weight(node.name, name, first, args[1:], named)
        if found is not None:
            return found
    if isinstance(first, Map) and (name in ("size", "dim", "ndim") or (name == "getattr" and args[1] in ("shape",))):
        whole = (ANY_BATCH, *(step.known(one) for one in sizes(first)))
        return len(whole) if name == "dim" else whole[args[1]] if name == "size" and args[1:] else whole
    if isinstance(first, Map) and name == "chunk" and (args[2:] or (named.get("dim"),))[0] in (-1, len(sizes(first))):
        rules = {str(i): _with(partial(part, many=args[1], place=i)) for i in range(args[1])}
        return _Several(node.name, Identity(), read, rules)
    if isinstance(first, Map) and name in ("permute", "split"):
        apart = _in_pieces(step, name, first, *args[1:], **named)
        if apart:
            return _Several(node.name, Identity(), read[:1], {str(i): _with(call) for i, call in enumerate(apart)})
    along = [*args[1:], *named.values()]
    if target in (torch.max, "max") and isinstance(first, Map) and len(along) in (1, 2):
        largest_of = _with(partial(largest, dim=along[0], keepdim=along[1:] == [True]))
        return _Several(node.name, Identity(), read, {"0": largest_of})
    if getattr(target, "__module__", "") in ("_operator", "math") and not any(
        isinstance(a, Map | Weight) for a in args
    ):
        try:
            return target(*args)
        except TypeError:
            raise refused(node.name, "reckons with the batch's size", "keep the batch first and whole") from None
    if target in JOINS and args and isinstance(args[0], tuple | list) and all(isinstance(a, Map) for a in args[0]):
        return _side_by_side(node, *args[1:], **named)
    found = FUNCTIONS.get(target) if node.op in ("call_function", "call_method") else None
    plain = all(isinstance(arg, Map) for arg in args) and not named
    if name == "flatten":
        plain = (list(args[1:]) == [1] and not named) or named == {"start_dim": 1}
    if name == "gelu":
        plain = len(args) == 1 and named.get("approximate", "none") == "none"
    if name in ("relu", "silu"):
        plain = len(args) == 1
    if found is not None and plain:
        return _Layer(node.name, *found, read)
    call = CALLS.get(target)
    known = (Map, Weight, Batch, int, float, str, tuple, list, slice, type(None), type(Ellipsis), torch.dtype)
    if call is None or not all(isinstance(one, known) for one in (*args, *named.values())):
        what = f"is the function {name}{node.args[1:]}, which has no rule"
        raise refused(node.name, what, FUNCTION_MENDS.get(name, "use layers of torch.nn"))
    weights = [one for one in args if isinstance(one, Weight)]
    mapped = [one for one in read if isinstance(args[node.args.index(one)], Map)]
    mapped += [one for one in named_maps(node) if one not in mapped]
    try:
        signature(call).bind(step, node.name, *args, **named)
    except TypeError:
        raise refused(node.name, f"calls {name} in another way", "use layers of torch.nn") from None
    places = [i for i, one in enumerate(args) if isinstance(one, Map)]
    keys = [key for key, one in named.items() if isinstance(one, Map)]

    def rule(step: Step, layer: str, own: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        filled = list(args)
        for place, x in zip(places, given, strict=False):
            filled[place] = x
        rest = dict(zip(keys, given[len(places) :], strict=True))
        return call(step, layer, *filled, **{**named, **rest})

    return _Layer(node.name, rule, Identity(), mapped, any(one.trains for one in weights), bool(weights))


def _in_pieces(step: Step, name: str, x: Map, *args: Any, **named: Any) -> list[Any]:
    """What gives the pieces of a map: of equal parts of the channels at the end, or of a dimension that was put before
    the batch, as queries, keys and values are. Nothing where it is another call."""
    wide = [step.known(one) for one in sizes(x)]
    if name == "split":
        each, dim = (*args, *named.values(), 0)[:2]
        fits = dim in (-1, len(wide)) and isinstance(each, int) and each > 0 and wide[-1] % each == 0
        return [partial(part, many=wide[-1] // each, place=i) for i in range(wide[-1] // each)] if fits else []
    order = list(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else list(args)
    if len(order) < 3 or order[1] != 0 or sorted(order) != list(range(1 + len(wide))):
        return []
    left = [axis - (axis > order[0]) for axis in order[1:]]
    return [partial(picked_and_turned, axis=order[0], place=i, order=left) for i in range(wide[order[0] - 1])]


def _of_weight(layer: str, name: str, weight: Weight, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A parameter in another form, or a size of it; None for another call."""
    if name == "size" or (name == "getattr" and args == ("shape",)):
        return weight.shape[args[0]] if name == "size" and args else weight.shape
    try:
        return turned_weight(name, weight, args, named)
    except (IndexError, RuntimeError, TypeError, ValueError) as why:
        what = f"takes {name}{args!r} of a parameter of {weight.shape} ({str(why)[:60]})"
        raise refused(layer, what, "take pieces that there are") from None


JOINS = (torch.cat, torch.concat, torch.concatenate)


def _side_by_side(node: fx.Node, dim: int = 0, **named: Any) -> _Layer:
    if named:
        raise refused(node.name, f"is called with {sorted(named)}", "give torch.cat maps and dim alone")
    rule: Rule = lambda step, layer, own, given: beside(step, layer, given, dim)  # noqa: E731
    (maps, *_) = node.args
    return _Layer(node.name, rule, Identity(), [one for one in maps if isinstance(one, fx.Node)])  # type: ignore[union-attr]


def named_maps(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's named arguments."""
    return [one for one in node.kwargs.values() if isinstance(one, fx.Node)]


def _with(call: Any) -> Rule:
    return lambda step, layer, own, given: call(step, layer, given[0])


def _part_of(node: fx.Node, several: _Several, index: tuple[Any, ...], name: str) -> Any:
    """One value of several."""
    if not node.users:
        return None
    rule = several.rules.get(str(index[0])) if name == "getitem" else None
    if rule is None:
        what = f"gives several values, of which {node.name} takes {index!r}"[:160]
        raise refused(several.layer, what, "take its first one")
    return _Layer(several.layer, rule, several.own, several.read)


def _states_of(node: fx.Node, states: States) -> Any:
    """What is taken of a recurrent layer's states."""
    found = taken(states, node)
    return found if isinstance(found, States) else _Layer(node.name, found, Identity(), [states.node])


def _in_place(node: fx.Node, own: Module) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return bool(getattr(own, "inplace", False)) or name in ("iadd", "add_", "imul", "mul_", "relu_")


def _cross_entropy(step: Step, logits: str, classes: int, smoothing: float) -> tuple[str, str]:
    """The mean loss of a batch and its gradient by the logits (N, classes)."""
    draft = step.draft
    others = smoothing / classes
    levels = draft.constant([-others, smoothing - 1 - others])  # below zero, as the loss has them
    target = draft.op("OneHot", "y", draft.ints(classes), levels)
    log = draft.op("LogSoftmax", logits, axis=1)
    mean = draft.mean(draft.op("Mul", target, log), 0, 1)
    loss = draft.op("Mul", mean, draft.constant(float(classes)))
    return loss, draft.op("Div", draft.op("Add", draft.op("Exp", log), target), step.samples)


def backward(draft: Draft, tape: dict[fx.Node, Entry]) -> None:
    """From the last layer to the first that trains, beginning at the entries that have slopes; what only frozen layers
    feed gets no gradient."""
    for entry in reversed(tape.values()):
        if not entry.slopes or not entry.trains:
            continue
        wanted = [one in tape and tape[one].trains for one in entry.read]
        found = entry.back(draft.total(entry.slopes), wanted)
        for one, want, own in zip(entry.read, wanted, found, strict=True):
            if want and own is not None:
                tape[one].slopes.append(own)
