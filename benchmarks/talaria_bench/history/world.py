"""One history: the real coordinator and the real agents, made to live through a plan on a virtual clock."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

from talaria import time
from talaria.errors import StateError, TalariaError
from talaria.federated.run import Run
from talaria.identity import credentials
from talaria.wire.signing import Signer
from talaria.wire.topics import coordinator_filters, device_filters
from talaria.wire.transport import Arrival, Will
from talaria_bench.history import exact
from talaria_bench.history.broker import SILENCE_S, Broker, Weather, Wire
from talaria_bench.history.disks import Disk, Disks, KilledError
from talaria_bench.history.faults import COORDINATOR, SPAN_S, Fault, Plan
from talaria_bench.history.promises import BrokenError, Promises, Record
from talaria_bench.history.virtual import StalledError, VirtualLoop
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.fleet.life import carry_out
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.identity.membership import EnrolledDevice, Membership
from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.server.open_state import held, open_blobs, open_store
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData

FLEET = "watch"
MANY = 1_000_000
"""Rounds by which the operator extends a run at last, so that learning can go on."""
SHARE, REFUSED = 0.4, 0.4
"""Of a canary: of the members who try, and of the gates that may refuse."""
ORDER_S = 60.0
"""So many virtual seconds an operator tries to give an order."""
DAY_S = 86400.0
DEADLINE_S = 600.0
BOUND_S = 400.0
"""So many virtual seconds after the last fault ended, learning must have gone on: links retry after at most a minute,
what failed is tried again after at most two, a lost birth is repeated each minute; and no round may wait for its
deadline because of one that is gone."""
NEEDED = 2
"""Rounds that must be committed then; and each honest device that is there must have counted."""
WALL = 1_800_000_000.0
OPERATOR_S = 10.0
"""A program that ended with an error is started again after this long."""
ENDING = 60
"""How often what still runs at the end is told to end."""
LAST_WORDS = 40


@dataclass
class Machine:
    """A coordinator or a device: its disk, its clocks, the life of its program."""

    name: str
    disk: Disk
    random: Random
    origin: float = 0.0
    set_by: float = 0.0
    task: asyncio.Task[Any] | None = None
    wire: Wire | None = None
    back: float = 0.0
    """Seconds until a killed program is started again."""
    retired: bool = False
    """Nobody starts it again."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Callable[[], None] | None = None
    killed: bool = False
    leaves: bool = False
    """Whether it was told to stop in good order."""
    service: Service | None = None
    between: list[Callable[[], None]] = field(default_factory=list)
    """What is done to it while it is off."""


@dataclass(frozen=True)
class Outcome:
    """What became of a history."""

    seed: int
    broken: str
    """One word, empty where all promises were kept."""
    why: str
    trace: str
    """sha256 of everything that happened, in order."""
    events: int
    rounds: int
    seconds: float
    """Virtual seconds that it took."""
    recovered: float
    """Virtual seconds after the last fault until learning had gone on."""
    last: tuple[str, ...] = field(repr=False, default=())
    """The last events that were told."""


class _NoData:
    """Exact learning needs no samples."""

    def load(self) -> DeviceData:
        raise StateError("there are no samples in a history")


