"""All devices of a run and its coordinator in one process, step by step; what simulation and replay are made of."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from talaria.aggregate.base import Aggregator
from talaria.aggregate.robust.bucketing import repeatable
from talaria.errors import ConfigError, WireError
from talaria.federated import device_task, rounds, run_model
from talaria.federated.run import Member, Run
from talaria.simulation.downloads import Downloads
from talaria.simulation.workers import Crew
from talaria.tensors import Tensors
from talaria.types import Update
from talaria.wire import codec

Trained = tuple[str, int]
"""A training: the client, and the version of the global model that it started from (0 is the first)."""


@dataclass(frozen=True)
class Arrived:
    """One training's update as it travels, or, where its codec changes no value, as it was made."""

    client: str
    base_version: int
    update: Update | bytes = field(repr=False)
    metrics: Mapping[str, float] = field(repr=False)
    up: int
    """Bytes of the update as it travels."""
    down: int = 0
    """Bytes of the global model that it downloaded for it."""

    @property
    def training(self) -> Trained:
        return self.client, self.base_version


@dataclass(frozen=True)
class RoundFacts:
    """What one round was: its number from 1, who took part, bytes sent up, and the devices' mean metrics.
    ``bytes_down`` are those of the global models that they began from, where it is known.

    ``counted`` are the trainings whose updates made the next version of the global model, ``late`` those whose updates
    came after that, both in order of clients. Where arrival was drawn, ``time`` is when the round ended, and
    ``recalled`` how many devices were told to stop, because their update would have been too old.
    """

    round: int
    clients: tuple[str, ...]
    bytes_up: int
    metrics: Mapping[str, float]
    counted: tuple[Trained, ...] = ()
    late: tuple[Trained, ...] = ()
    time: float = 0.0
    recalled: int = 0
    bytes_down: int | None = None

    @property
    def staleness(self) -> tuple[int, ...]:
        """Versions between what each counted update started from and what it was folded into."""
        return tuple(self.round - 1 - base_version for _, base_version in self.counted)


class Fleet:
    """The devices' private states, the global model and the server's state of one ``run``; every update crosses the
    codec."""

    def __init__(
        self, run: Run, members: Mapping[str, Member], aggregator: Aggregator | None, crew: Crew | None = None
    ) -> None:
        self.run, self.members, self._aggregator, self._crew = run, members, aggregator, crew
        self.shared, server = rounds.start(run, aggregator)
        self.server = repeatable(rounds.rule_of(run, aggregator), server, run.seed)
        self.version = 0
        self.private: dict[str, Tensors] = {}
        self.sent = dict.fromkeys(sorted(members), 0)
        self.history: list[RoundFacts] = []
        self._downloads = Downloads(run)
        self.under_way: list[tuple[float, str, int]] = []
        """In an asynchronous run: who trains, until when, from which version."""
        self.models: dict[int, Tensors] = {}
        """The versions that somebody still trains from."""

    def train(self, client: str, base_version: int, shared: Tensors) -> Arrived:
        """Let a device train from ``shared``, which is version ``base_version``."""
        if client not in self.members:
            raise ConfigError(f"client {client!r} is no member of this run; members are {sorted(self.members)[:8]}")
        member, private = self.members[client], self.private.get(client)
        down = self._downloads.size(shared, member, private)
        update, self.private[client] = rounds.participate(self.run, member, shared, private, base_version + 1)
        how = device_task.codec_of(self.run, member)
        frame = codec.encode_update(update, how)
        self.sent[client] += len(frame)
        return Arrived(client, base_version, update if how == "raw" else frame, update.metrics, len(frame), down)

    def train_all(self, clients: Sequence[str]) -> Iterator[Arrived]:
        """Let devices train from the present version, in parallel where there is a crew: each update in its turn."""
        if self._crew is None:
            yield from (self.train(client, self.version, self.shared) for client in clients)
            return
        jobs = (({"train": client, "round": self.version + 1}, self.private.get(client)) for client in clients)
        for client, (metrics, private, frame) in zip(clients, self._crew.answers(self.shared, jobs), strict=True):
            down = self._downloads.size(self.shared, self.members[client], self.private.get(client))
            self.private[client] = private
            self.sent[client] += len(frame)
            yield Arrived(client, self.version, frame, metrics, len(frame), down)

    def fold(self, arriving: Iterable[Arrived], late: Collection[Trained] = (), **more: Any) -> RoundFacts:
        """Make the next version of the global model of what arrives, in the order of clients and base versions; one
        update is held at a time. Those of ``late`` trainings do not count. ``more`` goes into the facts."""
        every = list[Arrived]()
        counted = self._counted(arriving, late, every)
        self.shared, self.server = rounds.close(
            self.run, self.shared, self.server, self._decoded(counted), self._aggregator
        )
        deque(counted, maxlen=0)  # a rule need not read them all
        every.sort(key=lambda one: one.training in late)  # they stay in order
        self.version += 1
        facts = RoundFacts(
            self.version,
            tuple(sorted({one.client for one in every})),
            sum(one.up for one in every),
            means_of([one.metrics for one in every]),
            tuple(one.training for one in every if one.training not in late),
            tuple(one.training for one in every if one.training in late),
            bytes_down=sum(one.down for one in every),
            **more,
        )
        self.history.append(facts)
        return facts

    @staticmethod
    def _counted(arriving: Iterable[Arrived], late: Collection[Trained], every: list[Arrived]) -> Iterator[Arrived]:
        """What counts; ``every`` gets all that arrives, without its update."""
        for one in arriving:
            every.append(replace(one, update=b""))
            if one.training not in late:
                yield one

    def _decoded(self, arrived: Iterable[Arrived]) -> Iterator[Update]:
        schema = run_model.update_schema(self.run)
        layout = run_model.layout_of(self.run.spec)
        for one in arrived:
            try:
                if isinstance(one.update, bytes):
                    update = codec.decode_update(one.update, schema=schema, layout=layout)
                else:
                    update = codec.as_decoded(one.update, schema=schema, layout=layout)
            except WireError as error:
                raise ConfigError(f"update of {one.client!r}: {error}") from error
            yield update


def trained(
    run: Run, member: Member, shared: Tensors, private: Tensors | None, round: int
) -> tuple[bytes, Mapping[str, float], Tensors]:
    """A device's round: its update as it travels, the metrics in it, and its private state after."""
    update, private = rounds.participate(run, member, shared, private, round)
    return codec.encode_update(update, device_task.codec_of(run, member)), update.metrics, private


def means_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, the mean of a metric over those updates that tell it."""
    names = sorted({key for entry in metrics for key in entry})
    return {key: sum(m[key] for m in metrics if key in m) / sum(key in m for m in metrics) for key in names}
