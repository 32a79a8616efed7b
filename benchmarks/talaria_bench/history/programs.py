"""The real coordinator, a second one, and the real agents, over the links, the disks and the clocks of a history."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

from talaria import time
from talaria.errors import StateError, TalariaError, TransportError
from talaria.wire.topics import coordinator_filters, device_filters
from talaria.wire.transport import Will
from talaria_bench.history import exact
from talaria_bench.history.broker import Wire
from talaria_bench.history.disks import KilledError
from talaria_bench.history.faults import COORDINATOR
from talaria_bench.history.promises import BrokenError
from talaria_bench.history.record import look
from talaria_bench.history.world import FLEET, Machine, World
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.server.open_state import held, open_blobs, open_store
from talaria_coordinator.server.served import AGAIN_S
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData


class _NoData:
    """Exact learning needs no samples."""

    def load(self) -> DeviceData:
        raise StateError("there are no samples in a history")


async def serve(world: World, machine: Machine) -> None:
    """The coordinator, until it ends."""
    config = world.config()
    again = True
    with held(config.state):
        while again and not machine.leaves:  # what it learns may change, as talaria_coordinator.server.served says
            store = opened_store(world, config, machine)
            try:
                machine.service = _service(world, machine, config, store, open_blobs(config))
                await machine.service.run("history")
                again = machine.service.again
            finally:
                machine.service = None
                store.close()


def opened_store(world: World, config: FleetConfig, machine: Machine) -> Store:
    """The coordinator's store, whose commits the machine's disk may refuse."""
    store = open_store(config)
    world.stores.append(store)

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


def _service(world: World, machine: Machine, config: FleetConfig, store: Store, blobs: Any) -> Service:
    def opened(url: str, config: FleetConfig, will: Callable[[], Will]) -> Wire:
        machine.wire = Wire(world.broker, COORDINATOR, coordinator_filters(FLEET), will)
        return machine.wire

    tell = partial(_told, world, machine.name)
    service = Service(config, store, blobs, report=tell, open_transport=opened, learn=exact.ExactLearning)
    if world.flaw is not None:
        world.flaw(service)

    def stop() -> None:
        machine.leaves = True
        service.stop()

    machine.stop = stop
    return service


async def take_part(world: World, machine: Machine) -> None:
    """A device's agent, until it ends."""
    name = machine.name
    config = DeviceConfig(
        device=name,
        fleet=FLEET,
        broker="mqtt://history",
        state=world.folder / name / "state",
        source=_NoData(),
        identity=world.folder / name / "identity" if world.plan.keyed else None,
        stay=True,
    )

    def opened(config: DeviceConfig, will: Callable[[], Will]) -> Wire:
        machine.wire = Wire(world.broker, name, device_filters(FLEET, name), will)
        return machine.wire

    learn = partial(
        exact.ExactLearner, lie=lambda: world.lies.get(name, ""), refuses=lambda run: run.seed in world.refuses
    )
    tell = partial(_told, world, name)
    await Agent(config, report=tell, worker=world.worker, open_transport=opened, learn=learn).run()


def _told(world: World, name: str, told: dict[str, Any]) -> None:
    event = told["event"]
    world.tell(name, event, **{k: v for k, v in told.items() if k not in ("at", "fleet", "event")})
    if event == "quarantined":
        try:
            world.promises.shut_out(told["device"], told["reason"])
        except BrokenError as broken:
            world.break_off(broken)
    elif event in ("round-closed", "round-failed", "started"):
        world.loop.call_soon(look, world)


def start_second(world: World, wrong: bool) -> None:
    """Somebody starts a coordinator on the same database, from a state folder of its own, whose lock is free."""
    first = world.machines[COORDINATOR]
    if not first.lives or first.retired:
        return
    if wrong and (first.service is None or not first.service.begun):
        return  # where no model is stored yet, no blobs are wrong ones
    config = world.config()
    machine = Machine("second", first.disk, first.random)
    blobs = FolderBlobs(config.state / ("other-blobs" if wrong else "blobs"))

    def made() -> Service:
        store = Store(config.database)
        world.stores.append(store)
        return _service(world, machine, replace(config, state=world.folder / "second"), store, blobs)

    world.second, world.disks.of[machine.name] = machine, first.disk
    with time.told_by(world.clocks(first)):
        machine.task = world.behind(_second_life(world, machine, made))


async def _second_life(world: World, machine: Machine, made: Callable[[], Service]) -> None:
    again, anew = True, False
    try:
        while again and not machine.leaves:
            machine.service = service = made()
            try:
                await service.run("history")
                again = anew = service.again
            except TransportError:
                if service.begun or not anew:
                    raise
                await asyncio.sleep(AGAIN_S[0])  # as talaria_coordinator.server.served waits where it begins anew
    except TalariaError as error:
        world.tell("second", "ended", error=str(error))
        if machine.wire is not None:
            await machine.wire.close()
    except KilledError:  # it wrote while their machine was down
        world.tell("second", "dead")
        if machine.wire is not None:
            machine.wire.die(0.0)
    finally:
        machine.service = None
