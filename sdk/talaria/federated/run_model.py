"""What a run's model is here: its parts, its channels and its first values. They come from the module itself, else from
a blueprint that was adopted, or from the kit that a device learns with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from talaria import algorithms, tasks
from talaria.algorithms.base import Algorithm
from talaria.errors import ConfigError
from talaria.federated import handed_back, targets
from talaria.federated.blueprint import Blueprint
from talaria.federated.kit import Kit
from talaria.federated.run import Run
from talaria.inputs import Parts
from talaria.model import zoo
from talaria.model.importance import importance
from talaria.model.masks import ChannelLayout
from talaria.model.spec import ModelSpec
from talaria.model.split import WHOLE, Buffers, Split, torn
from talaria.model.weights import Model, Served
from talaria.plugins import has_torch
from talaria.tensors import Array, Tensors
from talaria.wire.codec import TensorSpec, schema_of

if TYPE_CHECKING:
    from torch.nn import Module

    from talaria.training.interface import Engine


_adopted: dict[str, tuple[ModelSpec, Blueprint]] = {}
"""By the run's identity: one that goes on for longer has the same model."""


def adopt(run: Run, blueprint: Blueprint) -> None:
    """Take what is asked here of the run's model from ``blueprint``, until this process ends: it then needs no torch
    to begin a run, to check updates and to fold them."""
    _adopted[run.identity] = run.spec, blueprint


def _blueprint(run: Run) -> Blueprint | None:
    return _adopted.get(run.identity, (None, None))[1]


_kits: dict[str, tuple[Kit, Engine]] = {}


def equip(run: Run, kit: Kit) -> None:
    """Learn ``run`` from ``kit``, until this process ends: a device with engine ``"onnx"`` then needs no torch.

    Raises :class:`ConfigError` where the kit is of another run.
    """
    from talaria.programs.engine import ProgramEngine

    kit.require(run)
    adopt(run, kit.blueprint)
    _kits[run.identity] = kit, ProgramEngine(run.spec, kit.source)


def kit_of(run: Run) -> tuple[Kit, Engine] | tuple[None, None]:
    """The kit of ``run`` that is learned from here, and the engine that has its programs; a pair of None without."""
    return _kits.get(run.identity, (None, None))


@lru_cache(maxsize=16)
def template(spec: ModelSpec) -> Module:
    """The unpruned model with the run's common initial weights. Shared: copy before changing it."""
    return zoo.build(spec)


def named_inputs(run: Run) -> Parts | None:
    """The shapes of the named inputs that the run's model reads, none where it is one; None where that is not known
    here, as without torch before there is a kit."""
    if (kit := kit_of(run)[0]) is not None:
        return kit.source.parts
    if not zoo.GROUP.is_foreign(run.spec.name):
        return {}
    if not has_torch():
        return None
    from talaria.model.several import Several

    model = template(run.spec)
    return model.parts if isinstance(model, Several) else {}


def layout_of(spec: ModelSpec) -> ChannelLayout:
    """The channel groups of the unpruned model."""
    known = next((blueprint.layout for own, blueprint in list(_adopted.values()) if own == spec), None)
    return zoo.layout(spec) if known is None else known


def split_of(run: Run) -> Split:
    """Body, adapters and head of the run's model. Raises :class:`~talaria.errors.ModelError` where the model does not
    answer as the run's task takes it."""
    known = _blueprint(run)
    return _split(run.spec, run.buffers, run.task) if known is None else known.split


@lru_cache(maxsize=16)
def _split(spec: ModelSpec, buffers: Buffers, task: str) -> Split:
    found = zoo.split(spec, template(spec), buffers=buffers)
    zoo.require_form(spec, tasks.of(task).answer, task)
    targets.require_folds(template(spec), zoo.example(spec, 2), found, task)
    return found


def algorithm_of(run: Run) -> Algorithm:
    """The run's algorithm with its hyper-parameters."""
    return algorithms.load(run.algorithm, run.hparams) if run.algorithm not in algorithms.ALGORITHMS else _own(run)


@lru_cache(maxsize=64)
def _own(run: Run) -> Algorithm:
    return algorithms.load(run.algorithm, run.hparams)


def begun(run: Run, model: Model) -> tuple[Tensors, Tensors]:
    """What the run's algorithm begins with on ``model``: what travels of it, and what is private. Raises
    :class:`ConfigError` where an algorithm of one's own gives something else."""
    return handed_back.begun(run.algorithm, algorithm_of(run).init(model, split_of(run)))


def first_shared(run: Run) -> Tensors:
    """The shared state that all begin from, version 0. Raises :class:`ConfigError` where the algorithm prunes and the
    model has no channels that may go, and where a weight that has two names would travel under one of them alone."""
    if (known := _blueprint(run)) is not None:
        return known.first()
    if algorithm_of(run).card.prunes and not layout_of(run.spec).sizes:
        reasons = zoo.left_whole(run.spec) or "a model of linear layers alone, or one whose layers all meet in sums"
        raise ConfigError(
            f"{run.algorithm}: prunes channels, but {run.spec.name!r} has none that may go ({reasons}); choose another "
            "model, or an algorithm that does not prune"
        )
    shared, _ = begun(run, template(run.spec))
    if found := torn(template(run.spec), shared):
        raise ConfigError(
            f"{run.algorithm}: sends {found[0]!r} and keeps {found[1]!r} on the device, which are one weight of "
            f"{run.spec.name!r}; give each layer a weight of its own, or choose an algorithm that sends both, such "
            "as fedavg or ditto"
        )
    return shared


@lru_cache(maxsize=16)
def update_schema(run: Run) -> Mapping[str, TensorSpec]:
    """The dense shapes of what an update may hold, those of :func:`first_shared`; worked out once for a run."""
    known = _blueprint(run)
    return schema_of(first_shared(run)) if known is None else known.schema


def dense_bytes(run: Run) -> int:
    """Bytes of every shared value as it is: what one model or update of ``run`` has where nothing is spared."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in update_schema(run).values())


def unpruned(run: Run) -> Served:
    """The whole model of the run's kit, as small devices compare theirs with it in size and time; what travels is zero
    in it. Raises :class:`ConfigError` where there is none."""
    kit, _ = kit_of(run)
    if kit is None:
        raise ConfigError("run: no kit of it is known here; call equip first")
    return kit.source.whole(kit.model)


def first_scores(run: Run) -> Mapping[str, Array]:
    """Of each group, how much every channel of the first weights counts: what a plan chooses by."""
    if (kit := kit_of(run)[0]) is not None:
        return kit.scores
    from talaria.model.state import to_arrays

    first = to_arrays(template(run.spec).state_dict())
    return importance(first, split_of(run).parameters(*WHOLE), layout_of(run.spec))
