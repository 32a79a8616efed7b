"""One round, seen from each side, as plain functions. Simulation and fleet call these same functions, with
seeds that derive from (run, client, round, purpose): what you simulate is what you deploy, to the byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from talaria import algorithms, seeds, tasks
from talaria.aggregate import arrival
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import ANSWERED, PooledStatistics, pools
from talaria.aggregate.fedbuff import FedBuff
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.stacked_updates import RowRule
from talaria.aggregate.validation import lost
from talaria.aggregate.wrappers import chain, innermost
from talaria.algorithms.base import Algorithm
from talaria.errors import AggregationError, ConfigError
from talaria.federated import handed_back, plan_compat, targets
from talaria.federated.blueprint import Blueprint
from talaria.federated.kit import Kit
from talaria.federated.run import Member, Run
from talaria.inputs import Parts
from talaria.model import masks, zoo
from talaria.model.importance import choose, importance
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.split import WHOLE, Buffers, Split, torn
from talaria.model.weights import Model, Served, Weights
from talaria.planning.plan import Plan
from talaria.plugins import has_torch
from talaria.tensors import Array, Tensors, only, prefixed, under, without
from talaria.training.engine import state_of
from talaria.training.interface import Task
from talaria.types import Update, as_delta
from talaria.wire import download, feedback
from talaria.wire.codec import TensorSpec, schema_of

if TYPE_CHECKING:
    from torch.nn import Module

    from talaria.training.interface import Engine


_adopted: dict[Run, Blueprint] = {}


def adopt(run: Run, blueprint: Blueprint) -> None:
    """Take what is asked here of the run's model from ``blueprint``, until this process ends: it then needs no torch
    to begin a run, to check updates and to fold them."""
    _adopted[run] = blueprint


_kits: dict[Run, tuple[Kit, Engine]] = {}


def equip(run: Run, kit: Kit) -> None:
    """Learn ``run`` from ``kit``, until this process ends: a device with engine ``"onnx"`` then needs no torch.

    Raises :class:`ConfigError` where the kit is of another run.
    """
    from talaria.programs.engine import ProgramEngine

    kit.require(run)
    adopt(run, kit.blueprint)
    _kits[run] = kit, ProgramEngine(run.spec, kit.source)


@lru_cache(maxsize=16)
def template(spec: ModelSpec) -> Module:
    """The unpruned model with the run's common initial weights. Shared: copy before changing it."""
    return zoo.build(spec)


def named_inputs(run: Run) -> Parts | None:
    """The shapes of the named inputs that the run's model reads, none where it is one; None where that is not known
    here, as without torch before there is a kit."""
    if run in _kits:
        return _kits[run][0].source.parts
    if not zoo.GROUP.is_foreign(run.spec.name):
        return {}
    if not has_torch():
        return None
    from talaria.model.several import Several

    model = template(run.spec)
    return model.parts if isinstance(model, Several) else {}


def layout_of(spec: ModelSpec) -> ChannelLayout:
    """The channel groups of the unpruned model."""
    known = next((blueprint.layout for run, blueprint in list(_adopted.items()) if run.spec == spec), None)
    return zoo.layout(spec) if known is None else known


def split_of(run: Run) -> Split:
    """Body, adapters and head of the run's model. Raises :class:`~talaria.errors.ModelError` where the model does not
    answer as the run's task takes it."""
    return _adopted[run].split if run in _adopted else _split(run.spec, run.buffers, run.task)


@lru_cache(maxsize=16)
def _split(spec: ModelSpec, buffers: Buffers, task: str) -> Split:
    found = zoo.split(spec, template(spec), buffers=buffers)
    zoo.require_form(spec, tasks.of(task).answer, task)
    return found


def algorithm_of(run: Run) -> Algorithm:
    """The run's algorithm with its hyper-parameters."""
    return algorithms.load(run.algorithm, run.hparams) if run.algorithm not in algorithms.ALGORITHMS else _own(run)


