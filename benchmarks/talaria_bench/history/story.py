"""One history from its first event to its last: what goes wrong goes wrong, and then learning must go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from talaria_bench.history.faults import COORDINATOR, SPAN_S, Plan
from talaria_bench.history.happening import happen
from talaria_bench.history.keys import enrol
from talaria_bench.history.machines import install, keep_copy, live
from talaria_bench.history.operator import operate, set_going
from talaria_bench.history.promises import BrokenError
from talaria_bench.history.record import look, new_state, read_record
from talaria_bench.history.virtual import StalledError
from talaria_bench.history.world import BOUND_S, FLEET, Flaw, World

LAST_WORDS = 40
NEEDED = 2
"""Rounds that must be committed then; and each honest device that is there must have counted."""
ENDING = 60
"""How often what still runs at the end is told to end."""


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


def lived(plan: Plan, folder: Path, *, keep: int = LAST_WORDS, flaw: Flaw | None = None) -> Outcome:
    """What becomes of ``plan`` in an empty ``folder``. ``keep`` of its last events are told; ``flaw`` is planted
    into each coordinator that is made, to see it found."""
    world = World(plan, folder, keep, flaw)
    for name in world.keys:
        install(world, name)
    recovered = 0.0
    with world.disks.interposed(), _quiet_logs():
        asyncio.set_event_loop(world.loop)
        try:
            recovered = world.loop.run_until_complete(_story(world))
        except BrokenError as why:
            world.broken = why
        except StalledError as why:
            world.broken = BrokenError("stuck", str(why))
        finally:  # in which order tasks are ended is no part of it
            trace, events, seconds, last = world.trace.hexdigest(), world.events, world.loop.time(), tuple(world.said)
            _end(world)
    if world.own is not None:
        raise RuntimeError(f"history: seed {plan.seed} failed by itself: {world.own!r}") from world.own
    broken = world.broken
    return Outcome(
        plan.seed,
        "" if broken is None else broken.kind,
        "" if broken is None else str(broken).replace(f"{folder}/", ""),
        trace,
        events,
        world.promises.record.round,
        seconds,
        recovered,
        last,
    )


async def _story(world: World) -> float:
    enrol(world)
    new_state(world)
    for name in (COORDINATOR, *world.plan.first):
        world.behind(live(world, world.machines[name]))
    operator = world.behind(operate(world))
    for fault in world.plan.faults:
        if fault.kind == "old-copy":
            world.loop.call_later(fault.at / 2, keep_copy, world, fault.target)
    watch = world.behind(_watched(world))
    end = 0.0
    for fault in world.plan.faults:
        await _until(world, fault.at)
        world.tell("history", "fault", what=str(fault)[10:])
        happen(world, fault)
        end = max(end, fault.at + fault.seconds)
    await _until(world, max(end, SPAN_S / 3) + 1.0)
    _calm(world)
    operator.cancel()
    await set_going(world)
    world.promises.forget()
    found = await _recovered(world, world.loop.time())
    watch.cancel()
    look(world)
    record = read_record(world)
    if record is not None and world.broken is None:
        world.promises.finally_(*record)
    if world.broken is not None:
        raise world.broken
    return found


async def _until(world: World, when: float) -> None:
    while world.loop.time() < when:
        if world.broken is not None:
            raise world.broken
        await asyncio.sleep(min(1.0, when - world.loop.time()))


async def _watched(world: World) -> None:
    """The promises, looked at again and again; besides after each round."""
    while True:
        await asyncio.sleep(5.0)
        look(world)


def _calm(world: World) -> None:
    """Whatever disturbed is over."""
    world.broker.weather.clear()
    world.broker.rise()
    for machine in world.machines.values():
        machine.disk.full, machine.disk.fail_in, machine.disk.die_in = False, 0, 0
    coordinator = world.machines[COORDINATOR]
    if world.plan.grows and (world.gone or world.left) and coordinator.stop is not None:
        coordinator.stop()  # its operator says how many will come by now, as it asks for
        coordinator.back = 1.0
    world.tell("history", "calm")


async def _recovered(world: World, since: float) -> float:
    """Wait until learning has gone on."""
    while True:
        there = sorted(world.promises.honest - world.gone - _retired(world))
        if world.broken is not None:
            raise world.broken
        missing = [name for name in there if not world.promises.since[name]]
        if world.promises.commits >= NEEDED and not missing and _online_told(world, there):
            return world.loop.time() - since
        if world.loop.time() - since > BOUND_S:
            raise BrokenError("stuck", _stuck(world, missing))
        await asyncio.sleep(0.5)


def _online_told(world: World, there: list[str]) -> bool:
    """Whether the record says of all who are there that they are."""
    record = read_record(world)
    if record is None:
        return False
    online = {row.device for row in record[0].devices.of(FLEET) if row.online}
    return set(there) <= online and not world.gone & online


def _retired(world: World) -> set[str]:
    """Who has left for good, by the record."""
    record = read_record(world)
    return set() if record is None else {d.device for d in record[0].devices.of(FLEET) if d.retired is not None}


def _stuck(world: World, missing: list[str]) -> str:
    commits = world.promises.commits
    if world.machines[COORDINATOR].retired and (world.second is None or not world.second.lives):
        return f"{BOUND_S:.0f} s after the last fault no coordinator serves any more"
    if commits < NEEDED:
        return f"in {BOUND_S:.0f} s after the last fault {commits} rounds were committed"
    if missing:
        return f"in {BOUND_S:.0f} s after the last fault nothing of {', '.join(missing)} counted"
    return "the record calls devices offline that take part, or online that are gone"


def _end(world: World) -> None:
    for machine in world.machines.values():
        machine.disk.dead = True
    with suppress(StalledError):
        for _ in range(ENDING):  # one that is left open lets go of its files only when it is collected
            if not (tasks := asyncio.all_tasks(world.loop)):
                break
            for task in tasks:
                task.cancel()
            world.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
    for store in world.stores:
        store.close()
    world.worker.shutdown()
    asyncio.set_event_loop(None)
    world.loop.close()


@contextmanager
def _quiet_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
