"""What a device works on in a round: its mask, and the task with a scratch module as small as that."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from talaria import algorithms
from talaria.errors import ConfigError
from talaria.federated import plan_compat, targets
from talaria.federated.run import Member, Run
from talaria.federated.run_model import (
    algorithm_of,
    begun,
    first_scores,
    kit_of,
    layout_of,
    split_of,
    template,
    update_schema,
)
from talaria.model import masks, zoo
from talaria.model.importance import choose
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model, Weights
from talaria.planning.plan import Plan
from talaria.tensors import Tensors, only, without
from talaria.training.engine import state_of
from talaria.training.interface import Task
from talaria.wire import feedback

if TYPE_CHECKING:
    from torch.nn import Module

    from talaria.training.interface import Engine


def mask_of(run: Run, member: Member, private: Tensors | None) -> ChannelMask | None:
    """The device's mask; see :func:`mask_under`."""
    return mask_under(run, member.plan, private)


def mask_under(run: Run, plan: Plan | None, private: Tensors | None) -> ChannelMask | None:
    """The mask of a device: the one it stored, else the one that its ``plan`` asks for, else None (all kept).

    An algorithm that prunes by itself starts from the full mask."""
    layout = layout_of(run.spec)
    if private is not None and any(name.startswith(masks.PREFIX) for name in private):
        return masks.from_tensors(layout, private)
    if algorithm_of(run).card.prunes:
        return layout.full()
    if plan is None or not plan.widths:
        return None
    return choose(first_scores(run), layout.full(), widths=plan.widths, block=1)


def codec_of(run: Run, member: Member) -> str:
    """How the updates of this device travel; see :func:`talaria.federated.plan_compat.codec_under`."""
    return plan_compat.codec_under(run.codec, member.plan)


def require_plan(run: Run, plan: Plan) -> None:
    """Raise :class:`~talaria.errors.ConfigError`, naming the difference, where ``run`` cannot keep to ``plan``:
    another model, adapters or channel groups, parts that the plan freezes, or a smaller codec than a run of whole
    values can use."""
    plan_compat.require_model(run.spec, plan)
    if plan.widths:
        plan_compat.require_groups(layout_of(run.spec), plan)
    plan_compat.codec_under(run.codec, plan)
    if len(set(plan.trained)) < 3:
        plan_compat.require_trained(update_schema(run), split_of(run), plan)


def task_of(run: Run, member: Member, round: int, mask: ChannelMask | None, private: Tensors | None = None) -> Task:
    """What the device works on, with a scratch module as small as its mask; targets in units of the device's own
    spread, where the run's task scales them."""
    scale = targets.scale_of(run, member, private)
    kit, programs = kit_of(run) if member.engine == "onnx" else (None, None)
    return Task(
        model=_scratch(run, mask, member) if kit is None else Weights(masks.gathered(kit.model, kit.model, mask)),
        split=split_of(run),
        train=targets.scaled(member.train, scale),
        val=targets.scaled(member.val, scale),
        unlabelled=member.unlabelled,
        goal=run.task,
        scale=scale,
        recipe=plan_compat.recipe_under(run.recipe, member.plan),
        classes=run.spec.classes,
        seed=run.seed,
        client=member.client,
        round=round,
        mask=mask,
        plan=member.plan,
        engine=None if member.engine == "torch" else programs or _programs(run.spec),
    )


def _scratch(run: Run, mask: ChannelMask | None, member: Member) -> Module:
    """A module of a task's own; programs only read theirs, so that the whole model is one for all."""
    if mask is None and member.engine == "onnx":
        return template(run.spec)
    from talaria.model import pruning
    from talaria.model.cloning import clone
    from talaria.training.loop import in_fast_layout

    whole = _tried(run.spec)
    return in_fast_layout((clone(whole) if mask is None else pruning.compact(whole, mask)).to(member.device))


@lru_cache(maxsize=16)
def _tried(spec: ModelSpec) -> Module:
    """The template, which says of itself and of its copies in which layout of memory they are read."""
    from talaria.training.loop import try_fast_layout

    whole = template(spec)
    if zoo.GROUP.is_foreign(spec.name):
        try_fast_layout(whole, zoo.example(spec, 2))
    return whole


@lru_cache(maxsize=4)
def _programs(spec: ModelSpec) -> Engine:
    from talaria.programs.engine import ProgramEngine

    return ProgramEngine(spec)


def require_engine(run: Run, engine: str) -> None:
    """Raise :class:`ConfigError` where ``engine`` cannot train what ``run`` asks for."""
    why = algorithm_of(run).card.torch_alone
    if engine == "onnx" and why:
        raise ConfigError(f"{run.algorithm}: {why}, so engine='onnx' cannot train it; use engine='torch'")


def entered(
    run: Run, member: Member, shared: Tensors, private: Tensors | None, round: int
) -> tuple[Task, Tensors, Tensors]:
    """What a device begins a round with: its task, what it keeps of the shared state, and its own private tensors, the
    first ones where ``private`` is None. Raises :class:`ConfigError` where it cannot keep to its plan or its engine."""
    if member.plan is not None:
        require_plan(run, member.plan)
    require_engine(run, member.engine)
    if not algorithm_of(run).card.prunes:
        shared = without(shared, masks.PREFIX)  # a rule's word on channels, which only those who choose theirs read
    mask = mask_of(run, member, private)
    task = task_of(run, member, round, mask, private)
    compact = masks.gathered(shared, shared, mask)
    if isinstance(task.model, Weights):  # a kit has no values of what travels
        task = task.but(model=_received(task, compact))
    if private is None:
        _, private = begun(run, _received(task, compact))
        task = task.but(newcomer=True)
    own = own_of(private)
    if algorithms.GROUP.is_foreign(run.algorithm):  # whose code may write into what it is given, which is everybody's
        compact, own = ({name: value.copy() for name, value in state.items()} for state in (compact, own))
    return task, compact, own


def own_of(private: Tensors) -> Tensors:
    """What of a private state is the algorithm's own: no mask, no remainder of an update, no scale of targets."""
    return without(without(without(private, masks.PREFIX), feedback.PREFIX), targets.PREFIX)


def begun_private(run: Run, member: Member, shared: Tensors, kept: Tensors) -> Tensors:
    """The private tensors of a device that begins ``run`` at this global model; ``kept`` may hold a mask that it keeps
    to (names as in private state)."""
    if not algorithm_of(run).card.prunes:
        shared = without(shared, masks.PREFIX)
    mask = mask_of(run, member, kept)
    task = task_of(run, member, 1, mask)
    return begun(run, _received(task, masks.gathered(shared, shared, mask)))[1]


def _received(task: Task, compact: Tensors) -> Model:
    """The scratch model with what was downloaded."""
    state = state_of(task.model)
    whole = state | only(compact, [key for key in compact if key in state])
    if isinstance(task.model, Weights):
        return Weights(whole)
    from talaria.model.cloning import clone
    from talaria.model.state import load

    return load(task.model if task.engine is None else clone(task.model), whole)


def stored(mask: ChannelMask | None, private: Tensors) -> Tensors:
    """A private state as a device keeps it: with its mask, unless that keeps all."""
    if mask is None or mask.is_full:
        return dict(private)
    return {**masks.as_tensors(mask), **private}