class World:
    """One plan in an empty ``folder``. ``spoil`` may plant a flaw into a service that was made, to see it found."""

    def __init__(self, plan: Plan, folder: Path, *, keep: int = LAST_WORDS, flaw: Flaw | None = None) -> None:
        self.plan, self.folder, self._flaw = plan, folder, flaw
        self.loop = VirtualLoop(Random(f"{plan.seed}/threads"))
        self.disks = Disks(folder)
        self.broker = Broker(self.loop, Random(f"{plan.seed}/links"), self._witness, self._heard)
        liars = {f.target for f in plan.faults if f.kind in ("lie", "rubbish")}
        self.promises = Promises(FLEET, set(plan.devices) - liars)
        self._trace, self._events = hashlib.sha256(), 0
        self._said: deque[str] = deque(maxlen=keep)
        self._lies: dict[str, str] = {}
        self._gone: set[str] = set()
        self._broken: BrokenError | None = None
        self._own: BaseException | None = None
        """What went wrong in this bench itself."""
        self._readers: dict[Path, Store] = {}
        self._backups: list[tuple[Path, Record]] = []
        self._second: asyncio.Task[None] | None = None
        self._second_machine: Machine | None = None
        self._worker = ThreadPoolExecutor(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._run = exact.run_of(plan.rounds)
        self._runs = 0
        """Runs that the operator has begun after the first."""
        self._refuses: set[int] = set()
        """Seeds of the runs that no gate lets pass."""
        self._orders: asyncio.Queue[Fault] = asyncio.Queue()
        self._state = "co"
        self.machines = {name: self._machine(name) for name in (COORDINATOR, *plan.devices)}
        self._keys = {name: hashlib.sha256(f"{plan.seed}/key/{name}".encode()).digest() for name in self.machines}
        self._enrolments = 0
        self._stores: list[Store] = []

    def _machine(self, name: str) -> Machine:
        (self.folder / name).mkdir()
        random = Random(f"{self.plan.seed}/{name}")
        machine = Machine(name, Disk(self.folder / name, lambda: self._died(name)), random, random.uniform(0, 1e6))
        self.disks.of[name] = machine.disk
        return machine

    # -- from the first event to the last

    def live(self) -> Outcome:
        """Live through the plan."""
        recovered = 0.0
        with self.disks.interposed(), _quiet_logs():
            asyncio.set_event_loop(self.loop)
            try:
                recovered = self.loop.run_until_complete(self._story())
            except BrokenError as why:
                self._broken = why
            except StalledError as why:
                self._broken = BrokenError("stuck", str(why))
            finally:
                self._end()
        if self._own is not None:
            raise RuntimeError(f"history: seed {self.plan.seed} failed by itself: {self._own!r}") from self._own
        broken = self._broken
        return Outcome(
            self.plan.seed,
            "" if broken is None else broken.kind,
            "" if broken is None else str(broken).replace(f"{self.folder}/", ""),
            self._trace.hexdigest(),
            self._events,
            self.promises.record.round,
            self.loop.time(),
            recovered,
            tuple(self._said),
        )

    def _end(self) -> None:
        for machine in self.machines.values():
            machine.disk.dead = True
        with suppress(StalledError):
            for _ in range(ENDING):  # one that is left open lets go of its files only when it is collected
                if not (tasks := asyncio.all_tasks(self.loop)):
                    break
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        for store in self._stores:
            store.close()
        self._worker.shutdown()
        asyncio.set_event_loop(None)
        self.loop.close()

    async def _story(self) -> float:
        self._enrol()
        self._new_state()
        for name in (COORDINATOR, *self.plan.first):
            self._behind(self._lives(self.machines[name]))
        operator = self._behind(self._operates())
        for fault in self.plan.faults:
            if fault.kind == "old-copy":
                self.loop.call_later(fault.at / 2, self._copy, fault.target)
        watch = self._behind(self._watched())
        end = 0.0
        for fault in self.plan.faults:
            await self._until(fault.at)
            self._tell("history", "fault", what=str(fault)[10:])
            self._happen(fault)
            end = max(end, fault.at + fault.seconds)
        await self._until(max(end, SPAN_S / 3) + 1.0)
        self._calm()
        operator.cancel()
        await self._set_going()
        self.promises.forget()
        found = await self._recovered(self.loop.time())
        watch.cancel()
        self._look()
        record = self._record()
        if record is not None and self._broken is None:
            self.promises.finally_(*record)
        if self._broken is not None:
            raise self._broken
        return found

    async def _until(self, when: float) -> None:
        while self.loop.time() < when:
            if self._broken is not None:
                raise self._broken
            await asyncio.sleep(min(1.0, when - self.loop.time()))

    async def _watched(self) -> None:
        """The promises, looked at again and again; besides after each round."""
        while True:
            await asyncio.sleep(5.0)
            self._look()

    def _calm(self) -> None:
        """Whatever disturbed is over."""
        self.broker.weather.clear()
        self.broker.rise()
        for machine in self.machines.values():
            machine.disk.full, machine.disk.fail_in, machine.disk.die_in = False, 0, 0
        self._tell("history", "calm")

    async def _recovered(self, since: float) -> float:
        """Wait until learning has gone on."""
        while True:
            there = sorted(self.promises.honest - self._gone - self._retired())
            if self._broken is not None:
                raise self._broken
            missing = [name for name in there if not self.promises.since[name]]
            if self.promises.commits >= NEEDED and not missing and self._online_told(there):
                return self.loop.time() - since
            if self.loop.time() - since > BOUND_S:
                raise BrokenError("stuck", self._stuck(missing))
            await asyncio.sleep(0.5)

    def _online_told(self, there: list[str]) -> bool:
        """Whether the record says of all who are there that they are."""
        record = self._record()
        if record is None:
            return False
        online = {row.device for row in record[0].devices.of(FLEET) if row.online}
        return set(there) <= online and not self._gone & online

    def _retired(self) -> set[str]:
        """Who has left for good, by the record."""
        record = self._record()
        return set() if record is None else {d.device for d in record[0].devices.of(FLEET) if d.retired is not None}

    def _stuck(self, missing: list[str]) -> str:
        commits = self.promises.commits
        if self.machines[COORDINATOR].retired and (self._second is None or self._second.done()):
            return f"{BOUND_S:.0f} s after the last fault no coordinator serves any more"
        if commits < NEEDED:
            return f"in {BOUND_S:.0f} s after the last fault {commits} rounds were committed"
        if missing:
            return f"in {BOUND_S:.0f} s after the last fault nothing of {', '.join(missing)} counted"
        return "the record calls devices offline that take part, or online that are gone"

    # -- programs

    async def _lives(self, machine: Machine) -> None:
        """Start a program again and again, as an operator or a supervisor would."""
        while not machine.retired:
            machine.killed, machine.disk.dead, machine.back = False, False, OPERATOR_S
            machine.leaves = False
            machine.ended.clear()
            work = self._serve(machine) if machine.name == COORDINATOR else self._agent(machine)
            with time.told_by(self._clocks(machine)):
                machine.task = self.loop.create_task(work)
            try:
                await asyncio.wait([machine.task])
            finally:
                machine.task.cancel()
            self._ended(machine, machine.task)
            machine.ended.set()
            machine.wire, machine.stop = None, None
            await asyncio.sleep(machine.back)
            if machine.between:  # a hand is at it, and sees to its disk first
                machine.disk.dead, machine.disk.full, machine.disk.fail_in, machine.disk.die_in = False, False, 0, 0
            for change in machine.between:
                change()
            machine.between.clear()

    def _ended(self, machine: Machine, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if machine.killed or isinstance(error, KilledError | asyncio.CancelledError) or task.cancelled():
            self._tell(machine.name, "dead")
        elif isinstance(error, BrokenError):
            self._break(error)
        elif isinstance(error, TalariaError):
            self._tell(machine.name, "ended", error=str(error))
            if machine.name == COORDINATOR and ("took over" in str(error) or "another coordinator" in str(error)):
                machine.retired = True
        elif error is not None:
            self._break(BrokenError("crash", f"{machine.name} ended with {error!r}"))
        else:
            self._tell(machine.name, "stopped")

    def _clocks(self, machine: Machine) -> time.Clocks:
        return time.Clocks(lambda: machine.origin + self.loop.time(), lambda: WALL + machine.set_by + self.loop.time())

    def _config(self) -> FleetConfig:
        return FleetConfig(
            name=FLEET,
            run=self._run,
            state=self.folder / COORDINATOR / self._state,
            members=() if self.plan.grows else self.plan.devices,
            devices=len(self.plan.first) if self.plan.grows else 0,
            grows=self.plan.grows,
            away_days=self.plan.away_s / DAY_S,
            canary=Canary(share=SHARE, refused=REFUSED, rounds=1) if self.plan.canary else None,
            deadline_s=DEADLINE_S,
            identity=self.folder / "identity" if self.plan.keyed else None,
        )

    async def _serve(self, machine: Machine) -> None:
        config = self._config()
        again = True
        with held(config.state):
            while again and not machine.leaves:  # what it learns may change, as talaria_coordinator.server.served says
                store = self._opened(config, machine)
                try:
                    machine.service = self._service(machine, config, store, open_blobs(config))
                    await machine.service.run("history")
                    again = machine.service.again
                finally:
                    machine.service = None
                    store.close()

    def _opened(self, config: FleetConfig, machine: Machine) -> Store:
        store = open_store(config)
        self._stores.append(store)

        def committing(connection: Connection) -> None:
            if connection.get_execution_options().get("reads"):
                return
            try:
                machine.disk.about_to("commit")
            except OSError as error:
                cause = sqlite3.OperationalError(f"disk I/O error or full: {error.strerror}")
                raise OperationalError("COMMIT", {}, cause) from cause

        event.listen(store.database.engine, "commit", committing)
        return store

    def _service(self, machine: Machine, config: FleetConfig, store: Store, blobs: Any) -> Service:
        def opened(url: str, config: FleetConfig, will: Callable[[], Will]) -> Wire:
            machine.wire = Wire(self.broker, COORDINATOR, coordinator_filters(FLEET), will)
            return machine.wire

        service = Service(
            config,
            store,
            blobs,
            report=lambda told: self._told(machine.name, told),
            open_transport=opened,
            learn=exact.ExactLearning,
        )
        if self._flaw is not None:
            self._flaw(service)

        def stop() -> None:
            machine.leaves = True
            service.stop()

        machine.stop = stop
        return service

    async def _agent(self, machine: Machine) -> None:
        name = machine.name
        config = DeviceConfig(
            device=name,
            fleet=FLEET,
            broker="mqtt://history",
            state=self.folder / name / "state",
            source=_NoData(),
            identity=self.folder / name / "identity" if self.plan.keyed else None,
            stay=True,
        )

        def opened(config: DeviceConfig, will: Callable[[], Will]) -> Wire:
            machine.wire = Wire(self.broker, name, device_filters(FLEET, name), will)
            return machine.wire

        agent = Agent(
            config,
            report=lambda told: self._told(name, told),
            worker=self._worker,
            open_transport=opened,
            learn=lambda config, store, run: exact.ExactLearner(
                config,
                store,
                run,
                lie=lambda: self._lies.get(name, ""),
                refuses=lambda run: run.seed in self._refuses,
            ),
        )
        await agent.run()

    # -- what is seen

    def _told(self, name: str, told: dict[str, Any]) -> None:
        event = told["event"]
        self._tell(name, event, **{k: v for k, v in told.items() if k not in ("at", "fleet", "event")})
        if event == "quarantined":
            try:
                self.promises.shut_out(told["device"], told["reason"])
            except BrokenError as broken:
                self._break(broken)
        elif event in ("round-closed", "round-failed", "started"):
            self.loop.call_soon(self._look)

    def _tell(self, who: str, event: str, **facts: Any) -> None:
        text = f"{self.loop.time():8.2f}  {who:<7} {event} " + " ".join(f"{k}={v}" for k, v in facts.items())
        text = text.replace(f"{self.folder}/", "")
        self._trace.update(text.encode())
        self._events += 1
        if event not in _DULL:
            self._said.append(text[:240])

    def _witness(self, name: str, topic: str, payload: bytes) -> None:
        self._trace.update(f"{self.loop.time()!r} {name} {topic} ".encode() + payload)
        self._events += 1

    def _heard(self, name: str, arrival: Arrival) -> None:
        self.promises.heard(name, arrival)

    def _look(self) -> None:
        if self._broken is not None:
            return
        self._fleet()
        record = self._record()
        if record is not None:
            try:
                self.promises.look(*record)
            except BrokenError as broken:
                self._break(broken)

    def _break(self, broken: BrokenError) -> None:
        if self._broken is None:
            self._broken = broken
            self._tell("history", "broken", why=str(broken))

    def _record(self) -> tuple[Store, FolderBlobs] | None:
        """The record as it lies on the coordinator's disk, whoever serves; None where no fleet is in it yet."""
        config = self._config()
        if config.state not in self._readers:
            if not (config.state / "blobs").exists():
                return None
            self._readers[config.state] = store = Store(config.database)
            self._stores.append(store)
        store = self._readers[config.state]
        return None if store.fleets.get(FLEET) is None else (store, FolderBlobs(config.state / "blobs"))

    # -- what the operator does

    async def _operates(self) -> None:
        """One order after the other, as faults ask for them."""
        while True:
            fault = await self._orders.get()
            match fault.kind:
                case "extend":
                    await self._insist(Order("extend", rounds=int(fault.strength)))
                case "retire" | "readmit":
                    await self._insist(Order(fault.kind, fault.target))
                case "pause":
                    await self._insist(Order("pause"))
                    await asyncio.sleep(fault.seconds)
                    await self._insist(Order("resume"))
                case "next":
                    await self._next_run(fault.how, int(fault.strength))

    async def _next_run(self, how: str, rounds: int) -> bool:
        """Begin another run, once the last is done or paused with its round closed; False where it could not be."""
        self._runs += 1
        run = replace(exact.run_of(rounds), seed=self._runs)
        if how == "no":
            self._refuses.add(run.seed)
        fleet = self._fleet()
        if fleet is None or fleet.status != "done":
            await self._insist(Order("pause"))
        begun = await self._insist(Order("next", rounds=rounds, run=run.to_json()))
        if not begun:
            await self._insist(Order("resume"))
        return begun

    async def _set_going(self) -> None:
        """After all that happened an operator sees that learning goes on."""
        end = self.loop.time() + BOUND_S
        while self.loop.time() < end and self._broken is None:
            fleet = self._fleet()
            if fleet is not None and fleet.status in ("paused", "aborted"):
                await self._insist(Order("resume"))
            elif fleet is not None and Run.from_json(fleet.run).rounds < MANY:
                await self._insist(Order("extend", rounds=MANY))
            elif fleet is not None:
                return
            await asyncio.sleep(1.0)
        if self._broken is None:
            raise BrokenError("stuck", "the operator's orders are refused, or nobody takes them")

    async def _insist(self, order: Order) -> bool:
        """Give an order until it is carried out; False where it is not in :data:`ORDER_S`."""
        end, told = self.loop.time() + ORDER_S, ""
        while self.loop.time() < end:
            given = replace(order, answer=Future())
            try:
                with time.told_by(self._clocks(self.machines[COORDINATOR])):
                    status = await self._give(given)
            except TalariaError as error:
                if str(error) != told:
                    told = str(error)
                    self._tell("operator", "refused-order", verb=given.verb, error=told)
            except KilledError:
                self._tell("operator", "order-lost", verb=given.verb)
            else:
                self._tell("operator", "ordered", verb=given.verb, device=given.device, status=status)
                return True
            await asyncio.sleep(2.0)
        return False

    async def _give(self, order: Order) -> str:
        """To the coordinator that serves; where none does, and its machine is on, to the store."""
        machine = self.machines[COORDINATOR]
        second = self._second_machine
        serving = second.service if machine.retired and second is not None else machine.service
        if serving is not None:
            await serving.order(order)
            for _ in range(100):
                if order.answer.done():
                    return order.answer.result()
                await asyncio.sleep(0.1)
            raise StateError("the coordinator did not take the order")
        if machine.disk.dead or machine.retired:
            raise StateError("the coordinator's machine is off")
        config = self._config()
        with held(config.state):
            store = self._opened(config, machine)
            try:
                fleet = store.fleets.get(FLEET)
                if fleet is None:
                    raise StateError("the fleet was never served")
                carry_out(order, fleet, config, store, open_blobs(config), exact.ExactLearning)
                return "carried out"
            finally:
                store.close()

    def _fleet(self) -> Fleet | None:
        """The fleet's record; the runs that its gates refuse are known by it."""
        record = self._record()
        fleet = None if record is None else record[0].fleets.get(FLEET)
        if fleet is not None:
            run = Run.from_json(fleet.run)
            if run.seed in self._refuses:
                self.promises.refused.add(run.identity)
        return fleet

    # -- what happens

    def _happen(self, fault: Fault) -> None:
        machine = self.machines.get(fault.target)
        match fault.kind:
            case "weather":
                self.broker.weather[fault.number] = Weather(fault.strength, fault.strength, 2.0)
                self.loop.call_later(fault.seconds, self.broker.weather.pop, fault.number, None)
            case "broker":
                self.broker.fall(keeps=fault.how != "empty")
                self.loop.call_later(fault.seconds, self.broker.rise)
            case "lie":
                self._lies[fault.target] = fault.how
            case "rubbish":
                self._rubbish(fault.target, Random(f"{self.plan.seed}/{fault.number}"))
            case "second":
                self._start_second(wrong=fault.how == "wrong")
            case "damage":
                self._damage()
            case "backup":
                self._back_up()
            case "join" if machine is not None:
                self._behind(self._lives(machine))
            case "extend" | "next" | "retire" | "readmit" | "pause":
                self._orders.put_nowait(fault)
            case _ if machine is not None and not machine.retired:
                self._to(machine, fault)

    def _to(self, machine: Machine, fault: Fault) -> None:
        """What happens to one machine."""
        match fault.kind:
            case "cut" | "silence":
                if machine.wire is not None and machine.wire.client is not None:
                    self.broker.cut(machine.wire.client, "cut", SILENCE_S if fault.kind == "silence" else 0.0)
            case "kill":
                self._kill(machine, fault.seconds)
            case "kill-in-write":
                machine.disk.die_in = int(fault.strength)
                self.loop.call_later(fault.seconds, setattr, machine.disk, "die_in", 0)
            case "power":
                self._kill(machine, fault.seconds, SILENCE_S)
                machine.between.append(lambda: self._powerless(machine, fault))
            case "stop" if machine.name == COORDINATOR and machine.stop is not None:
                machine.stop()
                machine.back = fault.seconds
            case "gone":
                machine.retired = True
                self._gone.add(machine.name)
                self._kill(machine, 0.0, SILENCE_S)
            case "disk-full":
                machine.disk.full = True
                self.loop.call_later(fault.seconds, setattr, machine.disk, "full", False)
            case "failed-write":
                machine.disk.fail_in = int(fault.strength)
            case "clock":
                machine.set_by += fault.strength
            case "reimage" | "new-keys" | "old-copy" | "no-protocol":
                self._kill(machine, fault.seconds)
                machine.between.append(lambda: self._replace_disk(machine, fault.kind))
            case "lost-state":
                self._kill(machine, fault.seconds)
                machine.between.append(self._begin_anew)
            case "restore":
                if self._backups:
                    self._kill(machine, fault.seconds)
                    machine.between.append(lambda: self._restore(-1 if fault.how == "last" else 0))

    def _died(self, name: str) -> None:
        """A write was the last: the process dies with the event that it is in."""
        machine = self.machines[name]
        machine.killed, machine.back = True, 5.0
        self.loop.call_soon(self._kill, machine, 5.0)

    def _kill(self, machine: Machine, back: float, noticed: float = 0.0) -> None:
        """SIGKILL: nothing of the program runs any more, and its link is gone."""
        machine.killed, machine.disk.dead, machine.back = True, True, back
        if machine.wire is not None:
            machine.wire.die(noticed)
        if machine.task is not None:
            machine.task.cancel()
        self._tell(machine.name, "killed")

    def _powerless(self, machine: Machine, fault: Fault) -> None:
        lost = machine.disk.lose_power(Random(f"{self.plan.seed}/{fault.number}/power"))
        machine.origin = machine.random.uniform(0, 1e6)
        self._tell(machine.name, "power", lost=sorted(lost))

    def _replace_disk(self, machine: Machine, kind: str) -> None:
        state, copy = self.folder / machine.name / "state", self.folder / "copies" / machine.name
        if kind == "no-protocol":
            (state / "protocol.bin").unlink(missing_ok=True)
        else:
            shutil.rmtree(state, ignore_errors=True)
            if kind == "old-copy" and copy.exists():
                shutil.copytree(copy, state)
            if kind == "new-keys":
                self._enrolments += 1
                self._keys[machine.name] = hashlib.sha256(
                    f"{self._enrolments}/{self._keys[machine.name]!r}".encode()
                ).digest()
                self._enrol()
        machine.disk.forget()

    def _copy(self, name: str) -> None:
        state, copy = self.folder / name / "state", self.folder / "copies" / name
        shutil.rmtree(copy, ignore_errors=True)
        if state.exists():
            shutil.copytree(state, copy)

    def _new_state(self) -> None:
        """Empty tables, made once for all histories: migrations take longer than many a history."""
        state = self._config().state
        state.mkdir()
        (state / "coordinator.db").write_bytes(_tables())

    def _begin_anew(self) -> None:
        self._state += "-anew"
        self._new_state()
        self.machines[COORDINATOR].disk.forget()
        self.promises.went_back(Record())

    def _back_up(self) -> None:
        """As ``talaria coordinator backup`` does, beside the coordinator."""
        self._look()
        record, dest = self._record(), self.folder / f"backup-{len(self._backups)}"
        if record is None:
            return
        try:
            back_up(*record, dest)
        except TalariaError as error:
            self._tell("history", "no-backup", error=str(error))
            return
        self._backups.append((dest, self.promises.record))

    def _restore(self, which: int) -> None:
        """Into an empty folder, as the docs say."""
        source, record = self._backups[which]
        self._state += "-restored"
        config = self._config()
        config.state.mkdir()
        try:
            restore(config.state / "coordinator.db", FolderBlobs(config.state / "blobs"), source)
        except TalariaError as error:
            self._break(BrokenError("restore", str(error)))
        self.machines[COORDINATOR].disk.forget()
        self.promises.went_back(record)
        self._tell("history", "restored", round=record.round)

    def _damage(self) -> None:
        """The next update that is stored and not yet folded."""
        record = self._record()
        if record is not None:
            store, blobs = record
            for row in store.attempts.unclosed(FLEET):
                for update in store.updates.of(FLEET, row.attempt):
                    path = blobs.folder / update.digest[:2] / update.digest[2:]
                    if update.status == "stored" and path.exists():
                        path.write_bytes(b"damaged")
                        self.promises.damaged.add(update.digest)
                        self._tell("history", "damaged", attempt=row.attempt, device=update.device)
                        return
        if self.loop.time() < SPAN_S:
            self.loop.call_later(0.05, self._damage)

    def _start_second(self, wrong: bool) -> None:
        """Somebody starts a coordinator on the same database, from a state folder of its own, whose lock is free."""
        first = self.machines[COORDINATOR]
        if first.task is None or first.task.done() or first.retired:
            return
        config = self._config()
        machine = Machine("second", first.disk, first.random)
        blobs = FolderBlobs(config.state / ("other-blobs" if wrong else "blobs"))

        def made() -> Service:
            store = Store(config.database)
            self._stores.append(store)
            return self._service(machine, replace(config, state=self.folder / "second"), store, blobs)

        self._second_machine = machine
        with time.told_by(self._clocks(first)):
            self._second = self._behind(self._second_life(machine, made))

    async def _second_life(self, machine: Machine, made: Callable[[], Service]) -> None:
        try:
            machine.service = made()
            await machine.service.run("history")
            while machine.service.again and not machine.leaves:
                machine.service = made()
                await machine.service.run("history")
        except TalariaError as error:
            self._tell("second", "ended", error=str(error))
            if machine.wire is not None:
                await machine.wire.close()
        except KilledError:  # it wrote while their machine was down
            self._tell("second", "dead")
            if machine.wire is not None:
                machine.wire.die(0.0)
        finally:
            machine.service = None

    def _rubbish(self, name: str, random: Random) -> None:
        for kind in ("evt", "state", "up/0123456789abcdef"):
            data = random.choice((random.randbytes(40), b"", b"FLF1" + random.randbytes(60)))
            self.broker.plant(name, f"fl/1/{FLEET}/d/{name}/{kind}", data, retain=random.random() < 0.3)

    # -- keys

    def _enrol(self) -> None:
        """Write the keys of fleet and devices, made from the seed."""
        if not self.plan.keyed:
            return
        own = {name: Signer.of(key) for name, key in self._keys.items()}
        folder = self.folder / "identity"
        folder.mkdir(exist_ok=True)
        self._write_key(folder / "sign.key", COORDINATOR)
        members = {name: EnrolledDevice(own[name].public, 1, WALL) for name in self.plan.devices}
        beside = folder / "members.new"
        beside.write_bytes(Membership(FLEET, "mqtt://history", (), members).encode())
        beside.rename(folder / "members.json")
        for name in self.plan.devices:
            place = self.folder / name / "identity"
            place.mkdir(exist_ok=True)
            facts = {
                "fleet": FLEET,
                "device": name,
                "broker": "mqtt://history",
                "coordinator": own[COORDINATOR].public.hex(),
            }
            (place / "fleet.json").write_text(json.dumps(facts))
            self._write_key(place / "sign.key", name)
            self._write_key(place / "tls.key", name)

    def _write_key(self, path: Path, name: str) -> None:
        path.touch(mode=0o600)
        path.write_bytes(credentials.pem(Ed25519PrivateKey.from_private_bytes(self._keys[name])))

    def _behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BrokenError):
            self._break(error)
        elif error is not None:
            self._own = error


Flaw = Callable[[Service], None]
_DULL = ("progress", "coordinator", "model", "training", "trained", "refused", "connected", "disconnected")


@cache
def _tables() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "coordinator.db"
        Store(path).close()
        return path.read_bytes()


@contextmanager
def _quiet_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
