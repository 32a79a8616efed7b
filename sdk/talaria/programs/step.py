"""A whole training step as one graph: forward, cross-entropy, the backward pass of what trains, SGD with momentum.

The rules are :mod:`talaria.training.loop`'s: which layers are in train mode, what is frozen, how a batch of one sample
is normalized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import fx
from torch.nn import Linear, Module, MultiheadAttention

from talaria.errors import ConfigError, ModelError
from talaria.programs.graph import FLOAT, INT, Draft, Graph, Port, Size
from talaria.programs.layers.base import Map, Pullback, Step, Whole, refused
from talaria.programs.layers.recurrent import ROWS
from talaria.programs.layers.sequence import opened, sizes
from talaria.programs.layers.weighing import WIDEST
from talaria.programs.longest import require_none
from talaria.programs.merged import parted, whole_batch
from talaria.programs.nodes import Layer, resolved
from talaria.programs.tracing import Tracer
from talaria.programs.turning import batch_first, counted_with_the_batch_first, name_of
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
    whole: Whole = frozenset,
    widths: Mapping[str, int] | None = None,
) -> Graph:
    """The step that :func:`talaria.training.loop.train` takes on one batch; ``module`` is frozen as it says.

    Inputs: ``x`` float32 (N, *input_shape), ``y`` int64 (N,), ``lr``, ``weight/<key>``, ``momentum/<key>`` of what is
    trained, ``draw/<layer>`` of dropout. Outputs: ``loss`` and ``next/`` of the weights and momenta that change.
    ``recipe`` gives momentum, weight decay and smoothing. Where the step is ``pulled``, ``pull`` is the strength with
    which the trained weights are held near ``anchor/<key>``. ``whole`` gives the layers of which no mask takes an
    output, and ``widths`` the unpruned sizes of names in ``input_shape``. Raises
    :class:`~talaria.errors.ModelError` for a layer that no program can hold.
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
    step = Step(draft, head, whole=whole, widths=dict(widths or {}))
    done = forward(step, module, x, folded=True)
    if done.out.space or done.out.lead:
        raise ModelError(
            f"program: the model gives maps of {sizes(done.out)}, and a step is one of a class for each sample; end it "
            "with Flatten and Linear, or learn task='per_step' with engine='onnx' or a kit, which need no such file"
        )
    loss, move = _cross_entropy(step, done.out.value, classes, recipe.smoothing)
    done.last.slopes.append(move)
    backward(draft, done.tape)
    return draft.finish([(Port("loss", FLOAT, ()), loss), *updates(step, recipe, pulled)])


def features_of(module: Module, head: str, input_shape: Sequence[int], whole: Whole = frozenset) -> Graph | None:
    """What frozen layers make of a batch: ``features`` float32 (N, channels, ...) of ``x`` and ``weight/<key>``; None
    for a sequence whose channels come last."""
    step, out = _looked(module, head, input_shape, whole)
    return None if out.lead else _given(step, out)


def answers_of(module: Module, head: str, input_shape: Sequence[int], whole: Whole = frozenset) -> Graph:
    """What the whole model makes of a batch, called ``features`` too: (N, outputs), or (N, steps, outputs). Outputs are
    a number also where another layer than the head gives them, as one of two heads that are averaged."""
    step, out = _looked(module, head, input_shape, whole)
    return _given(step, replace(out, channels=step.held(out.channels)))


def _looked(module: Module, head: str, input_shape: Sequence[int], whole: Whole) -> tuple[Step, Map]:
    draft = Draft()
    space = tuple(size for size in input_shape[1:] if isinstance(size, int))
    x = Map(draft.input("x", (BATCH, *input_shape)), input_shape[0], space)
    step = Step(draft, head, looks=True, whole=whole)
    return step, forward(step, module, x).out


def _given(step: Step, out: Map) -> Graph:
    return step.draft.finish([(Port("features", FLOAT, (BATCH, *sizes(out))), opened(step, out.value, out))])


