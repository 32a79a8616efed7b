"""Connections to the database, SQLite or PostgreSQL, with the durability and the order of writes that the store needs.

Writers take turns. On SQLite a transaction begins with the write lock (``BEGIN IMMEDIATE``); on PostgreSQL it
begins with an advisory lock that ends with it, at READ COMMITTED, so that each one sees all that was committed before
it. That keeps the audit log one chain and makes the epoch a fence. Readers take one snapshot and wait for nobody.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import SQLAlchemyError

from talaria.errors import ConfigError, StateError

IN_LINE = 0x7461_6C61_7269
"""The advisory lock of all writers in one database: "talari" in ASCII."""
CONNECT_S = 10
# Who falls silent in the midst of a transaction is put out before those who wait for its lock give up.
PATIENCE = "SET lock_timeout = '20s'; SET idle_in_transaction_session_timeout = '10s'"
SILENCE_S = 30.0
"""Seconds that a server may take over one answer: longer than anybody waits for a lock there."""
ALIVE = {"keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
         "tcp_user_timeout": 20_000}  # fmt: skip
"""How libpq finds out that nobody is at the other end (seconds; the last in milliseconds)."""
# A server may be told to answer a commit before it is on disk; a receipt may not be given then.
DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"


def open_engine(where: Path | URL | str, *, reader: bool = False, password: Callable[[], str] | None = None) -> Engine:
    """Connections to ``where``, a path (SQLite) or a URL (PostgreSQL); those of a ``reader`` cannot write. Each begins
    with what ``password`` says then, where that is given.

    Raises :class:`~talaria.errors.ConfigError` for what is no database, :class:`~talaria.errors.StateError` where the
    folder cannot be made. Connects to nothing yet.
    """
    if isinstance(where, Path):
        return _sqlite(where, reader)
    try:
        url = make_url(where)
        asked = {"connect_timeout": CONNECT_S, **ALIVE}
        timeout = {name: value for name, value in asked.items() if name not in url.query}
        engine = create_engine(
            url,
            isolation_level="REPEATABLE READ" if reader else "READ COMMITTED",
            connect_args={"client_encoding": "utf8", **timeout},
            pool_pre_ping=True,
            execution_options={"postgresql_readonly": reader},
        )
    except SQLAlchemyError as error:
        raise ConfigError(f"store: {error}; give a path, or a URL like postgresql+psycopg://host/name") from None
    except ModuleNotFoundError:
        raise ConfigError("store: PostgreSQL needs the postgres extra; pip install 'talaria[postgres]'") from None
    if password is not None:

        def told(_dialect: object, _record: object, _args: object, options: dict[str, Any]) -> None:
            options["password"] = password()

        event.listen(engine, "do_connect", told)  # before the one that connects
    if engine.dialect.driver == "psycopg":
        event.listen(engine, "do_connect", _connected)
    event.listen(engine, "connect", _ordered)
    if not reader:
        event.listen(engine, "begin", _stand_in_line)
    return engine


def place(engine: Engine) -> str:
    """Where its database lies, for people: a path, or host and name."""
    url = engine.url
    return url.database or "" if engine.dialect.name == "sqlite" else f"{url.host or 'here'}/{url.database}"


def snapshots(engine: Engine) -> Engine:
    """The same connections, for transactions that read one snapshot and wait for no writer."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(reads=True)
    return engine.execution_options(reads=True, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _sqlite(path: Path, reader: bool) -> Engine:
    if path.exists() and not os.access(path.parent, os.W_OK):
        return _snapshot(path)
    if not reader:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"store: cannot make {path.parent}: {error.strerror}; give another folder") from None
    # Who writes next has the connection of who wrote last, whose pages are still those of the file.
    engine = create_engine(URL.create("sqlite", database=str(path)), pool_use_lifo=True)
    event.listen(engine, "connect", _reader if reader else _durable)
    if not reader:
        event.listen(engine, "begin", _begin)
    return engine


def _snapshot(path: Path) -> Engine:
    """A database in a folder that nobody may write, as a snapshot of a disk is: read without a file beside it. What
    its ``-wal`` holds is read too, where the index that belongs to it is there."""
    wal = path.with_name(f"{path.name}-wal")
    fixed = "" if wal.exists() and wal.stat().st_size else "&immutable=1"
    where = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro{fixed}"
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=lambda: sqlite3.connect(where, uri=True, check_same_thread=False),
    )
    event.listen(engine, "connect", _reader)
    return engine


def _durable(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None
    # Pages kept by each connection: half a MiB is plenty for short transactions, and the pool holds several. Some
    # builds of SQLite would write zeros to all pages that a large row leaves: as much again with each saved state.
    durable = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=20000")
    for pragma in (*durable, "cache_size=-512", "secure_delete=FAST"):
        connection.execute(f"PRAGMA {pragma}")


def _reader(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA busy_timeout=2000")
    connection.execute("PRAGMA query_only=ON")


def _begin(connection: Connection) -> None:
    # A deferred transaction that reads first and writes later can fail where two processes do so at once.
    connection.exec_driver_sql("BEGIN" if _only_reads(connection) else "BEGIN IMMEDIATE")


def _ordered(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(PATIENCE)
        cursor.execute(DURABLE)
    connection.commit()


def _connected(_dialect: object, _record: object, args: list[Any], options: dict[str, Any]) -> Any:
    """A connection on which no answer is waited for for ever: a server that was stopped, or a link that swallows all,
    closes no socket."""
    import psycopg

    class Bounded(psycopg.Connection[Any]):
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, SILENCE_S if timeout is None else timeout)
            except psycopg.errors._WaitTimeout:
                self.pgconn.finish()  # what it was about to do is undone by the server
                raise psycopg.OperationalError(f"no answer from the server within {SILENCE_S:g} s") from None

    return Bounded.connect(*args, **options)


def _stand_in_line(connection: Connection) -> None:
    if not _only_reads(connection):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({IN_LINE})")


def _only_reads(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("reads"))
