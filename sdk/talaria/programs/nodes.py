"""What a node of a traced pass is: a layer with the rule that it follows, or what it stands for where it is none: a
shape, a number, a parameter, several values of which others take one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch.nn import Embedding, Identity, Module, MultiheadAttention

from talaria.errors import ModelError
from talaria.model.inside import base_of
from talaria.programs.layers.alone import looked_up, passed, turned
from talaria.programs.layers.base import Map, Pullback, Rule, Step, listed, refused
from talaria.programs.layers.broadcast import beside, cut, stacked
from talaria.programs.layers.calls import BATCH as ANY_BATCH
from talaria.programs.layers.calls import CALLS, EACH_SAMPLE, WITH_PARAMETERS, Batch, part, picked_and_turned
from talaria.programs.layers.deviations import PAIRS
from talaria.programs.layers.largest import largest, smallest
from talaria.programs.layers.parameters import Places, Weight, fixed, stored
from talaria.programs.layers.sequence import picked, sizes
from talaria.programs.layers.table import (
    FUNCTION_MENDS,
    FUNCTIONS,
    LAYERS,
    PARTS,
    PASSES,
    RECURRENT,
    masked,
    mend_of,
    parts_of,
    recurrent_of,
    rule_of,
    states_as,
)
from talaria.programs.layers.zeros import ZeroMap, Zeros, zeros, zeros_like
from talaria.programs.reading import States, asked, taken
from talaria.programs.tracing import MANY, takes


@dataclass
class Layer:
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


_HARMLESS = ("need_weights", "average_attn_weights")


def _alone(own: Module, args: Sequence[Any], held: Mapping[fx.Node, Any]) -> bool:
    """Whether a layer is called with what its rule reads alone."""
    first, *rest = args
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
    trains: bool = False
    """Whether its mask is a parameter that is trained."""


def resolved(step: Step, node: fx.Node, module: Module, held: Mapping[fx.Node, Any]) -> Any:
    """The layer that a node is, or what it stands for where it is none: a shape, a number, a parameter."""
    if node.op == "get_attr":
        layer, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(layer)
        found = getattr(owner, name).detach()
        many = MANY * step.merged
        if many in found.shape and not found.any():
            return zeros(step, node.name, found.shape, many)
        if found.dim() and len(found) == many and bool((found == found[:1]).all()):  # laid out for each sample
            found = found[:1]
        if found.dtype == torch.int64 and (places := found.flatten()).numel():
            first, here = int(places[0]), places.numel()
            if torch.equal(places, torch.arange(first, first + here)):
                if (first, here) == (0, many):
                    return EACH_SAMPLE
                if _looks_up(node, module):
                    return Places(first, first + here)
        kept = found.dtype == torch.float32 and name in owner.state_dict()
        return stored(layer, name, owner) if kept else found.clone()
    read = [arg for arg in node.args if isinstance(arg, fx.Node) and not isinstance(held[arg], Zeros)]
    if node.op == "call_module":
        layer, own = str(node.target), module.get_submodule(str(node.target))
        if type(own) is Embedding and read and isinstance(held[read[0]], Places):
            return held[read[0]].rows(layer, own)
        if type(own) is Embedding and read and isinstance(at := held[read[0]], torch.Tensor):
            found = _tried(node, lambda: looked_up(layer, own, at))
            if found is not None:
                return found
        if read and isinstance(held[read[0]], Weight) and (found := passed(layer, own, held[read[0]])) is not None:
            return found
        given = {key: one for key, one in node.kwargs.items() if key not in _HARMLESS and one not in (None, False)}
        mask, same, called = None, None, list(node.args)
        if isinstance(base_of(own), MultiheadAttention):
            called += [given.pop(name) for name in ("query", "key", "value") if name in given]
            read = [one for one in called if isinstance(one, fx.Node)]
            mask, seen = given.pop("key_padding_mask", None), given.pop("attn_mask", None)
            same = _same(layer, held[seen] if isinstance(seen, fx.Node) else seen)
            given.pop("is_causal", None)  # which says of attn_mask what that says itself
        rules, base = parts_of(own), recurrent_of(own)
        attended = base_of(own) if isinstance(base_of(own), MultiheadAttention) else base
        if attended is not None and attended.batch_first == step.second:
            what = "use batch_first=True, and (batch, length, width)"
            raise refused(layer, "reads sequences in another order", what)
        if base is not None:
            read, wanted = asked(node, layer, base, held, layer in step.tapped)
            return Layer(layer, states_as(wanted), own, read, gives=States(node, layer, base, wanted))
        if given or (rules is not None and not _alone(own, called, held)):
            raise refused(layer, f"is called with {sorted(given) or 'more than its input'}", "call it with maps alone")
        if rules is not None:
            masks = [mask] if isinstance(mask, fx.Node) and isinstance(held.get(mask), Map) else []
            if mask is not None and not masks:
                raise refused(layer, "has a key_padding_mask of no sample", "make it of the sample, as in x == 0")
            if same is not None:
                return _Several(layer, own, [*read, *masks], masked(same), same.trains)
            return _Several(layer, own, [*read, *masks], rules)
        rule = rule_of(own)
        if rule is None:
            raise _unknown(layer, node, module)
        return Layer(layer, rule, own, read)
    args, named = fx.node.map_aggregate(
        (node.args, dict(node.kwargs)), lambda one: held[one] if isinstance(one, fx.Node) else _batch(one)
    )
    if any(isinstance(one, Batch) for one in args) and getattr(node.target, "__module__", "") == "_operator":
        return _sizes(node, args)
    args, named = fx.node.map_aggregate((args, named), partial(_of_batch, step.merged))
    return _called(step, node, args, named, read)


_KEEP = ("to", "unsqueeze", "expand", "repeat", "long")


def _looks_up(node: fx.Node, module: Module) -> bool:
    """Whether rows of tables alone are looked up by the numbers at ``node``."""
    return all(
        type(module.get_submodule(str(user.target))) is Embedding
        if user.op == "call_module"
        else user.target in _KEEP and _looks_up(user, module)
        for user in node.users
    )


def _same(layer: str, mask: Any) -> Weight | None:
    """A mask that is the same for each sample, if there is one."""
    if mask is not None and not isinstance(mask, Weight | torch.Tensor):
        raise refused(layer, "has an attn_mask that is made of the sample", "make it of sizes alone")
    return _held(layer, mask) if isinstance(mask, torch.Tensor) else mask


def _held(layer: str, one: Any) -> Any:
    """What stands for a tensor of no state, as it meets a map: a number, or a tensor in the file."""
    if not isinstance(one, torch.Tensor):
        return one
    if one.dim() == 0:
        return one.item()
    if one.dtype in (torch.int64, torch.int32):  # which beside float32 is float32
        return fixed(one.float())
    if one.dtype not in (torch.float32, torch.bool):
        raise refused(layer, f"reads a tensor of {one.dtype}", "make it an nn.Parameter or a buffer of float32")
    return fixed(one)


def _batch(one: Any) -> Any:
    return Batch(one // MANY) if type(one) is int and one and one % MANY == 0 else one


def _of_batch(merged: int, one: Any) -> Any:
    """A batch's size where ``merged`` of each sample stand in the batch."""
    if not isinstance(one, Batch):
        return one
    return ANY_BATCH if one.times == merged else Batch(0)


