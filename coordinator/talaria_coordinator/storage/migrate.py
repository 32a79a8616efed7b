"""The database's tables as a series of migrations, and which of them a database has had.

A new revision is a file in ``migrations/versions``, the same change in ``tables.py``, and its name in :data:`HEAD`; a
test compares the three. All migrations of one start run in the transaction that began it: a start that fails leaves
the database as it was, on PostgreSQL as on SQLite.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sqlalchemy import Connection, column, inspect, select, table

from talaria.errors import StateError
from talaria_coordinator.storage.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010")
HEAD = REVISIONS[-1]
RENAMED = (
    ("fleets", "step", "round"),
    ("fleets", "body", "model_digest"),
    ("attempts", "round", "attempt"),
    ("attempts", "step", "round"),
    ("attempts", "base", "base_digest"),
    ("attempts", "body", "model_digest"),
    ("updates", "round", "attempt"),
    ("updates", "base", "base_version"),
    ("findings", "round", "attempt"),
    ("equivocations", "round", "attempt"),
    ("events", "round", "attempt"),
)
"""What revision 0004 renames: table (by its new name), old and new name of a column, in this order."""
RENAMED_TABLES = (("rounds", "attempts"),)
"""Old and new names of the tables that revision 0004 renames."""
ADDED = (
    ("fleets", "life"),
    ("devices", "retired"),
    ("fleets", "privacy"),
    ("devices", "left_by"),
    ("attempts", "down"),
    ("attempts", "dense"),
    ("attempts", "means"),
    ("fleets", "workers"),
)
"""Columns that later revisions added."""
_VERSION = table("alembic_version", column("version_num"))
_ALONE = Lock()  # alembic runs its env.py with module-wide state


def revision(tx: Connection) -> str | None:
    """The last migration that this database has had; None where it had none. Raises
    :class:`~talaria.errors.StateError` where it is not one that this version knows."""
    if not inspect(tx).has_table("alembic_version"):
        return None
    found: list[str] = list(tx.execute(select(_VERSION.c.version_num)).scalars())
    if not found:
        return None
    if len(found) > 1 or found[0] not in REVISIONS:
        raise StateError(
            f"store: its tables are of revision {', '.join(sorted(found))}, and this version of Talaria knows none "
            f"after {HEAD}; update Talaria, or restore a backup made by this version into a new store"
        )
    return found[0]


def require_current(tx: Connection) -> None:
    """Raise :class:`~talaria.errors.StateError` where the database was never served, or not yet by this version."""
    found = revision(tx)
    if found is None:
        raise StateError("store: the database holds no fleet yet, or one of an older Talaria; serve it once")
    if found != HEAD:
        raise StateError(f"store: its tables are of revision {found}, this version's of {HEAD}; serve it once")


def prepare(tx: Connection) -> None:
    """Make the tables, or bring older ones up to date, in the transaction ``tx``.

    Raises :class:`~talaria.errors.StateError` where the database is of a newer version, or not Talaria's.
    """
    found = revision(tx)
    if found == HEAD:
        return
    if found is None:
        require_ours(tx)
    migrate(tx, HEAD)


def migrate(tx: Connection, to: str) -> None:
    """Run the migrations up to ``to``."""
    from alembic import command

    with _ALONE:
        config = alembic_config()
        config.attributes["connection"] = tx
        command.upgrade(config, to)


def alembic_config() -> Config:
    """Where alembic finds the migrations."""
    from alembic.config import Config

    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def require_ours(tx: Connection) -> None:
    """A database without a revision is empty, or older than migrations: then what tables it has must be ours."""
    there = inspect(tx)
    firsts = {name: next((old for old, new in RENAMED_TABLES if new == name), name) for name in METADATA.tables}
    for now, name in sorted(firsts.items()):
        if not there.has_table(name):
            continue
        columns = {found["name"] for found in there.get_columns(name)}
        if columns != _first_columns(now):
            raise StateError(
                f"store: the database has a table {name!r} that is not Talaria's; give [store] database one of its own"
            )


def _first_columns(name: str) -> set[str]:
    """How the columns of this table were called in the first revision."""
    columns = set(METADATA.tables[name].columns.keys()) - {column for where, column in ADDED if where == name}
    for where, old, new in reversed(RENAMED):
        if where == name:
            columns = columns - {new} | {old}
    return columns
