"""Many devices in one process: the same functions, seeds and bytes as the fleet over MQTT."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import Module

from talaria.aggregate.base import Aggregator
from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.errors import ConfigError
from talaria.federated import device_task, rounds
from talaria.federated.fedbuff_run import Buffering, buffered
from talaria.federated.run import Engine, Member, Run
from talaria.federated.run_model import dense_bytes
from talaria.model.masks import ChannelMask
from talaria.planning.plan import Plan
from talaria.simulation.downloads import Downloads
from talaria.simulation.schedules import Record, as_recorded, as_they_come, in_rounds
from talaria.simulation.simulator import Fleet, RoundFacts, trained
from talaria.simulation.workers import Answer, Crew
from talaria.tensors import Tensors
from talaria.training import evaluation
from talaria.training.evaluation import Metrics, Report


@dataclass(frozen=True)
class Learned:
    """A finished run. ``shared`` is dense; ``private[client]`` is that device's whole private state."""

    run: Run
    members: Mapping[str, Member] = field(repr=False)
    shared: Tensors = field(repr=False)
    server: Tensors = field(repr=False)
    private: Mapping[str, Tensors] = field(repr=False)
    history: tuple[RoundFacts, ...] = field(repr=False)
    bytes_up: Mapping[str, int] = field(repr=False)

    @property
    def bytes_down(self) -> int | None:
        """Bytes of all global models that members downloaded: for each training, and the last one. None of a run that
        an older version began, which did not count them."""
        rounds_down = [facts.bytes_down for facts in self.history]
        known = [size for size in rounds_down if size is not None]
        if len(known) < len(rounds_down):
            return None
        sizes, last = Downloads(self.run), self.members.items()
        return sum(known) + sum(sizes.size(self.shared, one, self.private.get(n), last=True) for n, one in last)

    @property
    def bytes_whole(self) -> tuple[int, int]:
        """What ``bytes_up`` and ``bytes_down`` would be with every shared value of every model and update as it is."""
        trained = sum(len(facts.counted) + len(facts.late) for facts in self.history)
        return dense_bytes(self.run) * trained, dense_bytes(self.run) * (trained + len(self.members))

    @property
    def records(self) -> tuple[Record, ...]:
        """What :func:`replay` needs to come to the same bytes."""
        return tuple(Record(facts.counted, facts.late) for facts in self.history)

    @property
    def masks(self) -> dict[str, ChannelMask]:
        """The mask that each member ended with, where it has one."""
        found = {name: device_task.mask_of(self.run, one, self.private.get(name)) for name, one in self.members.items()}
        return {name: mask for name, mask in found.items() if mask is not None}

    @torch.inference_mode(False)
    def personal(self, member: Member, round: int | None = None) -> Module:
        """The model that ``member``, of the run or a newcomer, is served after ``round``, the last one by default."""
        model: Module = rounds.personalize(self.run, member, self.shared, self.private.get(member.client), round)
        return model


def members_of(
    clients: Mapping[str, Client],
    plans: Mapping[str, Plan] | None = None,
    engine: Engine = "torch",
    device: str = "cpu",
) -> dict[str, Member]:
    """Each client's own side, without its test samples."""
    plans = plans or {}
    return {
        name: Member(name, c.train, c.val, plans.get(name), engine, device, c.unlabelled) for name, c in clients.items()
    }


def simulate(
    run: Run,
    members: Mapping[str, Member],
    *,
    aggregator: Aggregator | None = None,
    buffering: Buffering | None = None,
    over: float = 0.0,
    progress: Callable[[RoundFacts], None] | None = None,
) -> Learned:
    """All rounds of ``run`` over ``members``; ``progress`` is called after each.

    Every update crosses the wire's codec, as it does in the fleet, and is decoded one at a time to be folded. An
    asynchronous run takes ``buffering``; one in rounds may ask ``over`` more devices than it counts. In both, who comes
    when is drawn (:mod:`talaria.simulation.stragglers`). Raises :class:`~talaria.errors.ConfigError` where these
    do not fit.
    """
    fleet, versions = course(run, members, aggregator=aggregator, buffering=buffering, over=over)
    for facts in versions:
        if progress is not None:
            progress(facts)
    return learned(fleet)


