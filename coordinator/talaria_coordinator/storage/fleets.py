"""Fleets in the record: which coordinator has one, what it is doing, and its protocol machine as it was saved last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import insert, select, update

from talaria import time
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.database import Database, epoch_after, require_epoch
from talaria_coordinator.storage.records import Fleet, Worker, fleet_of, why
from talaria_coordinator.storage.runs import require_same_run
from talaria_coordinator.storage.tables import DEVICES, FLEETS, MACHINES


@dataclass(frozen=True)
class Fleets:
    """See the module."""

    _database: Database

    def enter(self, fleet: str, run: str, model_digest: str, server: str, *, above: int = 0) -> Fleet:
        """Begin a new epoch of a fleet, creating it with its first ``model_digest`` and ``server`` where it is new.
        The epoch is above ``above``, and later than any that a store of this fleet ever began: it counts from the
        clock.

        Raises :class:`~talaria.errors.ConfigError` where the stored fleet learns another run.
        """
        with self._database.writing() as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one_or_none()
            epoch = epoch_after(max(above, 0 if row is None else row.epoch))
            if row is None:
                first = {"round": 0, "tried": 0, "status": "running", "model_digest": model_digest, "server": server}
                tx.execute(insert(FLEETS).values(fleet=fleet, run=run, epoch=epoch, created=time.time(), **first))
                append(tx, "fleet-created", {"model_digest": model_digest}, fleet=fleet)
            else:
                require_same_run(fleet_of(row), run)
                tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(epoch=epoch, workers=None))
                # Nobody is known to be here until heard: what was recorded may be old, or a backup's. Who was here when
                # the coordinator ended was not away since it came.
                here = (DEVICES.c.fleet == fleet) & (DEVICES.c.online == 1)
                tx.execute(update(DEVICES).where(here).values(online=0, seen=time.time()))
                append(tx, "coordinator-started", {"epoch": epoch}, fleet=fleet)
            now = fleet_of(tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one())
        self._database.epochs[fleet] = now.epoch
        return now

    def get(self, fleet: str) -> Fleet | None:
        """The fleet, or None."""
        with self._database.reading() as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one_or_none()
            return None if row is None else fleet_of(row)

    def all(self) -> list[Fleet]:
        """All fleets by name."""
        with self._database.reading() as tx:
            return sorted((fleet_of(row) for row in tx.execute(select(FLEETS))), key=lambda fleet: fleet.name)

    def set_status(self, fleet: str, status: Literal["running", "paused", "done", "aborted"], reason: str = "") -> None:
        """Change what the fleet is doing; logged, with the reason. One that is done stays so: it may have committed its
        last round just now."""
        with self._database.writing(fleet) as tx:
            mine = (FLEETS.c.fleet == fleet) & (FLEETS.c.status != "done")
            if tx.execute(update(FLEETS).where(mine).values(status=status)).rowcount:
                append(tx, f"fleet-{status}", why(reason), fleet=fleet)

    def note_workers(self, fleet: str, workers: Sequence[Worker]) -> None:
        """How the fleet's ingest workers are now; for people, so that it is in no log."""
        text = json.dumps([asdict(one) for one in workers]) if workers else None
        with self._database.writing(fleet) as tx:
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(workers=text))

    def set_roster(self, fleet: str, roster: Sequence[str]) -> None:
        """Fix the devices that cohorts are drawn from; logged."""
        with self._database.writing(fleet) as tx:
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(roster=json.dumps(sorted(roster))))
            append(tx, "roster-fixed", {"roster": sorted(roster)}, fleet=fleet)

    def machine(self, fleet: str) -> bytes | None:
        """The protocol machine as it was saved last, or None."""
        with self._database.reading() as tx:
            where = MACHINES.c.fleet == fleet
            return tx.execute(select(MACHINES.c.state).where(where)).scalar_one_or_none()

    def save_machine(self, fleet: str, epoch: int, state: bytes) -> None:
        """Keep the protocol machine; refused (StateError) once another coordinator has the fleet."""
        with self._database.writing(fleet) as tx:
            now = tx.execute(select(FLEETS.c.epoch).where(FLEETS.c.fleet == fleet)).scalar_one()
            require_epoch(fleet, now, epoch)
            where = MACHINES.c.fleet == fleet
            if tx.execute(update(MACHINES).where(where).values(state=state)).rowcount == 0:
                tx.execute(insert(MACHINES).values(fleet=fleet, state=state))
