"""Schedules of a simulated run: in rounds, as updates arrive, or in the recorded order of another run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter

from talaria.aggregate.fedbuff import FedBuff
from talaria.errors import ConfigError
from talaria.federated import rounds
from talaria.simulation.simulator import Arrived, Fleet, RoundFacts, Trained
from talaria.simulation.stragglers import delay


@dataclass(frozen=True)
class Record:
    """How one version was made: the trainings counted in it, and those that were done but came too late to count.

    A late training still moved its device's private part, and with it what that device sends later. Put it into the
    record of the version that was made while it trained, or any before its device's next one.
    """

    counted: tuple[Trained, ...]
    late: tuple[Trained, ...] = ()


def in_rounds(fleet: Fleet, over: float) -> Iterator[RoundFacts]:
    """Everybody asked trains from one global model. With ``over``, those who come first are counted, as many as needed.

    Goes on from the version that ``fleet`` is at, and yields after each; so does :func:`as_they_come`.
    """
    run, names = fleet.run, tuple(fleet.members)
    for number in range(fleet.version + 1, run.rounds + 1):
        asked = rounds.cohort(run, number, names, over)
        due = {name: delay(run.seed, name, number) for name in asked} if over else dict.fromkeys(asked, 0.0)
        first = sorted(asked, key=lambda name: (due[name], name))[: rounds.needed(run, len(names))]
        late = {(name, fleet.version) for name in asked}.difference((name, fleet.version) for name in first)
        yield fleet.fold(fleet.train_all(asked), late, time=due[first[-1]])


def as_they_come(fleet: Fleet, rule: FedBuff) -> Iterator[RoundFacts]:
    """Every device trains again as soon as its update is counted; a full buffer makes the next version.

    A device has one place in a buffer: it waits for the next version where its update is in the present one. Devices
    whose update would be more than ``max_staleness`` behind are told to begin anew, from the present version.
    """
    run = fleet.run
    if not fleet.version:
        fleet.models = {0: fleet.shared}
        fleet.under_way = [(delay(run.seed, name, 1), name, 0) for name in sorted(fleet.members)]
    heapify(fleet.under_way)
    waiting: list[Arrived] = []
    while fleet.version < run.rounds:
        clock, name, base_version = heappop(fleet.under_way)
        waiting.append(fleet.train(name, base_version, fleet.models[base_version]))
        if len(waiting) < rule.capacity:
            continue
        oldest = fleet.version + 1 - rule.max_staleness
        recalled = [entry for entry in fleet.under_way if entry[2] < oldest]
        facts = fleet.fold(sorted(waiting, key=attrgetter("training")), time=clock, recalled=len(recalled))
        fleet.under_way = [entry for entry in fleet.under_way if entry[2] >= oldest]
        heapify(fleet.under_way)
        for idle in [one.client for one in waiting] + [entry[1] for entry in recalled]:
            heappush(fleet.under_way, (clock + delay(run.seed, idle, fleet.version + 1), idle, fleet.version))
        waiting = []
        fleet.models[fleet.version] = fleet.shared
        used = {entry[2] for entry in fleet.under_way}
        fleet.models = {version: shared for version, shared in fleet.models.items() if version in used}
        yield facts


def as_recorded(fleet: Fleet, records: Iterable[Record]) -> Fleet:
    """Each device trains from the versions that the records name, in that order; they count where the records say."""
    todo = [(record, sorted({*record.counted, *record.late}, key=lambda one: (one[1], one[0]))) for record in records]
    last = {base_version: index for index, (_, trainings) in enumerate(todo) for _, base_version in trainings}
    models = {0: fleet.shared}
    for index, (record, trainings) in enumerate(todo):
        unknown = [base_version for _, base_version in trainings if base_version not in models]
        if unknown:
            raise ConfigError(
                f"record {index + 1}: no version {unknown[0]} of the global model is there yet; check the record"
            )
        arrived = [fleet.train(name, base_version, models[base_version]) for name, base_version in trainings]
        fleet.fold(sorted(arrived, key=attrgetter("training")), {*record.late}.difference(record.counted))
        models[fleet.version] = fleet.shared
        models = {version: shared for version, shared in models.items() if last.get(version, -1) > index}
    return fleet
