"""One round, seen from each side, as plain functions. Simulation and fleet call these same functions, with
seeds that derive from (run, client, round, purpose): what you simulate is what you deploy, to the byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from talaria import algorithms, seeds
from talaria.aggregate import arrival
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import ANSWERED, PooledStatistics, pools
from talaria.aggregate.fedbuff import FedBuff
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.stacked_updates import RowRule
from talaria.aggregate.validation import lost
from talaria.aggregate.wrappers import chain, innermost
from talaria.errors import AggregationError, ConfigError
from talaria.federated import handed_back, targets
from talaria.federated.device_task import codec_of, entered, stored
from talaria.federated.run import Member, Run
from talaria.federated.run_model import algorithm_of, first_shared, split_of
from talaria.model import masks, zoo
from talaria.model.weights import Model, Served, Weights
from talaria.tensors import Tensors, only, prefixed, under, without
from talaria.types import Update, as_delta
from talaria.valid import by_item
from talaria.wire import download, feedback


def require_travels(run: Run) -> None:
    """Raise :class:`ConfigError` where ``run`` names what only this process knows: no fleet can learn it."""
    algorithms.GROUP.require_travels(run.algorithm)
    zoo.GROUP.require_travels(run.spec.name)


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
        rule = "in 0..10: the share of devices that is asked beyond those needed"
        raise ConfigError(f"over={over} must be {rule}{by_item(over)}")
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
    task, compact, own = entered(run, member, shared, private, round)
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
    return update, stored(update.mask, own)


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
    task, compact, own = entered(run, member, shared, private, run.rounds if round is None else round)
    model = handed_back.personal(run.algorithm, algorithm_of(run).personal(task, compact, own))
    if member.device != "cpu" and not isinstance(model, Weights | Served):
        model = model.to(member.device)  # what an algorithm adds to its network is made on the CPU
    return model if task.scale is None else targets.folded(model, task.scale, task.split)
