"""The rows of a store as lines of JSON, the same for every database, and the blobs that they name."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Connection, LargeBinary, MetaData, Table, insert, inspect, select, text

from talaria.errors import StateError
from talaria_coordinator.storage.records import Life
from talaria_coordinator.storage.tables import ATTEMPTS, FLEETS, METADATA, UPDATES

LONGEST_LINE = 1 << 28
BATCH = 500


def in_use(tx: Connection) -> set[str]:
    """Digests that must be kept: every global model and server state of a round, and updates that may yet count: those
    of a round that is open, and of an asynchronous run any that is not folded."""
    keep, buffered = set[str | None](), set[str]()
    for fleet in tx.execute(select(*(FLEETS.c[name] for name in ("fleet", "run", "model_digest", "server", "life")))):
        canary = Life.of(fleet.life).canary  # what comes back where the run that is tried is called off
        keep |= {fleet.model_digest, fleet.server, canary.get("model_digest"), canary.get("server")}
        if json.loads(fleet.run).get("asynchronous"):
            buffered.add(fleet.fleet)
    for row in tx.execute(select(ATTEMPTS.c.base_digest, ATTEMPTS.c.model_digest)):
        keep |= {row.base_digest, row.model_digest}
    made = (ATTEMPTS.c.fleet == UPDATES.c.fleet) & (ATTEMPTS.c.attempt == UPDATES.c.attempt)
    stored = select(UPDATES.c.fleet, UPDATES.c.digest, ATTEMPTS.c.closed).join_from(UPDATES, ATTEMPTS, made)
    for one in tx.execute(stored.where(UPDATES.c.status == "stored")):
        if one.closed is None or one.fleet in buffered:
            keep.add(one.digest)
    return {digest for digest in keep if digest}


def dump(tx: Connection) -> Iterator[bytes]:
    """Every row of every table as one line, parents before children; one batch of rows in memory at a time."""
    for table in METADATA.sorted_tables:
        asked = select(table).order_by(*table.primary_key.columns).execution_options(yield_per=BATCH)
        with tx.execute(asked) as found:
            for row in found.mappings():
                values = {name: _plain(value) for name, value in row.items()}
                yield json.dumps([table.name, values]).encode() + b"\n"


def load(tx: Connection, lines: BinaryIO) -> int:
    """Enter the rows that :func:`dump` wrote into tables as the database has them now; their number.

    Raises :class:`~talaria.errors.StateError` for a line that is none, or does not fit the tables.
    """
    tables = _tables(tx)
    batch: list[dict[str, Any]] = []
    last, count = "", 0
    for name, values in _lines(lines):
        if name not in tables or set(values) != set(tables[name].columns.keys()):
            raise StateError(f"restore: row {count + 1} does not fit the tables; the backup is damaged")
        if batch and (name != last or len(batch) == BATCH):
            tx.execute(insert(tables[last]), batch)
            batch = []
        last, count = name, count + 1
        batch.append(_typed(tables[name], values))
    if batch:
        tx.execute(insert(tables[last]), batch)
    if tx.dialect.name == "postgresql":
        # Rows came with their numbers; the next event takes the one after.
        tx.execute(text("SELECT setval(pg_get_serial_sequence('events', 'seq'), max(seq)) FROM events"))
    return count


def fleets(path: Path) -> list[str]:
    """The names of the fleets in a file of rows that :func:`dump` wrote. Raises as :func:`load`."""
    with path.open("rb") as lines:
        return sorted(str(values.get("fleet")) for name, values in _lines(lines) if name == FLEETS.name)


def _tables(tx: Connection) -> dict[str, Table]:
    found = MetaData()
    # As they are now: a backup of an earlier revision has the names of that revision.
    found.reflect(tx, only=sorted(set(inspect(tx).get_table_names()) - {"alembic_version"}))
    return {table.name: table for table in found.sorted_tables}


def _lines(lines: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    while line := lines.readline(LONGEST_LINE + 1):
        try:
            if len(line) > LONGEST_LINE:
                raise ValueError
            name, values = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise StateError("restore: a line of the backup's rows.jsonl is damaged; take another backup") from None
        if not isinstance(name, str) or not isinstance(values, dict):
            raise StateError("restore: a line of the backup's rows.jsonl is no row; take another backup")
        yield name, values


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes | memoryview) else value


def _typed(table: Table, values: dict[str, Any]) -> dict[str, Any]:
    def typed(name: str, value: Any) -> Any:
        if value is None:
            return value
        kind = table.columns[name].type
        try:
            if isinstance(kind, LargeBinary):
                return base64.b64decode(value, validate=True)
            return _fitting(kind.python_type, value)
        except (TypeError, ValueError, binascii.Error):
            raise StateError(f"restore: {table.name}.{name} is damaged; take another backup") from None

    return {name: typed(name, value) for name, value in values.items()}


def _fitting(kind: type, value: Any) -> Any:
    """``value``, as SQLite would take any. Raises ValueError where it is none of this kind."""
    if kind is str and isinstance(value, str):
        value.encode()  # what half a letter does not
        return value
    if kind is int and type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    if kind is float and type(value) in (int, float) and is_moment(value):
        return value
    raise ValueError


def is_moment(at: float) -> bool:
    """Whether it is a time in seconds since 1970, which calendars hold."""
    return 0 <= at < 1e11
