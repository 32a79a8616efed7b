"""Training where only the upper layers train: what the frozen layers below compute is computed once and kept.

The network is cut in two at the last point, below everything that trains, where a single tensor passes from the lower
layers to the upper ones. The lower half runs once per sample, without gradients, through ONNX Runtime where that is
installed; the upper half then trains on the kept features as an ordinary task. Weights and names stay those of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import getitem

import numpy as np
import torch
from torch import fx
from torch.nn import Flatten, Module, RReLU, Sequential
from torch.nn.modules.dropout import _DropoutNd

from talaria.model.following import Follower
from talaria.model.inside import Inside
from talaria.model.state import array_of, beside, load, tensor_of
from talaria.planning import onnx_runtime
from talaria.planning.onnx_runtime import Exporter
from talaria.tensors import Array, Tensors
from talaria.tensors import only as picked
from talaria.training import loop
from talaria.training.batching import LARGEST_CACHE, of_features, steps_of
from talaria.training.interface import Task
from talaria.training.layer_draws import draws
from talaria.types import Recipe, Samples

_DRAWN = {
    *("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "uniform", "poisson", "multinomial"),
    *("exponential", "log_normal", "dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax"),
}
"""Functions and methods that draw at random."""


@dataclass(frozen=True)
class Halves:
    """A network in two: ``upper(lower(x))`` is the network. Both share its parameters; ``cut`` names the last
    operation of ``lower``."""

    lower: Module
    upper: Module
    cut: str


@dataclass(frozen=True)
class Cached:
    """A task on kept features, for :func:`talaria.training.loop.train`, or the reason why there is none."""

    task: Task | None
    why: str


def halve(model: Module, only: Collection[str]) -> Halves | str:
    """Cut ``model`` below the lowest layer that ``only`` trains, or say why that cannot be done.

    ``model`` is left frozen but for ``only``, as :func:`talaria.training.loop.freeze_but` leaves it.
    """
    loop.freeze_but(model, only)
    own = set(vars(model))
    try:
        return _halved(model, _Tracer().trace(model), only)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError, ValueError) as error:
        return f"its forward cannot be followed ({' '.join(str(error).split())[:120]})"
    finally:
        for name in set(vars(model)) - own:  # where fx leaves what the pass made without a sample
            delattr(model, name)


def _halved(model: Module, graph: fx.Graph, only: Collection[str]) -> Halves | str:
    nodes = list(graph.nodes)
    first = next((i for i, node in enumerate(nodes) if _trains(model, node, set(only))), len(nodes) - 1)
    at = next((i for i in range(first, 1, -1) if _passing(nodes, i) is not None), None)
    value = None if at is None else _passing(nodes, at)
    if at is None or value is None or value.op == "placeholder":
        return "it trains from its first layer on" if first <= 1 else "no single tensor passes the frozen layers"
    return Halves(_lower(model, nodes[:at], value), _upper(model, nodes[at:], value), value.name)


def cached(
    task: Task, state: Tensors, only: Collection[str], *, export: Exporter | None = None, batch: int = 64
) -> Cached:
    """The task whose inputs are what the frozen layers make of the task's samples at ``state``.

    ``export`` runs the frozen layers through ONNX Runtime. Augmentation of the inputs cannot be kept; neither can more
    than :data:`LARGEST_CACHE` bytes.
    """
    if task.recipe.augment != "none":
        return Cached(None, f"augment={task.recipe.augment!r} changes the inputs in every epoch")
    if not len(task.train):
        return Cached(None, "there are no samples to keep")
    found = halve(load(task.model, state), only)
    if isinstance(found, str):
        return Cached(None, found)
    run = torch_runner(found.lower) if export is None else onnx_runner(found.lower, task.train.x[:2], export)
    one = run(task.train.x[:1])
    if one.dtype != np.float32:  # tokens, as the network casts them
        return Cached(None, f"what passes its frozen layers is {one.dtype}, and features are float32")
    if len(one) > 1:
        return Cached(None, f"what passes its frozen layers are {len(one)} parts of each sample")
    size = one.nbytes * (len(task.train) + len(task.val))
    if size > LARGEST_CACHE:
        return Cached(None, f"its features would take {size / 1e6:.0f} MB, more than {LARGEST_CACHE / 1e6:.0f}")
    train, val = (of_features(_in_batches(run, part.x, one, batch), part.y) for part in (task.train, task.val))
    return Cached(
        task.but(model=found.upper, train=train, val=val), f"features kept at {found.cut}, {size / 1e6:.1f} MB"
    )


def train(
    task: Task,
    state: Tensors,
    *,
    only: Collection[str],
    export: Exporter | None = None,
    recipe: Recipe | None = None,
    samples: Samples | None = None,
    purpose: str = "train",
) -> Tensors:
    """:func:`talaria.training.loop.train`, on kept features where that can be done; the same result up to rounding.

    Where no sample is seen twice there is nothing to gain, and the plain training is taken.
    """
    recipe, samples = recipe or task.recipe, task.train if samples is None else samples
    once = steps_of(recipe, len(samples)) * recipe.batch < 2 * len(samples)
    none = samples.take(np.arange(0))
    kept = None if once else cached(task.but(recipe=recipe, train=samples, val=none), state, only, export=export).task
    if kept is None:
        return loop.train(task, state, only=only, recipe=recipe, samples=samples, purpose=purpose)
    names = list(kept.model.state_dict())
    after = loop.train(kept, picked(state, names), only=[k for k in only if k in set(names)], purpose=purpose)
    return {key: after.get(key, value) for key, value in state.items()}


class _Tracer(Follower):
    """A layer with adapters inside is one layer: within it they would be taken for constants. So is one that draws:
    as a function it would draw what no engine knows of, or the same for ever."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return isinstance(m, Inside) or draws(m) or super().is_leaf_module(m, module_qualified_name)


