"""The life of a machine: its program starts again and again, is killed, and finds another disk."""

from __future__ import annotations

import asyncio
import shutil
from random import Random
from typing import Any

from talaria import time
from talaria.errors import TalariaError
from talaria_bench.history.disks import Disk, KilledError
from talaria_bench.history.faults import COORDINATOR, Fault
from talaria_bench.history.keys import enrol, renew
from talaria_bench.history.programs import serve, take_part
from talaria_bench.history.promises import BrokenError
from talaria_bench.history.world import Machine, World

OPERATOR_S = 10.0
"""A program that ended with an error is started again after this long."""


def install(world: World, name: str) -> None:
    """A machine of this name, with an empty disk."""
    (world.folder / name).mkdir()
    random = Random(f"{world.plan.seed}/{name}")
    machine = Machine(name, Disk(world.folder / name, lambda: _died(world, name)), random, random.uniform(0, 1e6))
    world.machines[name], world.disks.of[name] = machine, machine.disk


async def live(world: World, machine: Machine) -> None:
    """Start a program again and again, as an operator or a supervisor would."""
    while not machine.retired:
        machine.killed, machine.disk.dead, machine.back = False, False, OPERATOR_S
        machine.leaves = False
        work = serve(world, machine) if machine.name == COORDINATOR else take_part(world, machine)
        with time.told_by(world.clocks(machine)):
            machine.task = world.loop.create_task(work)
        try:
            await asyncio.wait([machine.task])
        finally:
            machine.task.cancel()
        _ended(world, machine, machine.task)
        machine.wire, machine.stop = None, None
        await asyncio.sleep(machine.back)
        if machine.between:  # a hand is at it, and sees to its disk first
            machine.disk.dead, machine.disk.full, machine.disk.fail_in, machine.disk.die_in = False, False, 0, 0
        for change in machine.between:
            change()
        machine.between.clear()


def _ended(world: World, machine: Machine, task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if machine.killed or isinstance(error, KilledError | asyncio.CancelledError) or task.cancelled():
        world.tell(machine.name, "dead")
    elif isinstance(error, BrokenError):
        world.break_off(error)
    elif isinstance(error, TalariaError):
        world.tell(machine.name, "ended", error=str(error))
        another = "took over" in str(error) or "another coordinator" in str(error)
        # Whoever reads of another coordinator looks whether there is one: two links that broke may be nobody.
        if machine.name == COORDINATOR and another and world.second is not None and world.second.lives:
            machine.retired = True
    elif error is not None:
        world.break_off(BrokenError("crash", f"{machine.name} ended with {error!r}"))
    else:
        world.tell(machine.name, "stopped")


def _died(world: World, name: str) -> None:
    """A write was the last: the process dies with the event that it is in."""
    machine = world.machines[name]
    machine.killed, machine.back = True, 5.0
    world.loop.call_soon(kill, world, machine, 5.0)


def kill(world: World, machine: Machine, back: float, noticed: float = 0.0) -> None:
    """SIGKILL: nothing of the program runs any more, and its link is gone."""
    machine.killed, machine.disk.dead, machine.back = True, True, back
    if machine.wire is not None:
        machine.wire.die(noticed)
    if machine.task is not None:
        machine.task.cancel()
    world.tell(machine.name, "killed")


def lose_power(world: World, machine: Machine, fault: Fault) -> None:
    """The power was cut: what was not flushed may be lost, and its clock begins elsewhere."""
    lost = machine.disk.lose_power(Random(f"{world.plan.seed}/{fault.number}/power"))
    machine.origin = machine.random.uniform(0, 1e6)
    world.tell(machine.name, "power", lost=sorted(lost))


def replace_disk(world: World, machine: Machine, kind: str) -> None:
    """The disk is another, as the fault ``kind`` says."""
    state, copy = world.folder / machine.name / "state", world.folder / "copies" / machine.name
    if kind == "no-protocol":
        (state / "protocol.bin").unlink(missing_ok=True)
    else:
        shutil.rmtree(state, ignore_errors=True)
        if kind == "old-copy" and copy.exists():
            shutil.copytree(copy, state)
        if kind == "new-keys":
            renew(world, machine.name)
            enrol(world)
    machine.disk.forget()


def keep_copy(world: World, name: str) -> None:
    """Copy a machine's disk aside, for the fault ``old-copy``."""
    state, copy = world.folder / name / "state", world.folder / "copies" / name
    shutil.rmtree(copy, ignore_errors=True)
    if state.exists():
        shutil.copytree(state, copy)