@lru_cache(maxsize=64)
def _own(run: Run) -> Algorithm:
    return algorithms.load(run.algorithm, run.hparams)


def require_travels(run: Run) -> None:
    """Raise :class:`ConfigError` where ``run`` names what only this process knows: no fleet can learn it."""
    algorithms.GROUP.require_travels(run.algorithm)
    zoo.GROUP.require_travels(run.spec.name)


def first_shared(run: Run) -> Tensors:
    """The shared state that all begin from, version 0. Raises :class:`ConfigError` where the algorithm prunes and the
    model has no channels that may go, and where a weight that has two names would travel under one of them alone."""
    if run in _adopted:
        return _adopted[run].first()
    if algorithm_of(run).card.prunes and not layout_of(run.spec).sizes:
        reasons = zoo.left_whole(run.spec) or "a model of linear layers alone, or one whose layers all meet in sums"
        raise ConfigError(
            f"{run.algorithm}: prunes channels, but {run.spec.name!r} has none that may go ({reasons}); choose another "
            "model, or an algorithm that does not prune"
        )
    shared, _ = handed_back.begun(run.algorithm, algorithm_of(run).init(template(run.spec), split_of(run)))
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
    return _adopted[run].schema if run in _adopted else schema_of(first_shared(run))


def start(run: Run, aggregator: Aggregator | None = None) -> tuple[Tensors, Tensors]:
    """The coordinator's first ``(shared, server state)``; ``aggregator`` as in :func:`close`. Raises
    :class:`ConfigError` where the recipe freezes what the model has not."""
    shared = download.rounded(first_shared(run), run.download)
    run.recipe.trained(split_of(run).keys, None)
    rule = rule_of(run, aggregator)
    return shared, handed_back.prepared(rule, rule.init(shared))


def rule_of(run: Run, aggregator: Aggregator | None = None) -> Aggregator:
    """The server's rule: ``aggregator``, else the algorithm's own.

    Statistics that an algorithm pools beside its body (pFedGM) are pooled around the fleet's rule too. Raises
    :class:`ConfigError` where an asynchronous run has no buffer, or one in rounds has one, where an algorithm averages
    what all devices keep (Hermes' ``intersection``) and ``aggregator`` moves what some of them do, and as
    :func:`require_still`."""
    if run.asynchronous:
        if not isinstance(aggregator, FedBuff):
            raise ConfigError(
                "run: an asynchronous run folds a buffer; give the rule of talaria.federated.fedbuff_run.buffered"
            )
        return aggregator
    own = algorithm_of(run).aggregator
    if any(getattr(rule, "leaves", False) for rule in chain(aggregator or own)):
        require_still(run)
    if aggregator is None:
        return own
    if any(isinstance(rule, FedBuff) for rule in chain(aggregator)):
        raise ConfigError("aggregator 'fedbuff' waits for updates over several rounds; it needs an asynchronous run")
    if isinstance(own, MaskedMean) and own.mode == "intersection" and not _intersects(innermost(aggregator)):
        raise ConfigError(
            f"{run.algorithm}: mode='intersection' moves only what all devices keep, but {type(aggregator).__name__} "
            "moves what some of them keep; give that rule keep='all' (masked_mean: mode='intersection'), or set "
            "mode='holders'"
        )
    if isinstance(own, PooledStatistics) and not pools(aggregator):
        return replace(own, inner=aggregator)
    return aggregator


def require_still(run: Run) -> None:
    """Raise :class:`ConfigError` where what a rule leaves alone would not stand still on its way to devices that go on
    from their own values of it (Hermes): int8 has a scale for each row, which moves with its largest value."""
    if run.download == "int8" and algorithm_of(run).card.prunes:
        raise ConfigError(
            f"run: download='int8' moves what the rule leaves alone because few devices keep it, and {run.algorithm} "
            "goes on from its own values of what stood still; set download='bf16', 'fp16' or 'raw'"
        )


def _intersects(rule: Aggregator) -> bool:
    if isinstance(rule, MaskedMean):
        return rule.mode == "intersection"
    return isinstance(rule, RowRule) and rule.keep == "all"