def _trains(model: Module, node: fx.Node, only: set[str]) -> bool:
    """Whether something trains here, or draws at random as in training (dropout)."""
    if node.op == "call_module":
        layer = model.get_submodule(str(node.target))
        names = [f"{node.target}.{n}" for n, _ in (*layer.named_parameters(), *layer.named_buffers())]
        return any(n in only for n in names) or any(m.training and _minds(m) for m in layer.modules())
    if node.op in ("call_function", "call_method") and model.training:
        return str(getattr(node.target, "__name__", node.target)).rstrip("_") in _DRAWN
    return node.op == "output" or (node.op == "get_attr" and str(node.target) in only)


def _minds(layer: Module) -> bool:
    """Whether a plain layer does something else in train mode: it draws at random, or has statistics."""
    random = isinstance(layer, (_DropoutNd, RReLU)) or draws(layer)
    return random or next(layer.buffers(recurse=False), None) is not None


def _passing(nodes: list[fx.Node], at: int) -> fx.Node | None:
    """The one value that nodes before ``at`` hand to those from there on, or None where there are several, or one that
    holds several (``x.chunk(2)``), of which each is taken by its number."""
    before, after = set(nodes[:at]), nodes[at:]
    passing = {value for node in after for value in node.all_input_nodes if value in before}
    if len(passing) != 1:
        return None
    (value,) = passing
    pieces = all(user.target is getitem and isinstance(user.args[1], int) for user in value.users)
    return None if pieces else value


def _lower(model: Module, nodes: list[fx.Node], value: fx.Node) -> Module:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[value])
    return _made(model, graph).requires_grad_(False).eval()


def _upper(model: Module, nodes: list[fx.Node], value: fx.Node) -> Module:
    graph = fx.Graph()
    env = {value: graph.placeholder("features")}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return _made(model, graph)


def _made(model: Module, graph: fx.Graph) -> Module:
    """A half. What the pass makes without a sample (``torch.arange(8)``, ``self.waves.T``) fx keeps as its buffer,
    which no state of the network has."""
    made = fx.GraphModule(model, graph)
    made._non_persistent_buffers_set |= {
        name for name in made._buffers if name not in model._buffers and "." not in name
    }
    return made


def torch_runner(lower: Module) -> Callable[[Array], Array]:
    """``lower`` on a batch, without gradients."""

    def run(x: Array) -> Array:
        with torch.no_grad():
            return array_of(lower(beside(lower, x)))

    return run


def onnx_runner(lower: Module, example: Array, export: Exporter) -> Callable[[Array], Array]:
    """``lower`` on a batch, through ONNX Runtime; ``example`` is a batch of its inputs."""
    batch = tensor_of(example)
    with torch.no_grad():
        shape = tuple(lower(batch).shape[1:])
    session = onnx_runtime.Session(export(Sequential(lower, Flatten(1)), batch))

    def run(x: Array) -> Array:
        return np.array(session(x)).reshape(-1, *shape)

    return run


def _in_batches(run: Callable[[Array], Array], x: Array, one: Array, batch: int) -> Array:
    out = np.empty((len(x), *one.shape[1:]), np.float32)
    for begin in range(0, len(x), batch):
        out[begin : begin + batch] = run(x[begin : begin + batch])
    return out
