"""Checks that every blob in use is intact, the audit log is one chain, and every round counted what it committed.

It only reads, one snapshot of the rows, and may run beside the coordinator.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from talaria.errors import StateError
from talaria_coordinator.storage import audit, table_dump
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.records import Life
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.tables import ATTEMPTS, EVENTS, FLEETS, UPDATES


@dataclass(frozen=True)
class Findings:
    """``damage`` in words, empty where all is well. ``orphans`` are blobs that nothing names: gc frees them."""

    damage: tuple[str, ...]
    orphans: tuple[str, ...]
    events: int
    attempts: int
    blobs: int


def check(store: Store, blobs: Blobs) -> Findings:
    """Check everything; reads every blob in use once. Raises :class:`~talaria.errors.StateError` only where the
    database or the blobs do not answer at all."""
    with store.database.reading() as tx:
        damage = [*_pages(tx), *_log(tx)]
        for fleet in sorted(tx.execute(select(FLEETS)).all(), key=lambda row: str(row.fleet)):
            damage += [f"fleet {fleet.fleet!r}: {text}" for text in _fleet(tx, fleet)]
        keep = table_dump.in_use(tx)
        events, attempts = (tx.execute(select(func.count()).select_from(t)).scalar_one() for t in (EVENTS, ATTEMPTS))
    spoiled = {digest: text for digest in sorted(keep) if (text := _spoiled(blobs, digest))}
    # What the coordinator has folded and dropped since the snapshot is not missing.
    now = store.blobs_in_use() if spoiled else keep
    damage += [text for digest, text in spoiled.items() if digest in now]
    there = set(blobs.digests())
    orphans = tuple(sorted(there - keep - store.blobs_in_use()))
    return Findings(tuple(damage), orphans, events, attempts, len(keep))


def _pages(tx: Connection) -> Iterator[str]:
    if tx.dialect.name == "sqlite":
        for (text,) in tx.exec_driver_sql("PRAGMA integrity_check(20)"):
            if text != "ok":
                yield f"the database file is damaged: {text}; restore a backup"
        for table, row, parent, _ in tx.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(20):
            yield f"row {row} of {table} names a row of {parent} that is not there; restore a backup"


def _log(tx: Connection) -> Iterator[str]:
    try:
        audit.verify(tx)
    except StateError as error:
        yield str(error)


def _fleet(tx: Connection, fleet: Row[Any]) -> Iterator[str]:
    """What does not agree among a fleet's row, its rounds, its updates and what the audit log says of them."""
    found = tx.execute(select(ATTEMPTS).where(ATTEMPTS.c.fleet == fleet.fleet).order_by(ATTEMPTS.c.attempt)).all()
    told = _told(tx, fleet.fleet)
    committed = [row for row in found if row.model_digest is not None]
    learned = [row.round for row in committed]
    if learned != list(range(1, fleet.round + 1)):
        yield f"it has learned {fleet.round} rounds, but the committed ones are {_short(learned)}; restore a backup"
    life = Life.of(fleet.life)
    if committed and life.model_digest and life.began >= committed[-1].round:
        if (life.model_digest, life.server) != (fleet.model_digest, fleet.server):
            yield "its global model is not the one that its present run began from; restore a backup"
    elif committed and (committed[-1].model_digest, committed[-1].server) != (fleet.model_digest, fleet.server):
        yield f"its global model is not the one that attempt {committed[-1].attempt} committed; restore a backup"
    if found and found[-1].attempt > fleet.tried:
        yield f"attempt {found[-1].attempt} was opened, but only {fleet.tried} are said to have been; restore a backup"
    in_models: Counter[tuple[int, str]] = Counter()
    for row in found:
        try:
            pairs = (
                [] if row.counted is None else [(int(made), str(device)) for made, device in json.loads(row.counted)]
            )
        except (ValueError, TypeError):
            yield f"attempt {row.attempt}: its list of counted updates is damaged; restore a backup"
            continue
        in_models.update(pairs)
        yield from (f"attempt {row.attempt}: {text}; restore a backup" for text in _round(row, pairs, told))
    counted = tx.execute(
        select(UPDATES.c.attempt, UPDATES.c.device).where(
            (UPDATES.c.fleet == fleet.fleet) & (UPDATES.c.status == "counted")
        )
    )
    entered = {(made, device) for made, device in counted}
    for made, device in sorted(pair for pair, times in in_models.items() if times > 1):
        times = in_models[made, device]
        yield f"the update of {device!r} for attempt {made} is counted {times} times; restore a backup"
    for made, device in sorted(set(in_models) - entered):
        yield f"the update of {device!r} for attempt {made} is in a model, but not entered as counted; restore a backup"
    for made, device in sorted(entered - set(in_models)):
        yield f"the update of {device!r} for attempt {made} is entered as counted, but in no model; restore a backup"


def _round(row: Row[Any], pairs: list[tuple[int, str]], told: dict[int, dict[str, Any]]) -> Iterator[str]:
    if (row.model_digest is None) != (row.counted is None) or (row.model_digest is not None and row.closed is None):
        yield "it is half committed"
    if row.closed is not None and row.model_digest is None and row.failure is None:
        yield "it was closed without a global model and without a reason"
    if row.counted is not None and hashlib.sha256(row.counted.encode()).hexdigest() != row.counted_sha256:
        yield "its list of counted updates was altered (its sha256 is another)"
    said = told.get(row.attempt)
    if (row.model_digest is None) != (said is None):
        yield (
            "the audit log does not agree that it was committed" if said is None else "the audit log has a commit of it"
        )
    elif said is not None:
        listed = [tuple(pair) for pair in said.get("counted", ())]
        if (said.get("model_digest", said.get("body")), said.get("round", said.get("step")), listed) != (
            row.model_digest,
            row.round,
            pairs,
        ):
            yield "its global model or counted updates are not those that the audit log has"


def _told(tx: Connection, fleet: str) -> dict[int, dict[str, Any]]:
    """What the audit log says of each committed round; up to revision 0003 it said `step` and `body`."""
    asked = select(EVENTS.c.attempt, EVENTS.c.detail).where(
        (EVENTS.c.fleet == fleet) & (EVENTS.c.kind == "round-closed")
    )
    found: dict[int, dict[str, Any]] = {}
    for number, detail in tx.execute(asked):
        try:
            value = json.loads(detail)
        except ValueError:
            value = None
        found[number] = value if isinstance(value, dict) else {}
    return found


def _spoiled(blobs: Blobs, digest: str) -> str | None:
    try:
        blobs.get(digest)
    except StateError as error:
        return str(error)
    return None


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (" ..." if len(numbers) > 20 else "") or "none"
