"""A model as two halves of a derivative: what it makes of a batch at some places, and the gradient of its weights given
the slope of any loss at those places.

So a loss stays outside of the graph, in plain arrays, and one graph serves every loss that looks at the same places.
Which layers are in train mode and what is frozen is :mod:`talaria.training.loop`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, prod
from operator import getitem

import numpy as np
from torch.nn import Embedding, Module

from talaria.errors import ModelError
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs import reference
from talaria.programs.build import facts_of, sizes_of, written
from talaria.programs.graph import FLOAT, Draft, Graph, Port, Size, size_of
from talaria.programs.layers.base import Map, Pullback, Step, Whole, chained, refused
from talaria.programs.layers.batches import parted
from talaria.programs.layers.sequence import averaged as averaged_over
from talaria.programs.layers.sequence import closed, opened, sizes
from talaria.programs.shapes import Limits, Value, measure
from talaria.programs.step import BATCH, Entry, Passed, backward, entered, forward
from talaria.programs.tangent import tangent
from talaria.programs.vjp import Vjp
from talaria.training import loop
from talaria.training.objectives import INTO, LOGITS, MEAN, of_none, of_parts, uncalled, unknown
from talaria.training.taps import called, channels_last
from talaria.types import Recipe


def graph_of(
    module: Module,
    head: str,
    input_shape: Sequence[Size],
    only: Collection[str] | None,
    taps: Sequence[str],
    *,
    twice: bool = False,
    whole: Whole = frozenset,
) -> Graph:
    """The pass over one batch and the way back from ``taps`` (see :func:`talaria.training.engine.look`); ``module`` is
    frozen but for ``only`` (None: nothing is frozen, (): everything, and in eval mode).

    Inputs: ``x`` float32 (N, *input_shape), ``weight/<key>``, ``draw/<layer>`` of dropout, ``slope/<tap>``, the
    gradient of the loss by that tap. Outputs: ``tap/<tap>``, ``gradient/<key>`` of what is trained and reaches a tap,
    ``next/weight/<key>`` of the statistics that follow. Raises :class:`~talaria.errors.ModelError` for a layer that no
    program can hold, and for a tap that the model does not have. ``twice``: it is differentiated once more.
    """
    loop.freeze_but(module, only)
    draft = Draft()
    tapped = frozenset(called(module, tap.removeprefix(MEAN)) for tap in taps if tap.startswith(MEAN))
    step = Step(draft, head, twice=twice, tapped=tapped, whole=whole)
    done = forward(step, module, entered(draft, input_shape))
    outputs = [_tapped(step, module, done, tap) for tap in taps]
    backward(draft, done.tape)
    ports = {port.name: port for port in draft.inputs}
    for key, value in step.gradients.items():
        outputs.append((Port(f"gradient/{key}", FLOAT, ports[f"weight/{key}"].shape), value))
    for key, value in step.buffers.items():
        old = ports[f"weight/{key}"]
        outputs.append((Port(f"next/weight/{key}", old.dtype, old.shape), value))
    return draft.finish(outputs)


def packed(spec: ModelSpec, only: Collection[str] | None, taps: Sequence[str]) -> bytes:
    """The file of the derivative of ``spec`` at ``taps``, for what ``only`` trains.

    It is measured against float64 as a step is. Raises :class:`~talaria.errors.ModelError` for a layer without a rule,
    and where it errs more than twice as much as torch does in float32, and by more than sixteen of its roundings.
    """
    module = zoo.build(spec)
    graph = graph_of(module, zoo.head(spec), spec.input_shape, only, taps, whole=partial(zoo.whole, spec))
    return _proven(graph, spec, module, only, taps, sizes_of(graph, module))


def _proven(
    graph: Graph,
    spec: ModelSpec,
    module: Module,
    only: Collection[str] | None,
    taps: Sequence[str],
    sizes: Mapping[str, int],
) -> bytes:
    vjp, still = Vjp(graph), Recipe(momentum=0.0, smoothing=0.0, weight_decay=0.0)
    reckoned = partial(reference.derivative, module, only, taps)
    facts = facts_of(graph, spec, "all" if only is None else "some", still, sizes, vjp.run, reckoned)
    if not facts.exact and not isfinite(facts.parity["torch"]):
        raise ModelError(
            "program: torch finds no finite numbers here, as of a root or a norm of zeros that is differentiated "
            "twice; add a small number under it, or use differences of gradients"
        )
    data = written(graph, facts)
    Vjp.read(data)
    return data


def curved(spec: ModelSpec, only: Collection[str] | None = None) -> bytes:
    """The file of the derivative of ``spec`` by what ``only`` trains at its logits, with the derivative of that: along
    ``weight/along/<key>`` and ``slope/along/logits`` move ``tap/along/logits`` and ``gradient/along/<key>``.

    Measured, and refused, as :func:`packed` is.
    """
    module = zoo.build(spec)
    once = graph_of(
        module, zoo.head(spec), spec.input_shape, only, (LOGITS,), twice=True, whole=partial(zoo.whole, spec)
    )
    sizes = sizes_of(once, module)
    shapes = _shapes(once, sizes)
    learned = [port.name.removeprefix("gradient/") for port in once.outputs if port.name.startswith("gradient/")]
    moving = [*(f"weight/{key}" for key in learned), f"slope/{LOGITS}"]
    seen = tuple(port for port in once.outputs if not port.name.startswith("next/"))
    padding = {  # which learns nothing, so that nothing follows from it
        f"weight/{name}.weight": layer.padding_idx
        for name, layer in module.named_modules()
        if isinstance(layer, Embedding) and layer.padding_idx is not None
    }
    twice = tangent(replace(once, outputs=seen), moving, shapes, padding)
    return _proven(twice, spec, module, only, (LOGITS,), sizes)


def _shapes(graph: Graph, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of each value at some sizes."""

    given = {port.name: Value(tuple(size_of(one, sizes) for one in port.shape), port.dtype) for port in graph.inputs}
    return {name: value.shape for name, value in measure(graph, given, Limits()).outputs.items()}