def _sizes(node: fx.Node, args: tuple[Any, ...]) -> Any:
    """What is reckoned with a batch's size."""
    target: Any = node.target
    try:
        return target(*args)
    except TypeError:
        raise refused(node.name, "reckons with the batch's size", "keep the batch first and whole") from None


def _unknown(layer: str, node: fx.Node, module: Module) -> ModelError:
    """The refusal of all layers that have no rule, each with what to use instead."""
    names = [str(one.target) for one in node.graph.nodes if one.op == "call_module"]
    owners = {name: module.get_submodule(name) for name in names if _ruleless(module.get_submodule(name))}
    known = ", ".join(sorted(kind.__name__ for kind in (*LAYERS, *PARTS, *RECURRENT, *PASSES)))
    also = [f"{name!r} is a {type(own).__name__}" for name, own in owners.items() if name != layer]
    mends = [mend_of(own, known) for own in (owners[layer], *owners.values())]
    what = f"is a {type(owners[layer]).__name__}{''.join(f', {one}' for one in also)}, which has no rule"
    return refused(layer, what, "; ".join(dict.fromkeys(mends)))


def _ruleless(own: Module) -> bool:
    return parts_of(own) is None and recurrent_of(own) is None and rule_of(own) is None


def _called(step: Step, node: fx.Node, args: tuple[Any, ...], named: dict[str, Any], read: list[fx.Node]) -> Any:
    """A function, with its arguments."""
    target: Any = node.target
    name, first = getattr(target, "__name__", str(target)), args[0] if args else None
    if isinstance(first, _Several):
        return _part_of(node, first, args[1:], name, named.get("dim", 0))
    if isinstance(first, States):
        return _states_of(node, first)
    leaves = _nodes([*args, *named.values()])
    if any(isinstance(one, torch.Tensor) for one in leaves) and not any(isinstance(one, _FOLLOWED) for one in leaves):
        return _worked_out(node, args, named)
    if name not in ("getitem", "index_select"):
        args = tuple(_held(node.name, one) for one in args)
    named = {key: _held(node.name, one) for key, one in named.items()}
    first = args[0] if args else None
    empty = _zeros(step, node, args, named)
    if empty is not None:
        return empty
    if target is torch.arange and args == (ANY_BATCH,):
        return EACH_SAMPLE
    if target is torch.arange and all(isinstance(one, int) for one in args) and len(args) < 3:
        return Places(*(args if len(args) == 2 else (0, *args)))
    if isinstance(first, Places) and name in _KEEP:
        return first  # the same for each sample
    if isinstance(first, Map) and name == "getattr" and args[1] in ("device", "dtype"):
        return torch.device("cpu") if args[1] == "device" else torch.float32
    if target is torch._assert:  # of what the tracing has answered
        return None
    weights = [one for one in _nodes([*args, *named.values()]) if isinstance(one, Weight)]
    if weights:
        found = _of_weight(node, weights[0], args, named)
        if found is not None:
            return found
    if isinstance(first, Map) and (name in ("size", "dim") or (name == "getattr" and args[1] in ("shape", "ndim"))):
        whole = (Batch(step.merged), *(step.known(one) for one in sizes(first)))
        if name == "dim" or args[1:] == ("ndim",):
            return len(whole)
        return whole[args[1]] if name == "size" and args[1:] else whole
    if isinstance(first, Map) and name in ("permute", "transpose", "split", "chunk", "unbind"):
        apart = _in_pieces(step, node, name, first, *args[1:], **named)
        if apart:
            return _Several(node.name, Identity(), read[:1], _by_place([_with(call) for call in apart]))
    if name in PAIRS and isinstance(first, Map):
        both = [_with(of, *args[1:], **named) for of in PAIRS[name]]
        return _Several(node.name, Identity(), read, _by_place(both))
    along = [*args[1:], *named.values()]
    if target in EXTREMES and isinstance(first, Map) and along and isinstance(along[0], int):
        extreme = _with(EXTREMES[target], dim=along[0], keepdim=along[1:] == [True])
        return _Several(node.name, Identity(), read, {"0": extreme, "-2": extreme})
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
    if name in ("relu", "silu"):
        plain = len(args) == 1
    if found is not None and plain:
        return Layer(node.name, *found, read)
    call = CALLS.get(target)
    known = (Map, Weight, Batch, int, float, str, tuple, list, slice, type(None), type(Ellipsis), torch.dtype)
    if call is None or not all(isinstance(one, known) for one in (*args, *named.values())):
        what = f"is the function {name}{node.args[1:]}, which has no rule"
        raise refused(node.name, what, FUNCTION_MENDS.get(name, "use layers of torch.nn"))
    weights = [one for one in (*args, *named.values()) if isinstance(one, Weight)]
    if weights and call not in WITH_PARAMETERS:
        mend = "let it meet a map by + or * first, or make it so when the network is made"
        mend = "normalize it by F.normalize" if "norm" in name else mend
        raise refused(node.name, f"gives {name} a parameter or a table, for which it has no rule", mend)
    mapped = [one for one in read if isinstance(args[node.args.index(one)], Map)]
    try:
        signature(call).bind(step, node.name, *args, **named)
    except TypeError:
        raise refused(node.name, f"calls {name} in another way", "use layers of torch.nn") from None
    places = [i for i, one in enumerate(args) if isinstance(one, Map)]
    keys = [key for key, one in named.items() if isinstance(one, Map)]
    mapped += [one for key in keys if isinstance(one := node.kwargs[key], fx.Node)]

    def rule(step: Step, layer: str, own: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        filled = list(args)
        for place, x in zip(places, given, strict=False):
            filled[place] = x
        rest = dict(zip(keys, given[len(places) :], strict=True))
        return call(step, layer, *filled, **{**named, **rest})

    return Layer(node.name, rule, Identity(), mapped, any(one.trains for one in weights), bool(weights))


_FOLLOWED = (Map, Weight, Batch, Places, States, Zeros, _Several)
"""What is no number and no tensor at hand."""


def _worked_out(node: fx.Node, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What a call makes of tensors that are at hand, as masks are made of ones."""
    target: Any = node.target
    try:
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **named)
        return target(*args, **named)
    except (IndexError, RuntimeError, TypeError, ValueError) as why:
        raise refused(node.name, f"is no call that torch knows ({str(why)[:80]})", "correct it") from None


def _zeros(step: Step, node: fx.Node, args: tuple[Any, ...], named: dict[str, Any]) -> Zeros | ZeroMap | None:
    """The zeros that a call makes, or that zeros are in another form; None for another call."""
    target: Any = node.target
    name, first = getattr(target, "__name__", str(target)), args[0] if args else None
    if target is torch.zeros_like and isinstance(first, Map):
        return zeros_like(step, first)
    if target is torch.zeros or name == "new_zeros":
        wanted = _nodes(args if target is torch.zeros else args[1:]) or _nodes([named.get("size", ())])
        return zeros(step, node.name, [MANY if one is ANY_BATCH else one for one in wanted], MANY)
    if isinstance(first, Zeros) or (isinstance(first, ZeroMap) and name in _FORMS):
        if name not in _FORMS:
            if isinstance(first, Zeros) and name not in _STAY:
                raise refused(
                    node.name, "reckons with zeros", "begin with a parameter that is laid out for each sample"
                )
            return first if isinstance(first, Zeros) else None
        own = first.shape if isinstance(first, Zeros) else (MANY, *(step.known(one) for one in sizes(first)))
        like, rest = torch.empty(own, device="meta"), [MANY if one is ANY_BATCH else one for one in _nodes(args[1:])]
        try:
            found = like[args[1]] if name == "getitem" else getattr(like, name)(*rest, **named)
        except (IndexError, RuntimeError, TypeError, ValueError) as why:
            raise refused(node.name, f"makes no {name} of zeros of {own} ({str(why)[:60]})", "correct it") from None
        return zeros(step, node.name, found.shape, MANY)
    return None


_FORMS = ("getitem", "expand", "repeat", "unsqueeze", "squeeze", "transpose", "permute", "view", "reshape")
"""What zeros are asked for that changes their form alone."""
_STAY = ("to", "type_as", "float", "requires_grad_", "detach", "contiguous", "clone", "zeros_like", "tanh", "relu")
"""And after what they are as they were."""


def _in_pieces(step: Step, node: fx.Node, name: str, x: Map, *args: Any, **named: Any) -> list[Any]:
    """What gives the pieces of a map: of a dimension behind the batch, or of one that was put before the batch, as
    queries, keys and values are, or moments that are walked one by one. Nothing where it is another call."""
    wide = [step.known(one) for one in sizes(x)]
    if name == "unbind":
        axis = (args or (named.get("dim", 0),))[0] % (1 + len(wide))
        return [partial(picked, axis=axis, place=i) for i in range(wide[axis - 1])] if axis else []
    if name == "transpose":
        if {one % (1 + len(wide)) for one in (*args, *named.values())} != {0, 1} or not all(map(takes, node.users)):
            return []
        args = (1, 0, *range(2, 1 + len(wide)))
    elif name != "permute":
        how, dim = [*args, *(one for key, one in named.items() if key != "dim"), named.get("dim", 0)][:2]
        return _cut_in(wide, name, how, dim)
    order = listed(args)
    if len(order) < 3 or order[1] != 0 or sorted(order) != list(range(1 + len(wide))):
        return []
    left = [axis - (axis > order[0]) for axis in order[1:]]
    return [partial(picked_and_turned, axis=order[0], place=i, order=left) for i in range(wide[order[0] - 1])]


def _cut_in(wide: Sequence[int], name: str, how: Any, dim: int) -> list[Any]:
    """``chunk`` in so many pieces, ``split`` in pieces of one size or of the sizes that are listed."""
    axis = dim % (1 + len(wide))
    size = wide[axis - 1]
    many = how if isinstance(how, tuple | list) else [how]
    if axis == 0 or not all(isinstance(one, int) and one > 0 for one in many):
        return []
    if many is not how:
        each = -(-size // how) if name == "chunk" else how
        many = [min(each, size - start) for start in range(0, size, each)]
        if axis == len(wide) and len({*many}) == 1:
            return [partial(part, many=len(many), place=i) for i in range(len(many))]
    starts = [sum(many[:i]) for i in range(len(many))]
    fits = sum(many) == size
    return (
        [partial(cut, axis=axis, piece=slice(at, at + n)) for at, n in zip(starts, many, strict=True)] if fits else []
    )


def _of_weight(node: fx.Node, weight: Weight, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A parameter in another form, or a size of it; None for another call."""
    target: Any = node.target
    name, rest = getattr(target, "__name__", str(target)), args[1:]
    if args[:1] == (weight,) and (name == "size" or (name == "getattr" and rest == ("shape",))):
        return weight.shape[rest[0]] if name == "size" and rest else weight.shape
    return _tried(node, lambda: turned(target, args, named), f"takes {name}{rest!r} of a parameter of {weight.shape}")


def _tried(node: fx.Node, do: Callable[[], Any], what: str = "looks up rows") -> Any:
    """What ``do`` gives; a refusal where it raises what torch raises."""
    try:
        return do()
    except (IndexError, RuntimeError, TypeError, ValueError) as why:
        raise refused(node.name, f"{what} ({str(why)[:60]})"[:200], "take pieces that there are") from None


EXTREMES = {torch.max: largest, "max": largest, torch.min: smallest, "min": smallest}
JOINS = {**dict.fromkeys((torch.cat, torch.concat, torch.concatenate), beside), torch.stack: stacked}


def _side_by_side(node: fx.Node, dim: int = 0, **named: Any) -> Layer:
    if named:
        raise refused(node.name, f"is called with {sorted(named)}", "give torch.cat maps and dim alone")
    join = JOINS[node.target]  # type: ignore[index]
    rule: Rule = lambda step, layer, own, given: join(step, layer, given, dim)  # noqa: E731
    (maps, *_) = node.args
    return Layer(node.name, rule, Identity(), [one for one in maps if isinstance(one, fx.Node)])  # type: ignore[union-attr]


def _with(call: Any, *args: Any, **named: Any) -> Rule:
    return lambda step, layer, own, given: call(step, layer, given[0], *args, **named)


def _by_place(rules: Sequence[Rule]) -> dict[str, Rule]:
    """The rule of each of several values by its place, counted from either end."""
    return {str(place): rules[place] for place in range(-len(rules), len(rules))}


def _part_of(node: fx.Node, several: _Several, index: tuple[Any, ...], name: str, dim: int) -> Any:
    """One value of several; ``unbind`` gives what they are."""
    if name == "unbind" and (index or (dim,)) == (0,):
        return several
    if not node.users:
        return None
    place = "0" if name == "getattr" and index == ("values",) else str(index[0]) if name == "getitem" else ""
    rule = several.rules.get(place)
    if rule is None:
        what = f"gives several values, of which {node.name} takes {index!r}"[:160]
        raise refused(several.layer, what, f"take {' or '.join(several.rules)}")
    return Layer(several.layer, rule, several.own, several.read, several.trains)


def _states_of(node: fx.Node, states: States) -> Any:
    """What is taken of a recurrent layer's states."""
    found = taken(states, node)
    return found if isinstance(found, States) else Layer(node.name, found, Identity(), [states.node])
