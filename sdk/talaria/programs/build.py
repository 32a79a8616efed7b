"""A model becomes a program: its step written as a graph, measured against float64, and packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from torch.nn import Module

from talaria.errors import ConfigError, ModelError
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.split import WHOLE
from talaria.programs import onnx_file, reference, vector
from talaria.programs.graph import Graph, Size
from talaria.programs.manifest import Manifest
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.programs.shapes import Limits
from talaria.programs.step import BATCH, graph_of
from talaria.tensors import Array
from talaria.types import Recipe

VECTORS = 4
"""Test vectors that are tried: where a value lies within a rounding of a kink (ReLU, a maximum), either side is right,
and the next vector tells more. Where what is exact is no finite number, those above zero come next."""


@torch.inference_mode(False)
def build(spec: ModelSpec, trained: str = "all", recipe: Recipe = Recipe()) -> bytes:
    """The file of the program that trains ``trained`` of ``spec``: ``all``, or parts with commas between, such as
    ``adapters,head``.

    ``recipe`` gives momentum, weight decay and smoothing; the rate is an input, and what else it says is the loop's.
    Raises :class:`~talaria.errors.ModelError` for a layer without a rule, and where the program errs more than twice as
    much against float64 as torch does in float32, and by more than sixteen of its roundings;
    :class:`~talaria.errors.ConfigError` for other steps than those of SGD.
    """
    if not isinstance(spec, ModelSpec):
        raise ConfigError(
            f"build: spec={type(spec).__name__} must be a ModelSpec; of a torch module, "
            "talaria.model.zoo.keep(module, input_shape, classes) gives one"
        )
    if not recipe.plain:
        odd = f"clip={recipe.clip:g}" if recipe.optimizer == "sgd" else f"optimizer={recipe.optimizer!r}"
        raise ConfigError(
            f"recipe: {odd} is no part of a program, whose step is that of SGD with momentum; leave it out. A fleet's "
            "engine takes such steps by itself"
        )
    module = zoo.build(spec)
    return packed(spec, module, _named(spec, module, trained), trained, recipe)


def packed(
    spec: ModelSpec,
    module: Module,
    only: Collection[str] | None,
    trained: str,
    recipe: Recipe,
    *,
    pulled: bool = False,
    features: tuple[Size, ...] | None = None,
    widths: Mapping[str, int] | None = None,
) -> bytes:
    """The file of the program that trains the keys ``only`` of ``module``, the model of ``spec`` (None: all), which it
    calls ``trained``; see :func:`build`, and for ``pulled`` :func:`talaria.programs.step.graph_of`.

    Where ``module`` is the model's upper part, ``features`` is the shape of what it is fed, and ``widths`` are the
    unpruned sizes of the names in it.
    """
    graph = graph_of(
        module,
        zoo.head(spec),
        features or spec.input_shape,
        spec.classes,
        recipe,
        only,
        pulled,
        partial(zoo.whole, spec),
        widths,
    )
    names = [port.name for port in graph.outputs]

    def run(feed: Mapping[str, Array]) -> Mapping[str, Array]:
        return dict(zip(names, Session(onnx_file.write(graph, ""))(names, feed), strict=True))

    sizes, reckoned = sizes_of(graph, module) | dict(widths or {}), partial(reference.step, module, recipe, only)
    data = written(graph, facts_of(graph, spec, trained, recipe, sizes, run, reckoned))
    Program(data)
    return data


def facts_of(
    graph: Graph,
    spec: ModelSpec,
    trained: str,
    recipe: Recipe,
    sizes: Mapping[str, int],
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    reckoned: Callable[[Mapping[str, Array], torch.dtype], Mapping[str, Array]],
) -> Manifest:
    """What the file of ``graph`` says of itself: its errors, and what float64 gives, on the first test vector on which
    it is exact, or on the last one. ``run`` gives its outputs on its inputs, ``reckoned`` torch's in a dtype."""
    require_few(graph)
    facts = Manifest(
        model=spec.to_json(),
        trained=trained,
        recipe={name: getattr(recipe, name) for name in ("momentum", "smoothing", "weight_decay")},
        classes=spec.classes,
        sizes=sizes,
        vector=0,
        parity={"program": 0.0, "torch": 0.0},
        expected={},
        made_with={name: version(name) for name in ("onnxruntime", "talaria", "torch")},
    )
    first = 0
    for tried in range(VECTORS):
        number = first + tried
        feed = vector.inputs(graph, replace(facts, vector=number))
        exact, plain = (reckoned(feed, dtype) for dtype in (torch.float64, torch.float32))
        odd = exact.keys() ^ {port.name for port in graph.outputs}
        if odd:
            raise ModelError(f"program: it would give {sorted(odd)[:4]} otherwise than torch does")
        parity = {"program": vector.distance(run(feed), exact), "torch": vector.distance(plain, exact)}
        reference.require_undrawn(parity["torch"], exact, partial(reckoned, feed, torch.float64))
        facts = replace(facts, vector=number, parity=parity, expected=vector.projections(exact))
        if facts.exact:
            break
        if vector.still(graph) and not all(np.isfinite(value).all() for value in exact.values()):
            first = vector.ABOVE_ZERO
    return facts


def written(graph: Graph, facts: Manifest) -> bytes:
    """The file of ``graph``. Raises :class:`~talaria.errors.ModelError` where it is not exact."""
    if not facts.exact and not math.isfinite(facts.parity["torch"]):
        raise ModelError(
            "program: with weights drawn at random, by which it is measured, the network gives no finite numbers, as a "
            "logarithm or a root of them; keep what enters it above zero (softplus, clamp), or train this model with "
            "torch"
        )
    if not facts.exact:
        raise ModelError(
            "program: errs by more than twice what torch errs by against float64; train this model with torch"
        )
    return onnx_file.write(graph, facts.text())


def require_few(graph: Graph, most: int = Limits().nodes) -> None:
    """Raise :class:`~talaria.errors.ModelError` for a graph of more operators than a device runs, before time is spent
    on it."""
    if len(graph.nodes) > most:
        raise ModelError(
            f"program: takes {len(graph.nodes)} operators, at most {most} are run; shorten the sequences that "
            "recurrent layers walk, or train this model with torch"
        )


def _named(spec: ModelSpec, module: Module, trained: str) -> Sequence[str] | None:
    if trained == "all":
        return None
    parts = trained.split(",")
    if not {*parts} <= {*WHOLE}:
        raise ConfigError(f"trained={trained!r} is unknown; use all, or parts among {', '.join(WHOLE)} with commas")
    split = zoo.split(spec, module)
    return [key for part in WHOLE if part in parts for key in getattr(split, part)]


def sizes_of(graph: Graph, module: Module) -> dict[str, int]:
    """The widths of the unpruned model by their names in the ports, and the batch of the test vector."""
    state, sizes = module.state_dict(), {BATCH: vector.BATCH}
    for port in graph.inputs:
        if port.name.startswith("weight/"):
            shape = state[port.name.removeprefix("weight/")].shape
            sizes |= {
                label: size
                for label, size in zip(port.shape, shape, strict=True)
                if isinstance(label, str) and not {"*", "+"} & {*label}
            }
    return sizes
