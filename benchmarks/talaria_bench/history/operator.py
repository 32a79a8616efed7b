"""What the operator does: orders, given until they are carried out."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

from talaria import time
from talaria.errors import StateError, TalariaError
from talaria.federated.run import Run
from talaria_bench.history import exact
from talaria_bench.history.disks import KilledError
from talaria_bench.history.faults import COORDINATOR
from talaria_bench.history.programs import opened_store
from talaria_bench.history.promises import BrokenError
from talaria_bench.history.record import read_fleet
from talaria_bench.history.world import BOUND_S, FLEET, World
from talaria_coordinator.fleet.life import carry_out
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.server.open_state import held, open_blobs

MANY = 1_000_000
"""Rounds by which the operator extends a run at last, so that learning can go on."""
ORDER_S = 60.0
"""So many virtual seconds an operator tries to give an order."""


async def operate(world: World) -> None:
    """One order after the other, as faults ask for them."""
    while True:
        fault = await world.orders.get()
        match fault.kind:
            case "extend":
                await _insist(world, Order("extend", rounds=int(fault.strength)))
            case "retire" | "readmit":
                if await _insist(world, Order(fault.kind, fault.target)):
                    (world.left.add if fault.kind == "retire" else world.left.discard)(fault.target)
            case "pause":
                await _insist(world, Order("pause"))
                await asyncio.sleep(fault.seconds)
                await _insist(world, Order("resume"))
            case "next":
                await _next_run(world, fault.how, int(fault.strength))


async def set_going(world: World) -> None:
    """After all that happened an operator sees that learning goes on."""
    end = world.loop.time() + BOUND_S
    while world.loop.time() < end and world.broken is None:
        fleet = read_fleet(world)
        if fleet is not None and fleet.status in ("paused", "aborted"):
            await _insist(world, Order("resume"))
        elif fleet is not None and Run.from_json(fleet.run).rounds < MANY:
            await _insist(world, Order("extend", rounds=MANY))
        elif fleet is not None and _taken(world):
            return
        await asyncio.sleep(1.0)
    if world.broken is None:
        raise BrokenError("stuck", "the operator's orders are refused, or nobody takes them")


async def _next_run(world: World, how: str, rounds: int) -> None:
    """Begin another run, once the last is done or paused with its round closed; where it cannot be, go on."""
    world.runs += 1
    run = replace(exact.run_of(rounds), seed=world.runs)
    if how == "no":
        world.refuses.add(run.seed)
    fleet = read_fleet(world)
    if fleet is None or fleet.status != "done":
        await _insist(world, Order("pause"))
    if not await _insist(world, Order("next", rounds=rounds, run=run.to_json())):
        await _insist(world, Order("resume"))


async def _insist(world: World, order: Order) -> bool:
    """Give an order until it is carried out; False where it is not in :data:`ORDER_S`."""
    end, told = world.loop.time() + ORDER_S, ""
    while world.loop.time() < end:
        given = replace(order, answer=Future())
        try:
            with time.told_by(world.clocks(world.machines[COORDINATOR])):
                status = await _give(world, given)
        except TalariaError as error:
            if str(error) != told:
                told = str(error)
                world.tell("operator", "refused-order", verb=given.verb, error=told)
        except KilledError:
            world.tell("operator", "order-lost", verb=given.verb)
        else:
            world.tell("operator", "ordered", verb=given.verb, device=given.device, status=status)
            return True
        await asyncio.sleep(2.0)
    return False


def _serving(world: World) -> Service | None:
    machine, second = world.machines[COORDINATOR], world.second
    return second.service if machine.retired and second is not None else machine.service


def _taken(world: World) -> bool:
    """Whether the last order is not one that the coordinator takes only once it has begun."""
    return world.ordered is None or world.ordered[0] is not _serving(world) or world.ordered[1].answer.done()


async def _give(world: World, order: Order) -> str:
    """To the coordinator that serves; where none does, and its machine is on, to the store."""
    machine, serving = world.machines[COORDINATOR], _serving(world)
    if serving is not None:
        await serving.order(order)
        world.ordered = serving, order
        for _ in range(100):
            if order.answer.done():
                return order.answer.result()
            await asyncio.sleep(0.1)
        raise StateError("the coordinator did not take the order")
    if machine.disk.dead or machine.retired:
        raise StateError("the coordinator's machine is off")
    config = world.config()
    with held(config.state):
        store = opened_store(world, config, machine)
        try:
            fleet = store.fleets.get(FLEET)
            if fleet is None:
                raise StateError("the fleet was never served")
            carry_out(order, fleet, config, store, open_blobs(config), exact.ExactLearning)
            return "carried out"
        finally:
            store.close()