def needed(run: Run, count: int) -> int:
    """How many of ``count`` clients a round counts: ``fraction`` of them, at least one."""
    return max(1, math.floor(run.fraction * count + 0.5))


def check_over(run: Run, over: float) -> None:
    """Raise :class:`ConfigError` where a run cannot ask the share ``over`` more than it needs."""
    if not isinstance(over, int | float) or not 0 <= over <= 10:
        raise ConfigError(f"over={over} must be in 0..10: the share of devices that is asked beyond those needed")
    if over and run.asynchronous:
        raise ConfigError(f"over={over}: an asynchronous run asks everybody all the time; leave it at 0")
    if over and run.fraction == 1:
        raise ConfigError(f"over={over}: fraction=1 asks all members already; set fraction below 1")


def cohort(run: Run, round: int, clients: Sequence[str], over: float = 0.0) -> tuple[str, ...]:
    """Who is asked in a round: ``fraction`` of the clients (at least one), sorted by name.

    ``over`` asks that share more than :func:`needed`, in whole clients, of whom those count that come first. The draw
    without it is among them.
    """
    names = sorted(clients)
    if run.fraction == 1.0 or not names:
        return tuple(names)
    count = math.ceil(needed(run, len(names)) * (1 + over) - 1e-9)
    drawn = seeds.order(len(names), run.seed, "", round, "cohort")[:count]
    return tuple(sorted(names[i] for i in drawn))


def participate(
    run: Run, member: Member, shared: Tensors, private: Tensors | None, round: int
) -> tuple[Update, Tensors]:
    """The device's half of a round: ``(update, private)``. ``private=None`` is a first participation. What a coarse
    codec leaves out of this update is private state, and is added to the next one (:mod:`talaria.wire.feedback`).

    Round ``n`` from 1 trains from version ``n - 1`` of the global model, which is the update's ``base_version``: in an
    asynchronous run the round is that of the global model which the device downloaded, however many versions there are
    by now. Raises :class:`ConfigError` where the training diverged in what stays private: no later round would mend it.
    """
    task, compact, own = _enter(run, member, shared, private, round)
    if (recipe := task.recipe.at(round, run.rounds)) is not task.recipe:
        task = task.but(recipe=recipe)
    update, after = handed_back.fitted(run.algorithm, algorithm_of(run).fit(task, compact, own))
    if (name := lost(own, after)) is not None:
        raise ConfigError(
            f"private state of {member.client!r}: tensor {name!r} holds NaN or infinity, and would never leave it; "
            "lower the learning rate"
        )
    own = after
    own |= targets.kept(task.scale)
    update, how = update.but(base_version=round - 1), codec_of(run, member)
    if kind_of(run) == "delta":
        same = update.mask == task.mask
        began = only(compact, update.tensors) if same else masks.gathered(shared, update.tensors, update.mask)
        update = as_delta(update, began, ANSWERED)
    if feedback.is_coarse(how):
        left = feedback.within(under(private or {}, feedback.PREFIX), task.mask, update.mask, shared)
        update = feedback.compensate(update, left)
        own = {**own, **prefixed(feedback.remainder(update, how), feedback.PREFIX)}
    return update, _stored(update.mask, own)


def close(
    run: Run, shared: Tensors, state: Tensors, updates: Iterable[Update], aggregator: Aggregator | None = None
) -> tuple[Tensors, Tensors]:
    """The coordinator's half: fold the updates in client order, so that arrival order never changes a byte.

    ``updates`` must come sorted by client; one is in memory at a time. ``aggregator`` replaces the
    algorithm's own where the fleet asks for a robust one. In an asynchronous run it is the buffer's rule, and
    ``updates`` are what the buffer holds, one of each client: they make one version. Where the model travels down
    coarsely, what comes back is what travels; the state keeps the rest.
    """
    left = under(state, download.PREFIX)
    rule = rule_of(run, aggregator)
    found = rule.apply(shared, without(state, download.PREFIX), _in_order(updates))
    after, state = handed_back.folded(rule, without(shared, masks.PREFIX), found)
    return download.settled(after, left, state, run.download)