def course(
    run: Run,
    members: Mapping[str, Member],
    *,
    aggregator: Aggregator | None = None,
    buffering: Buffering | None = None,
    over: float = 0.0,
    crew: Crew | None = None,
) -> tuple[Fleet, Iterator[RoundFacts]]:
    """The fleet before its first round, and its rounds, each of which is learned when it is asked for. As
    :func:`simulate`, step by step; the clients of a round train in the processes of ``crew`` (:func:`crew_of`)."""
    rounds.check_over(run, over)
    if not members or not all(isinstance(member, Member) for member in members.values()):
        raise ConfigError(
            "simulate: members must be Members by name, one at least; members_of(data.clients) makes them"
        )
    if run.asynchronous:
        buffering = buffering or Buffering()
        buffering.require(len(members))
        rule = buffered(run, buffering, aggregator)
        fleet = Fleet(run, members, rule)
        return fleet, as_they_come(fleet, rule)
    if buffering is not None:
        raise ConfigError("simulate: a buffer is for an asynchronous run; set run.asynchronous, or leave it out")
    fleet = Fleet(run, members, aggregator, crew)
    return fleet, in_rounds(fleet, over)


def crew_of(run: Run, members: Mapping[str, Member], data: Federated, count: int, ray: str | None = None) -> Crew:
    """``count`` processes, or the Ray cluster at ``ray``, that train and measure ``members``, of the run and newcomers,
    for :func:`course` and :func:`evaluate`. Raises :class:`ConfigError` for an asynchronous run, whose trainings follow
    one another, and where a cluster's nodes do not know the run's code."""
    asked = f"workers={count}" if ray is None else f"ray={ray!r}"
    if run.asynchronous:
        raise ConfigError(f"simulate: {asked}: an asynchronous run trains one client after another; leave it out")
    if ray is not None and count:
        raise ConfigError(f"simulate: {asked} has a process for each CPU of the cluster; leave workers={count} at 0")
    every = data.everyone

    def work(asked: Mapping[str, Any], shared: Tensors, private: Tensors | None) -> Answer:
        if "train" in asked:
            frame, metrics, private = trained(run, members[asked["train"]], shared, private, asked["round"])
            return metrics, private, frame
        member = members[asked["measure"]]
        model = rounds.personalize(run, member, shared, private, asked["round"])
        return asdict(evaluation.evaluate(model, every[member.client].test, task=run.task)), {}, b""

    if ray is None:
        return Crew(count, work)
    from talaria.simulation.ray_crew import RayCrew

    rounds.require_travels(run)
    return RayCrew(ray, work)


def replay(
    run: Run,
    members: Mapping[str, Member],
    records: Iterable[Record],
    *,
    aggregator: Aggregator | None = None,
    buffering: Buffering | None = None,
) -> Learned:
    """The run again, as it went by ``records``: the same bytes, whoever came when. Options as in :func:`simulate`."""
    rule = buffered(run, buffering or Buffering(), aggregator) if run.asynchronous else aggregator
    return learned(as_recorded(Fleet(run, members, rule), records))


def learned(fleet: Fleet) -> Learned:
    """What ``fleet`` has learned until now."""
    return Learned(
        fleet.run, fleet.members, fleet.shared, fleet.server, fleet.private, tuple(fleet.history), fleet.sent
    )


def evaluate(
    learned: Learned,
    data: Federated,
    members: Mapping[str, Member],
    round: int | None = None,
    crew: Crew | None = None,
) -> Report:
    """Each client's served model, after ``round`` (the last one by default), on that client's own test samples."""
    if crew is not None:
        jobs = [({"measure": name, "round": round}, learned.private.get(name)) for name in members]
        answers = crew.answers(learned.shared, jobs)
        told = {name: Metrics(**facts) for name, (facts, *_) in zip(members, answers, strict=True)}
        return evaluation.report(told, learned.run.task)
    every = data.everyone
    task = learned.run.task
    found = {
        name: evaluation.evaluate(learned.personal(one, round), every[name].test, task=task)
        for name, one in members.items()
    }
    return evaluation.report(found, task)
