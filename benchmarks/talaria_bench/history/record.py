"""The record as it lies on the coordinator's disk: looked at, lost, backed up, restored and damaged."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from talaria.errors import TalariaError
from talaria.federated.run import Run
from talaria_bench.history.faults import COORDINATOR, SPAN_S
from talaria_bench.history.promises import BrokenError, Record
from talaria_bench.history.world import FLEET, World
from talaria_coordinator.maintenance.backup import back_up
from talaria_coordinator.maintenance.restore import restore
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store


def read_record(world: World) -> tuple[Store, FolderBlobs] | None:
    """The record as it lies on the coordinator's disk, whoever serves; None where no fleet is in it yet."""
    config = world.config()
    if config.state not in world.readers:
        if not (config.state / "blobs").exists():
            return None
        world.readers[config.state] = store = Store(config.database)
        world.stores.append(store)
    store = world.readers[config.state]
    return None if store.fleets.get(FLEET) is None else (store, FolderBlobs(config.state / "blobs"))


def read_fleet(world: World) -> Fleet | None:
    """The fleet's record; the runs that its gates refuse are known by it."""
    record = read_record(world)
    fleet = None if record is None else record[0].fleets.get(FLEET)
    if fleet is not None:
        run = Run.from_json(fleet.run)
        if run.seed in world.refuses:
            world.promises.refused.add(run.identity)
    return fleet


def look(world: World) -> None:
    """Whether the record keeps all promises."""
    if world.broken is not None:
        return
    read_fleet(world)
    record = read_record(world)
    if record is not None:
        try:
            world.promises.look(*record)
        except BrokenError as broken:
            world.break_off(broken)


def new_state(world: World) -> None:
    """Empty tables, made once for all histories: migrations take longer than many a history."""
    state = world.config().state
    state.mkdir()
    (state / "coordinator.db").write_bytes(_tables())


def begin_anew(world: World) -> None:
    """The coordinator's folder is lost."""
    world.state += "-anew"
    new_state(world)
    world.machines[COORDINATOR].disk.forget()
    world.promises.went_back(Record())


def take_backup(world: World) -> None:
    """As ``talaria coordinator backup`` does, beside the coordinator."""
    look(world)
    record, dest = read_record(world), world.folder / f"backup-{len(world.backups)}"
    if record is None:
        return
    try:
        back_up(*record, dest)
    except TalariaError as error:
        world.tell("history", "no-backup", error=str(error))
        return
    world.backups.append((dest, world.promises.record))


def restore_backup(world: World, which: int) -> None:
    """Restore a backup into an empty folder, as the docs say."""
    source, record = world.backups[which]
    world.state += "-restored"
    config = world.config()
    config.state.mkdir()
    try:
        restore(config.state / "coordinator.db", FolderBlobs(config.state / "blobs"), source)
    except TalariaError as error:
        world.break_off(BrokenError("restore", str(error)))
    world.machines[COORDINATOR].disk.forget()
    world.promises.went_back(record)
    world.tell("history", "restored", round=record.round)


def damage(world: World) -> None:
    """Damage the next update that is stored and not yet folded."""
    record = read_record(world)
    if record is not None:
        store, blobs = record
        for row in store.attempts.unclosed(FLEET):
            for update in store.updates.of(FLEET, row.attempt):
                path = blobs.folder / update.digest[:2] / update.digest[2:]
                if update.status == "stored" and path.exists():
                    path.write_bytes(b"damaged")
                    world.promises.damaged.add(update.digest)
                    world.tell("history", "damaged", attempt=row.attempt, device=update.device)
                    return
    if world.loop.time() < SPAN_S:
        world.loop.call_later(0.05, damage, world)


@cache
def _tables() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "coordinator.db"
        Store(path).close()
        return path.read_bytes()
