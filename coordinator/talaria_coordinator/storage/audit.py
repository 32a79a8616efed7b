"""The audit log: each event carries the hash of the one before, so that no event can be altered unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from talaria import time
from talaria.errors import StateError
from talaria_coordinator.storage.database import Database
from talaria_coordinator.storage.tables import EVENTS

GENESIS = "0" * 64
_APPEND = insert(EVENTS)
_LAST = select(EVENTS.c.chain).order_by(EVENTS.c.seq.desc()).limit(1)


@dataclass(frozen=True)
class Told:
    """What an event tells, and of whom."""

    kind: str
    detail: dict[str, Any]
    attempt: int | None = None
    device: str | None = None


def link(chain: str, at: float, *fields: object) -> str:
    """The hash of an event that follows ``chain``."""
    return hashlib.sha256(json.dumps([chain, at, *fields]).encode()).hexdigest()


def append(
    tx: Connection,
    kind: str,
    detail: dict[str, Any],
    *,
    fleet: str,
    attempt: int | None = None,
    device: str | None = None,
) -> None:
    """Append an event, in the transaction of what it tells."""
    append_all(tx, fleet, [Told(kind, detail, attempt, device)])


def append_all(tx: Connection, fleet: str, events: Sequence[Told]) -> None:
    """Append events in this order, in the transaction of what they tell."""
    last = tx.execute(_LAST).scalar_one_or_none()
    chain, rows = last or GENESIS, list[dict[str, Any]]()
    for event in events:
        at, text = time.time(), json.dumps(event.detail, sort_keys=True)
        chain = link(chain, at, fleet, event.attempt, event.device, event.kind, text)
        row = {"at": at, "fleet": fleet, "attempt": event.attempt, "device": event.device, "kind": event.kind}
        rows.append({**row, "detail": text, "chain": chain})
    tx.execute(_APPEND, rows)


def verify(tx: Connection) -> int:
    """Walk the whole chain; the number of events. Raises StateError at the first that was altered."""
    chain, count = GENESIS, 0
    with tx.execute(select(EVENTS).order_by(EVENTS.c.seq).execution_options(yield_per=1000)) as found:
        for row in found:
            chain, count = link(chain, row.at, row.fleet, row.attempt, row.device, row.kind, row.detail), count + 1
            if chain != row.chain:
                raise StateError(f"store: event {row.seq} of the audit log was altered; compare with a backup")
    return count


@dataclass(frozen=True)
class AuditLog:
    """The events of all fleets, one chain."""

    _database: Database

    def events(
        self, fleet: str, last: int = 100, kinds: Collection[str] = (), without: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """The last events of a fleet, oldest first; of these ``kinds`` alone, where some are named, and without these
        details."""
        mine = EVENTS.c.fleet == fleet
        if kinds:
            mine &= EVENTS.c.kind.in_(sorted(kinds))
        with self._database.reading() as tx:
            asked = select(EVENTS).where(mine).order_by(EVENTS.c.seq.desc()).limit(last)
            found = list[dict[str, Any]]()
            for r in tx.execute(asked.execution_options(yield_per=100)):
                detail = {name: value for name, value in json.loads(r.detail).items() if name not in without}
                about = {name: getattr(r, name) for name in ("seq", "at", "attempt", "device", "kind")}
                found.append(about | detail)
            return found[::-1]

    def verify(self) -> int:
        """Walk the whole hash chain; the number of events. Raises StateError at the first that was altered."""
        with self._database.reading() as tx:
            return verify(tx)
