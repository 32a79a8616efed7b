"""The coordinator's durable memory: fleets, rounds, devices, updates, and the audit log that chains them.

SQLAlchemy Core serves SQLite (a path; WAL, synchronous=FULL: a receipt once sent survives a power cut) and PostgreSQL
(a URL). Each subject has a file of its own beside this one, and each of their methods is one transaction; those that
write are done one after another (:mod:`~talaria_coordinator.storage.database`), and end with
:class:`~talaria.errors.StateError` once another coordinator has entered the fleet.

The protocol's own machine decides what happens to an update from offer to upload and is kept as a whole
(:meth:`Fleets.save_machine`). A complete update is entered as ``stored`` or ``rejected`` under (fleet, round, device),
and ``stored`` becomes ``counted`` in the one transaction that also names the new global model.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL

from talaria.errors import TalariaError
from talaria_coordinator.storage import migrate
from talaria_coordinator.storage.attempts import Attempts
from talaria_coordinator.storage.audit import AuditLog
from talaria_coordinator.storage.database import Database
from talaria_coordinator.storage.devices import Devices
from talaria_coordinator.storage.fleets import Fleets
from talaria_coordinator.storage.runs import Runs
from talaria_coordinator.storage.table_dump import in_use
from talaria_coordinator.storage.updates import Updates
from talaria_coordinator.storage.words import Words


class Store:
    """See the module. ``where`` is a path (SQLite) or the URL of a PostgreSQL database."""

    def __init__(self, where: Path | URL | str, *, make: bool = True) -> None:
        """Makes the tables or brings older ones up to date; without ``make``, both are left to the coordinator."""
        self.database = database = Database(where)
        self.fleets = Fleets(database)
        self.runs = Runs(database)
        self.attempts = Attempts(database)
        self.updates = Updates(database)
        self.words = Words(database)
        self.devices = Devices(database)
        self.audit = AuditLog(database)
        try:
            with database.writing() if make else database.reading() as tx:
                migrate.prepare(tx) if make else migrate.require_current(tx)
        except TalariaError:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self.database.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def blobs_in_use(self) -> set[str]:
        """Digests that must be kept: every global model and server state of a round, and updates that may yet count."""
        with self.database.reading() as tx:
            return in_use(tx)
