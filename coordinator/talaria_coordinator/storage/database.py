"""One database as the subjects of the record use it: snapshots to read, and one transaction at a time to write.

Where this program entered a fleet, it writes there only until another has entered it: each entry begins a new epoch,
and a transaction that writes looks first whether it is still the last one.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, bindparam, select
from sqlalchemy.exc import InternalError, OperationalError, SQLAlchemyError

from talaria import time
from talaria.errors import StateError
from talaria_coordinator.storage.engine import open_engine, place, snapshots
from talaria_coordinator.storage.tables import FLEETS

# Made once, as all statements that each update needs: to put one together takes as long as to execute it.
_EPOCH = select(FLEETS.c.epoch).where(FLEETS.c.fleet == bindparam("name"))


class SilentError(StateError):
    """A server, of the database or of blobs, does not answer, or took another's side in a lock; it may again. What was
    asked last was done as a whole or not at all."""


class Database:
    """See the module. ``where`` is a path (SQLite) or the URL of a PostgreSQL database."""

    def __init__(self, where: Path | URL | str) -> None:
        self.engine = open_engine(where)
        self._snapshots = snapshots(self.engine)
        # SQLite lets whoever asks at the right moment go first: among many threads one could wait for ever.
        self.line = threading.Lock()
        self.epochs: dict[str, int] = {}
        """Of the fleets that were entered here."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One snapshot of everything, which holds up no writer."""
        with answering(self.engine), self._snapshots.begin() as tx:
            yield tx

    @contextmanager
    def writing(self, fleet: str | None = None) -> Iterator[Connection]:
        """One transaction, alone. Where this program entered ``fleet``, only while nobody else has entered it since."""
        with self.line, self.transaction(fleet) as tx:
            yield tx

    @contextmanager
    def transaction(self, fleet: str | None) -> Iterator[Connection]:
        """One transaction of whoever has the line."""
        with answering(self.engine), self.engine.begin() as tx:
            if fleet in self.epochs:
                now = tx.execute(_EPOCH, {"name": fleet}).scalar_one_or_none()
                require_epoch(fleet, now, self.epochs[fleet])
            yield tx


@contextmanager
def answering(engine: Engine) -> Iterator[None]:
    """What the database of ``engine`` refuses becomes :class:`~talaria.errors.StateError`, which says where it lies."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        # A session that was put out because this machine slept within its transaction is an "internal" error there.
        far = isinstance(error, OperationalError | InternalError) and not isinstance(error.orig, sqlite3.Error)
        raise (SilentError if far else StateError)(
            f"store {place(engine)}: the database refused ({cause}); {_mend(cause)}. Nothing of this step was "
            "written; all earlier state is intact"
        ) from error


def _mend(cause: str) -> str:
    """What helps against a refusal, as far as the database's own words tell."""
    for words, mend in (
        (("full", "no space", "disk i/o"), "free space there, and start again"),
        (("read-only transaction", "read-write mode"), "let its server write, or name one that does, and start again"),
        (("readonly", "read-only", "unable to open"), "let this user write its folder, and start again"),
        (("locked", "lock timeout"), "another program holds it: look which one, and start again"),
        (("malformed", "not a database"), "run `talaria coordinator fsck`, or restore a backup"),
        (("too many connections", "too many clients", "connection slots"), "let it and this role have more"),
        (("permission denied for",), "give its user the rights to all tables there, and start again"),
        (("password authentication", "no password"), "correct [store] password_file, and start again"),
        (("does not exist",), "name the database that holds the fleet, or restore a backup, and start again"),
        (("connect", "no answer", "server", "terminat"), "start its server or mend the way to it, and start again"),
    ):
        if any(word in cause.lower() for word in words):
            return mend
    return "mend what its words say, and start again"


def epoch_after(last: int) -> int:
    """The epoch of a start now: milliseconds since 1970, and in any case above ``last``. A store that was lost or
    taken back to an older state so goes on above all that devices have heard."""
    return max(last + 1, int(time.time() * 1000))


def require_epoch(fleet: str, now: int | None, ours: int) -> None:
    """Raise :class:`~talaria.errors.StateError` where the fleet's epoch ``now`` is another coordinator's."""
    if now != ours:
        raise StateError(f"fleet {fleet!r}: another coordinator has it (epoch {now}, ours {ours}); stop one")