def _tapped(step: Step, module: Module, done: Passed, tap: str) -> tuple[Port, str]:
    """The output of a tap; where something below it trains, its slope enters the tape."""
    layer = called(module, tap.removeprefix(MEAN)) if tap.startswith(MEAN) else ""
    found, entry, many = _at(done, f"{MEAN}{layer}" if layer else tap)
    draft = step.draft
    if many > 1 and not layer:
        raise of_parts(tap)
    places = found.lead or found.space
    if layer and places:
        last = len(places) == 1 and channels_last(module.get_submodule(layer))
        if last != bool(found.lead):
            raise refused(layer, "gives a sequence of which torch says nothing", "end it with a layer of torch")
    if layer and (found.lead or many > 1):
        mean, pull = _mean(step, tap, found, many)
        if entry is not None and entry.trains:
            slope = pull(draft.input(f"slope/{tap}", (BATCH, mean.channels)), (True,))[0]
            entry.slopes.extend([slope] if slope is not None else [])
        return Port(f"tap/{tap}", FLOAT, (BATCH, mean.channels)), mean.value
    if tap == LOGITS:
        shape = (BATCH, *sizes(found))
        if entry is not None and entry.trains:
            entry.slopes.append(closed(step, draft.input(f"slope/{tap}", shape), found))
        return Port(f"tap/{tap}", FLOAT, shape), opened(step, found.value, found)
    space = found.space
    spread = (1, 0, *range(2, 2 + len(space)))  # from a batch of channels to channels of a batch, and back
    averaged = layer and space != ()
    value, shape = found.value, (BATCH, found.channels, *space)
    if averaged:
        value, shape, spread = draft.mean(value, *range(2, 2 + len(space))), shape[:2], (1, 0)
    value = draft.transpose(value, *spread) if space else value
    if entry is not None and entry.trains:
        slope = draft.input(f"slope/{tap}", shape)
        slope = draft.transpose(slope, *spread) if space else slope
        if averaged:
            ones = (1,) * len(space)
            share = draft.constant(np.full((1, 1, *ones), 1 / prod(space)))
            slope = draft.op("Mul", draft.reshape(slope, 0, 0, *ones), share)
            slope = draft.op("Expand", slope, draft.op("Shape", found.value))
        entry.slopes.append(slope)
    return Port(f"tap/{tap}", FLOAT, shape), value


def _mean(step: Step, tap: str, x: Map, many: int) -> tuple[Map, Pullback]:
    """The mean over all places, and over the ``many`` parts of a sample."""
    ways, places = list[Pullback](), range(1, 1 + len(x.lead)) if x.lead else range(2, 2 + len(x.space))
    if places:
        x, way = averaged_over(step, tap, x, places)
        ways.append(way)
    if many > 1:
        parts, way = parted(step, tap, x, many)
        x, mean = averaged_over(step, tap, parts, 1)
        ways += [way, mean]
    return x, chained(*ways)


def _at(done: Passed, tap: str) -> tuple[Map, Entry | None, int]:
    """The map at a tap, the entry that made it (None for the batch itself), and how many parts of a sample stand one by
    one in its batch."""
    if tap == LOGITS:
        if len(sizes(done.out)) > 2:
            raise ModelError(
                f"program: the model gives {sizes(done.out)} for a sample; end it with Flatten and Linear, or where "
                "each step has a label with (steps, classes)"
            )
        return done.out, done.last, 1
    nodes = done.into if tap.startswith(INTO) else done.out_of if tap.startswith(MEAN) else {}
    node = nodes.get(tap.partition(" ")[2])
    if node is not None and node not in done.maps:  # what gives several values, of which the first is looked at
        picked = [one for one in node.users if one.target is getitem]
        if tap.startswith(MEAN) and not picked:
            raise of_none(tap)
        node = next((one for one in picked if one.args[1] == 0), node)
        if node not in done.maps:
            raise refused(tap.partition(" ")[2], "gives values of which the network reads one", "read all its states")
    if node is None and tap.startswith((INTO, MEAN)):
        raise uncalled(tap)
    if node is None or node not in done.maps:
        raise unknown(tap)
    return done.maps[node], done.tape.get(node), done.merged.get(node, 1)
