"""Makes a run's kit: the algorithm's device half is gone through once with an engine that trains nothing and notes
which programs it is asked for. Needs torch.

A process of its own makes it for a program that never trains (:func:`talaria.federated.kit.made`): ``python -m
talaria.federated.make_kit < RUN.JSON > FILE``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from talaria import tasks
from talaria.errors import ConfigError
from talaria.federated import device_task, own_process, run_model
from talaria.federated import kit as kits
from talaria.federated.kit import Kit
from talaria.federated.run import Run
from talaria.model import masks, zoo
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of
from talaria.model.weights import Model, Weights
from talaria.planning.layer_stats import anatomy
from talaria.programs.engine import ProgramEngine
from talaria.programs.given import Given
from talaria.programs.making import Maker
from talaria.programs.program import Program
from talaria.programs.source import model_name, name_of
from talaria.tensors import Tensors
from talaria.training.interface import Task
from talaria.training.objectives import LOGITS
from talaria.types import Recipe, Samples
from talaria.wire.codec import schema_of

_FEW, _BATCHES = 8, 3
"""The batch that a single made-up sample is to fill, and batches that several are."""


class _Noting(ProgramEngine):
    """Has each program made that is asked for, and leaves the weights as they are."""

    def _trained(self, program: Program, task: Task, state: Tensors, recipe: Recipe, *rest: Any) -> Tensors:
        return dict(state)

    def calibrate(self, task: Task, state: Tensors, samples: Samples | None = None, batch: int = 256) -> Tensors:
        return dict(state)

    def another(self, spec: ModelSpec, like: Model) -> tuple[Model, ProgramEngine]:
        model, engine = super().another(spec, like)
        return Weights(state_of(model)), engine

    def served(self, task: Task, state: Tensors) -> Model:
        return Weights(state)


def kit_of(run: Run) -> Kit:
    """The kit of a run. Raises :class:`~talaria.errors.ConfigError` where its algorithm cannot be trained by programs,
    and :class:`~talaria.errors.ModelError` for a layer that no program can hold."""
    device_task.require_engine(run, "onnx")
    maker = Maker(run.spec)
    try:
        _gone_through(run, _Noting(run.spec, maker))
    except (AttributeError, TypeError) as why:  # of an algorithm that looks into the module
        raise _needs_torch(run, f"its device half looks into the torch module ({str(why)[:100]})") from why
    others = {model_name(spec): _given(other, state_of(other.first())) for spec, other in maker.others.items()}
    source = _given(maker, {}, others, run.recipe.still(run_model.split_of(run).keys))
    state, shared = state_of(run_model.template(run.spec)), run_model.first_shared(run)
    schema = schema_of(state | {name: value for name, value in shared.items() if name not in state})
    private = {name: value for name, value in state.items() if name not in shared}
    return Kit(
        run.identity, schema, tuple(shared), private, run_model.first_scores(run), run_model.layout_of(run.spec),
        run_model.split_of(run), source, anatomy(run.spec).layers,
    )  # fmt: skip


def _given(
    maker: Maker,
    state: Tensors,
    others: Mapping[str, Given] = MappingProxyType({}),
    still: frozenset[str] = frozenset(),
) -> Given:
    """What was made, and what else a plan or samples of another size may ask for, where ``still`` is frozen."""
    for need in list(maker.programs):
        if need.upper:  # where features would not fit, or are read once, the same part trains on inputs
            maker.program(replace(need, upper=False))
        maker.derivative(need.only, (LOGITS,))  # a plan may cut batches into slices
    files = {f"program/{need.name}": data for need, (data, _) in maker.programs.items()}
    files |= {name: data for name, (data, _) in maker.derivatives.items()}
    cuts = maker.cuts
    files |= {f"lower/{name_of(only)}": one.look.write() for only, one in cuts.items() if one is not None}
    files |= {"forward": maker.forward().write()}
    if not still.issuperset(maker.statistics):
        files |= {"calibration": maker.calibration(still.intersection(maker.statistics)).write()}
    return Given(
        parameters=maker.parameters,
        statistics=maker.statistics,
        falls=maker.falls,
        cuts={name_of(only): None if one is None else one.bytes_each for only, one in cuts.items()},
        files=files,
        others=others,
        state=state,
        parts=maker.parts,
    )


def _needs_torch(run: Run, why: str) -> ConfigError:
    return ConfigError(f"{run.algorithm}: there is no kit for it yet, as {why}; its devices need talaria[torch]")


def _gone_through(run: Run, engine: ProgramEngine) -> None:
    """A first round, another one, and what is served: of a device that took part and of one that never did, with few
    samples for its batch and with several batches."""
    algorithm, split = run_model.algorithm_of(run), run_model.split_of(run)
    state, shared, recipe = state_of(run_model.template(run.spec)), run_model.first_shared(run), run.recipe
    answer = cast(tuple[int, ...], engine.source.forward().graph.outputs[0].shape[1:])  # no mask narrows it

    def narrow(task: Task, mask: ChannelMask | None) -> tuple[Task, Tensors]:
        model = Weights(masks.gathered(state, state, mask))
        return task.but(mask=mask, model=model), masks.gathered(shared, shared, mask)

    for count, how in ((1, recipe.but(batch=max(_FEW, recipe.batch))), (_BATCHES * recipe.batch, recipe)):
        x = zoo.example(run.spec, count).numpy()
        samples, goal = Samples(x, tasks.of(run.task).example((count, *answer))), run.task
        task = Task(
            Weights(state), split, samples, samples, how, run.spec.classes, seed=run.seed, engine=engine, goal=goal
        )  # fmt: skip
        task, compact = narrow(task, run_model.layout_of(run.spec).full() if algorithm.card.prunes else None)
        _, private = algorithm.init(Weights(state), split)
        algorithm.personal(task.but(newcomer=True), compact, private)
        for newcomer in (True, False):
            sent, private = algorithm.fit(task.but(newcomer=newcomer), compact, private)
            task, compact = narrow(task, sent.mask)
        algorithm.personal(task, compact, private)


if __name__ == "__main__":
    sys.exit(own_process.main(lambda run: kits.encode(kit_of(run))))