def kind_of(run: Run) -> Literal["value", "delta"]:
    """What every update of this run holds: new values, or differences to the version that it began from."""
    steps = run.codec != "raw" or run.asynchronous or algorithm_of(run).card.differences
    return "delta" if steps else "value"


def require_update(run: Run, shared: Tensors, update: Update, aggregator: Aggregator | None = None) -> None:
    """Raise :class:`~talaria.errors.AggregationError` where :func:`close` could not fold this update into ``shared``.

    One rule for all: a device asks it before it sends, a coordinator when an update arrives, and once more in the fold;
    ``aggregator`` as in :func:`close`. What an honest device makes passes.
    """
    kind = kind_of(run)
    if update.kind != kind:
        raise AggregationError(
            f"update of client {update.client!r}: kind {update.kind!r}, but every update of this run is {kind!r}"
        )
    rule = algorithm_of(run).aggregator if aggregator is None else rule_of(run, aggregator)
    arrival.require(rule, shared, update)


def _in_order(updates: Iterable[Update]) -> Iterable[Update]:
    last = ""
    for update in updates:
        if update.client < last:
            raise ConfigError(f"updates must come in client order, but {update.client!r} came after {last!r}")
        last = update.client
        yield update


def personalize(run: Run, member: Member, shared: Tensors, private: Tensors | None, round: int | None = None) -> Model:
    """The personal model, physically small, in eval mode: evaluated, exported and run on the device. Of a device that
    has a kit it is :class:`~talaria.model.weights.Served`, else a torch module."""
    task, compact, own = _enter(run, member, shared, private, run.rounds if round is None else round)
    model = handed_back.personal(run.algorithm, algorithm_of(run).personal(task, compact, own))
    if member.device != "cpu" and not isinstance(model, Weights | Served):
        model = model.to(member.device)  # what an algorithm adds to its network is made on the CPU
    return model if task.scale is None else targets.folded(model, task.scale, task.split)


def unpruned(run: Run) -> Served:
    """The whole model of the run's kit, as small devices compare theirs with it in size and time; what travels is zero
    in it. Raises :class:`ConfigError` where there is none."""
    if run not in _kits:
        raise ConfigError("run: no kit of it is known here; call equip first")
    kit, _ = _kits[run]
    return kit.source.whole(kit.model)


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


def first_scores(run: Run) -> Mapping[str, Array]:
    """Of each group, how much every channel of the first weights counts: what a plan chooses by."""
    if run in _kits:
        return _kits[run][0].scores
    from talaria.model.state import to_arrays

    first = to_arrays(template(run.spec).state_dict())
    return importance(first, split_of(run).parameters(*WHOLE), layout_of(run.spec))


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
    kit, programs = _kits.get(run, (None, None)) if member.engine == "onnx" else (None, None)
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


def _enter(
    run: Run, member: Member, shared: Tensors, private: Tensors | None, round: int
) -> tuple[Task, Tensors, Tensors]:
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
        _, private = handed_back.begun(run.algorithm, algorithm_of(run).init(_received(task, compact), task.split))
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
    found = algorithm_of(run).init(_received(task, masks.gathered(shared, shared, mask)), task.split)
    return handed_back.begun(run.algorithm, found)[1]


def _received(task: Task, compact: Tensors) -> Model:
    """The scratch model with what was downloaded."""
    state = state_of(task.model)
    whole = state | only(compact, [key for key in compact if key in state])
    if isinstance(task.model, Weights):
        return Weights(whole)
    from talaria.model.cloning import clone
    from talaria.model.state import load

    return load(task.model if task.engine is None else clone(task.model), whole)


def _stored(mask: ChannelMask | None, private: Tensors) -> Tensors:
    if mask is None or mask.is_full:
        return dict(private)
    return {**masks.as_tensors(mask), **private}