def statistics_of(module: Module, head: str, input_shape: Sequence[int], whole: Whole = frozenset) -> Graph:
    """One batch's part in a pass that estimates BatchNorm statistics, as :func:`talaria.training.loop.calibrate` does;
    ``module`` has those BatchNorm layers in train mode, and all others in eval mode.

    Inputs: ``x`` float32 (N, *input_shape), ``rate`` by which the statistics move (1/k for the k-th batch),
    ``weight/<key>``. Outputs: ``next/weight/<key>`` of the statistics and their counters.
    """
    draft = Draft()
    x = entered(draft, input_shape)
    step = Step(draft, head, rate=draft.input("rate", ()), whole=whole)
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
    merged: Mapping[fx.Node, int]
    """Of how many parts of each sample a map tells one by one, where it does."""

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
        what = f"program: the forward pass of {type(module).__name__}"
        raise ModelError(
            f"{what} depends on its values ({str(why)[:120]}); write it as layers without conditions, or train this "
            "model with torch"
        ) from None
    if tracer.unpacked:
        require_none(module, [step.known(one) for one in sizes(x)])
    merged = parted(traced, module, tracer.shape)
    second = batch_first(traced, module, lambda node: whole_batch(tracer.shape(node)))
    maps: dict[fx.Node, Map] = {}
    held: dict[fx.Node, Any] = {}
    tape: dict[fx.Node, Entry] = {}
    rows = set[fx.Node]()
    calls = Counter(str(node.target) for node in traced.nodes if node.op == "call_module")
    step.again = frozenset(name for name, many in calls.items() if many > 1)
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
            step.merged = 1
            whole = {n: one for n, one in maps.items() if n not in rows}
            ordered = {**{n: e for n, e in tape.items() if n is not last}, last: tape[last]}
            return Passed(maps[last], ordered, whole, tracer.into, tracer.out_of, merged)
        step.second, step.merged = node in second, merged.get(node, 1)
        with counted_with_the_batch_first(node, second):
            found = resolved(step, node, module, held)
        if not isinstance(found, Layer):
            held[node] = found
            if isinstance(found, Map):
                maps[node] = found
            continue
        layer, rule, own, read = found.layer, found.rule, found.own, found.read
        if any(one not in maps for one in read) or not (read or found.alone):
            raise refused(layer, "reads what no program holds", "feed it maps only")
        if _in_place(node, own) and read and len(read[0].users) > 1:
            raise refused(layer, "changes in place what another layer reads", "use inplace=False")
        trains = any(p.requires_grad for p in own.parameters()) or found.trains
        given = [maps[one] for one in read]
        step.folds = folded and bool(given) and _taken_in(node, module, given[0].lead)
        with counted_with_the_batch_first(node, second):
            maps[node], back = rule(step, layer, own, given)
        held[node] = found.gives or maps[node]
        if found.gives is not None and found.gives.asked.form in ROWS:
            rows.add(node)
        trains = trains or any(tape[one].trains for one in read if one in tape)
        tape[node] = Entry(read, _of_merged(step, back) if step.merged > 1 else back, trains)
    raise ModelError("program: the model gives nothing; return its logits")


def _of_merged(step: Step, back: Pullback) -> Pullback:
    """The way back through a layer, with as many of each sample in the batch as on the way."""
    many = step.merged

    def inside(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        step.merged = many
        found = back(g, wanted)
        step.merged = 1
        return found

    return inside


def _require_one_name(module: Module) -> None:
    """Refuse a tensor of two names: a state has it twice, and a program would write one of these."""
    names = dict[int, str]()
    for key, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), key)
        if first != key:
            mend = "keep a layer under one name, as in a Sequential alone"
            raise refused(key.rpartition(".")[0], f"shares its {key.rpartition('.')[2]} with {first!r}", mend)


def _taken_in(node: fx.Node, module: Module, lead: Sequence[int]) -> bool:
    """Whether all that read rows are weights, narrow enough to take their scale and shift in."""
    return all(_takes_in(user, node, module, lead) for user in node.users)


def _takes_in(user: fx.Node, node: fx.Node, module: Module, lead: Sequence[int]) -> bool:
    if user.op != "call_module":
        return _averages(user, node, 2 + len(lead)) and _taken_in(user, module, lead)
    if user.kwargs.get("key_padding_mask") is node:
        return False
    own = module.get_submodule(str(user.target))
    wide = own.out_features if type(own) is Linear else 3 * own.embed_dim if type(own) is MultiheadAttention else None
    return wide is not None and wide <= WIDEST * prod(lead)


def _averages(user: fx.Node, node: fx.Node, many: int) -> bool:
    """Whether it is the mean of ``node``, of ``many`` dimensions, over whole rows: over neither batch nor width."""
    if name_of(user) != "mean":
        return False
    first, *rest = user.args
    dim = rest[0] if rest else user.kwargs.get("dim")
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return first is node and all(isinstance(one, int) and 0 < one % many < many - 1 for one in dims)


def _in_place(node: fx.Node, own: Module) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return bool(getattr(own, "inplace", False)) or name in ("iadd", "imul", "relu_")


def _cross_entropy(step: Step, logits: str, classes: int, smoothing: float) -> tuple[str, str]:
    """The mean loss of a batch, and how the logits (N, classes) are to move: its gradient by them times -``lr``."""
    draft = step.draft
    others = smoothing / classes
    target = draft.op("OneHot", "y", draft.ints(classes), draft.constant([others, 1 + others - smoothing]))
    log = draft.op("LogSoftmax", logits, axis=1)
    mean = draft.mean(draft.op("Mul", target, log), 0, 1)
    loss = draft.op("Mul", mean, draft.constant(-float(classes)))
    rate = draft.op("Div", "lr", step.samples)
    return loss, draft.op("Mul", draft.op("Sub", target, draft.op("Exp", log)), rate)


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
