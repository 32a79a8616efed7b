"""A model becomes a program: its step written as a graph, measured against float64, and packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
from torch.nn import Module

from talaria.errors import ConfigError, ModelError
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.programs import onnx_file, reference, vector
from talaria.programs.graph import Graph, Size
from talaria.programs.manifest import Manifest
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.programs.shapes import Limits
from talaria.programs.step import BATCH, graph_of
from talaria.types import Recipe

PARTS = ("body", "adapters", "head")
VECTORS = 4
"""Test vectors that are tried: where a value lies within a rounding of a kink (ReLU, a maximum), either side is right,
and the next vector tells more."""


@torch.inference_mode(False)
def build(spec: ModelSpec, trained: str = "all", recipe: Recipe = Recipe()) -> bytes:
    """The file of the program that trains ``trained`` of ``spec``: ``all``, or parts with commas between, such as
    ``adapters,head``.

    ``recipe`` gives momentum, weight decay and smoothing; the rate is an input, and what else it says is the loop's.
    Raises :class:`~talaria.errors.ModelError` for a layer without a rule, and where the program errs more than twice as
    much against float64 as torch does in float32; :class:`~talaria.errors.ConfigError` for other steps than those of
    SGD.
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
    require_few(graph)
    facts = Manifest(
        model=spec.to_json(),
        trained=trained,
        recipe={name: getattr(recipe, name) for name in ("momentum", "smoothing", "weight_decay")},
        classes=spec.classes,
        sizes=sizes_of(graph, module) | dict(widths or {}),
        vector=0,
        parity={"program": 0.0, "torch": 0.0},
        expected={},
        made_with={name: version(name) for name in ("onnxruntime", "talaria", "torch")},
    )
    measured = (_measured(graph, replace(facts, vector=n), module, recipe, only) for n in range(VECTORS))
    proven = next((one for one in measured if one.parity["program"] <= one.allowed), None)
    if proven is None:
        raise ModelError(
            "program: errs by more than twice what torch errs by against float64; train this model with torch"
        )
    data = onnx_file.write(graph, proven.text())
    Program(data)
    return data


def require_few(graph: Graph, most: int = Limits().nodes) -> None:
    """Raise :class:`~talaria.errors.ModelError` for a graph of more operators than a device runs, before time is spent
    on it."""
    if len(graph.nodes) > most:
        raise ModelError(
            f"program: takes {len(graph.nodes)} operators, at most {most} are run; shorten the sequences that "
            "recurrent layers walk, or train this model with torch"
        )


def _measured(graph: Graph, facts: Manifest, module: Module, recipe: Recipe, only: Collection[str] | None) -> Manifest:
    """``facts`` with the errors on the test vector and what float64 gives there."""
    feed, names = vector.inputs(graph, facts), [port.name for port in graph.outputs]
    reckoned = partial(reference.step, module, recipe, only, feed)
    exact, plain = (reckoned(dtype) for dtype in (torch.float64, torch.float32))
    if exact.keys() != {*names}:
        raise ModelError(f"program: it would change {sorted(exact.keys() ^ {*names})[:4]} otherwise than torch does")
    found = dict(zip(names, Session(onnx_file.write(graph, ""))(names, feed), strict=True))
    parity = {"program": vector.distance(found, exact), "torch": vector.distance(plain, exact)}
    reference.require_undrawn(parity["torch"], exact, partial(reckoned, torch.float64))
    return replace(facts, parity=parity, expected=vector.projections(exact))


def _named(spec: ModelSpec, module: Module, trained: str) -> Sequence[str] | None:
    if trained == "all":
        return None
    parts = trained.split(",")
    if not {*parts} <= {*PARTS}:
        raise ConfigError(f"trained={trained!r} is unknown; use all, or parts among {', '.join(PARTS)} with commas")
    split = zoo.split(spec, module)
    return [key for part in PARTS if part in parts for key in getattr(split, part)]


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
