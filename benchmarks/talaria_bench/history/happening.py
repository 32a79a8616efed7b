"""Faults as they happen: what each does to links, disks, programs and the record."""

from __future__ import annotations

from random import Random

from talaria_bench.history import record
from talaria_bench.history.broker import SILENCE_S, Weather
from talaria_bench.history.faults import COORDINATOR, Fault
from talaria_bench.history.machines import kill, live, lose_power, replace_disk
from talaria_bench.history.programs import start_second
from talaria_bench.history.world import FLEET, Machine, World


def happen(world: World, fault: Fault) -> None:
    """``fault`` begins now."""
    machine = world.machines.get(fault.target)
    match fault.kind:
        case "weather":
            world.broker.weather[fault.number] = Weather(fault.strength, fault.strength, 2.0)
            world.loop.call_later(fault.seconds, world.broker.weather.pop, fault.number, None)
        case "broker":
            world.broker.fall(keeps=fault.how != "empty")
            world.loop.call_later(fault.seconds, world.broker.rise)
        case "lie":
            world.lies[fault.target] = fault.how
        case "rubbish":
            _rubbish(world, fault.target, Random(f"{world.plan.seed}/{fault.number}"))
        case "second":
            start_second(world, wrong=fault.how == "wrong")
        case "damage":
            record.damage(world)
        case "backup":
            record.take_backup(world)
        case "join" if machine is not None:
            world.behind(live(world, machine))
        case "extend" | "next" | "retire" | "readmit" | "pause":
            world.orders.put_nowait(fault)
        case _ if machine is not None and not machine.retired:
            _to(world, machine, fault)


def _to(world: World, machine: Machine, fault: Fault) -> None:
    """What happens to one machine."""
    match fault.kind:
        case "cut" | "silence":
            if machine.wire is not None and machine.wire.client is not None:
                world.broker.cut(machine.wire.client, "cut", SILENCE_S if fault.kind == "silence" else 0.0)
        case "kill":
            kill(world, machine, fault.seconds)
        case "kill-in-write":
            machine.disk.die_in = int(fault.strength)
            world.loop.call_later(fault.seconds, setattr, machine.disk, "die_in", 0)
        case "power":
            kill(world, machine, fault.seconds, SILENCE_S)
            machine.between.append(lambda: lose_power(world, machine, fault))
        case "stop" if machine.name == COORDINATOR and machine.stop is not None:
            machine.stop()
            machine.back = fault.seconds
        case "gone":
            machine.retired = True
            world.gone.add(machine.name)
            kill(world, machine, 0.0, SILENCE_S)
        case "disk-full":
            machine.disk.full = True
            world.loop.call_later(fault.seconds, setattr, machine.disk, "full", False)
        case "failed-write":
            machine.disk.fail_in = int(fault.strength)
        case "clock":
            machine.set_by += fault.strength
        case "reimage" | "new-keys" | "old-copy" | "no-protocol":
            kill(world, machine, fault.seconds)
            machine.between.append(lambda: replace_disk(world, machine, fault.kind))
        case "lost-state":
            _end_both(world, machine, fault.seconds)
            machine.between.append(lambda: record.begin_anew(world))
        case "restore":
            if world.backups:
                _end_both(world, machine, fault.seconds)
                machine.between.append(lambda: record.restore_backup(world, -1 if fault.how == "last" else 0))


def _end_both(world: World, machine: Machine, back: float) -> None:
    """A second coordinator on this one's database ends with that."""
    if world.second is not None:
        kill(world, world.second, 0.0)
    kill(world, machine, back)


def _rubbish(world: World, name: str, random: Random) -> None:
    for kind in ("evt", "state", "up/0123456789abcdef"):
        data = random.choice((random.randbytes(40), b"", b"FLF1" + random.randbytes(60)))
        world.broker.plant(name, f"fl/1/{FLEET}/d/{name}/{kind}", data, retain=random.random() < 0.3)
