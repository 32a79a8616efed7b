"""Updates in the record: the first of a (round, device) stays, and those that come at once are entered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from talaria import time
from talaria.errors import StateError
from talaria_coordinator.storage.audit import Told, append, append_all
from talaria_coordinator.storage.database import Database, SilentError
from talaria_coordinator.storage.records import Received, received_of, storable
from talaria_coordinator.storage.tables import ATTEMPTS, DEVICES, EQUIVOCATIONS, FINDINGS, UPDATES, of_attempt
from talaria_coordinator.storage.update_summary import read
from talaria_coordinator.storage.words import keep_words

TOGETHER = 64
"""So many updates are entered in one transaction at most."""
NAMED = 500
"""So many devices are named in one statement at most."""
_ENTER, _FOUND = insert(UPDATES), insert(FINDINGS)
_THERE = select(UPDATES).where(
    UPDATES.c.fleet == bindparam("name"),
    UPDATES.c.attempt == bindparam("number"),
    UPDATES.c.device.in_(bindparam("names", expanding=True)),
)


@dataclass(eq=False)
class _Entry:
    """An update to be entered, and what became of that."""

    fleet: str
    attempt: int
    device: str
    values: dict[str, Any]
    found: str | None = None
    step: int | None = None
    """Of a secure round, in which the update is a device's word too."""
    row: Received | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.row is not None or self.error is not None


@dataclass(frozen=True)
class Updates:
    """See the module."""

    _database: Database
    _brought: list[_Entry] = field(default_factory=list)
    """Updates that wait to be entered."""

    def keep(
        self,
        fleet: str,
        attempt: int,
        device: str,
        *,
        digest: str,
        size: int,
        base_version: int,
        found: str | None = None,
        step: int | None = None,
    ) -> Received:
        """Enter a complete and valid update, whose bytes are the blob ``digest``, and what it says of itself; at once
        with it, where it is the device's word of the ``step`` of a secure round, that word. The first one of a (round,
        device) stays: the row that is returned may hold another digest."""
        values = {"digest": digest, "size": size, "base_version": base_version, "status": "stored", "reason": None}
        return self._enter(_Entry(fleet, attempt, device, values, found, step))

    def reject(
        self, fleet: str, attempt: int, device: str, *, digest: str, size: int, base_version: int, reason: str
    ) -> Received:
        """Enter an update that will never count, and why."""
        why = {"status": "rejected", "reason": storable(reason)}
        values = {"digest": digest, "size": size, "base_version": base_version, **why}
        return self._enter(_Entry(fleet, attempt, device, values))

    def _enter(self, entry: _Entry) -> Received:
        """Enter one update, together with those that other threads brought while the last transaction was written: one
        transaction, and one wait for the disk, for all of them. It returns once the entry is durable."""
        self._brought.append(entry)
        with self._database.line:
            if not entry.done:  # else another thread has taken it along
                others = [one for one in list(self._brought) if one.fleet == entry.fleet and one is not entry]
                batch = [entry, *others[: TOGETHER - 1]]
                for one in batch:
                    self._brought.remove(one)
                try:
                    self._enter_all(batch)
                except SilentError as error:  # asked one by one, each would wait as long
                    for one in batch:
                        one.error = error
                except StateError:
                    for one in batch:  # one may be at fault for all
                        self._enter_alone(one)
        if entry.error is not None:
            raise entry.error
        assert entry.row is not None
        return entry.row

    def _enter_alone(self, entry: _Entry) -> None:
        try:
            self._enter_all([entry])
        except StateError as error:
            entry.error = error

    def _enter_all(self, batch: Sequence[_Entry]) -> None:
        with self._database.transaction(batch[0].fleet) as tx:
            rows = _entered(tx, batch[0].fleet, batch)
            said: dict[int, list[tuple[int, str, bytes]]] = {}
            for one in batch:
                digest = one.values["digest"]
                if one.step is not None and rows[one.attempt, one.device].digest == digest:
                    said.setdefault(one.attempt, []).append((one.step, one.device, bytes.fromhex(digest)))
            for attempt, each in said.items():
                keep_words(tx, batch[0].fleet, attempt, each)
        for one in batch:
            one.row = rows[one.attempt, one.device]

    def leave_out(self, fleet: str, attempt: int, device: str, reason: str) -> None:
        """An update that was stored will not count after all; one that is not stored stays as it is."""
        with self._database.writing(fleet) as tx:
            entry = _stored(fleet, attempt, [device])
            values = {"status": "rejected", "reason": storable(reason), "changed": time.time()}
            if tx.execute(update(UPDATES).where(entry).values(**values)).rowcount:
                append(tx, "update-left-out", {"reason": reason}, fleet=fleet, attempt=attempt, device=device)

    def equivocation(self, fleet: str, attempt: int, device: str, first: str, second: str) -> None:
        """Record that a device offered a second, different update of a round."""
        with self._database.writing(fleet) as tx:
            key = {"fleet": fleet, "attempt": attempt, "device": device, "digest": second}
            same = [EQUIVOCATIONS.c[name] == value for name, value in key.items()]
            if tx.execute(select(EQUIVOCATIONS).where(*same)).one_or_none() is None:
                tx.execute(insert(EQUIVOCATIONS).values(seen=time.time(), **key))
                both = {"first": first, "second": second}
                append(tx, "equivocation", both, fleet=fleet, attempt=attempt, device=device)

    def of(self, fleet: str, attempt: int) -> list[Received]:
        """All updates of a round, by device."""
        with self._database.reading() as tx:
            rows = tx.execute(select(UPDATES).where(of_attempt(UPDATES, fleet, attempt)))
            return sorted((received_of(row) for row in rows), key=lambda update: update.device)

    def counted(self, fleet: str, pairs: Sequence[tuple[int, str]]) -> list[Received]:
        """The updates of these (attempt that each was made for, device), as a committed attempt names them."""
        named = set(pairs)
        made = (update for attempt in sorted({attempt for attempt, _ in named}) for update in self.of(fleet, attempt))
        return [update for update in made if (update.attempt, update.device) in named]

    def clients(self, fleet: str, attempt: int) -> int:
        """How many devices are in the updates of a round that count, a gateway's site in full."""
        same = (FINDINGS.c.attempt == UPDATES.c.attempt) & (FINDINGS.c.device == UPDATES.c.device)
        both = (FINDINGS.c.fleet == UPDATES.c.fleet) & same
        counted = of_attempt(UPDATES, fleet, attempt) & (UPDATES.c.status == "counted")
        with self._database.reading() as tx:
            found = tx.execute(select(FINDINGS.c.found).join_from(UPDATES, FINDINGS, both).where(counted)).scalars()
            return sum(read(text).clients for text in found)

    def counted_rounds(self, fleet: str) -> dict[str, int]:
        """By device, the newest round that it made an update for which counted."""
        # The newest of each device is looked up by the index: updates of years are many, and this is asked each round.
        own = (UPDATES.c.fleet == fleet) & (UPDATES.c.device == DEVICES.c.device) & (UPDATES.c.status == "counted")
        newest = select(func.max(UPDATES.c.attempt)).where(own).correlate(DEVICES).scalar_subquery()
        each = select(DEVICES.c.device, newest.label("attempt")).where(DEVICES.c.fleet == fleet).subquery()
        made = (ATTEMPTS.c.fleet == fleet) & (ATTEMPTS.c.attempt == each.c.attempt)
        with self._database.reading() as tx:
            found = tx.execute(select(each.c.device, ATTEMPTS.c.round).join_from(each, ATTEMPTS, made))
            return {row[0]: row[1] for row in found}

    def equivocations(self, fleet: str) -> list[tuple[int, str, str]]:
        """All second, different updates as (round, device, digest)."""
        with self._database.reading() as tx:
            rows = tx.execute(select(EQUIVOCATIONS).where(EQUIVOCATIONS.c.fleet == fleet))
            return sorted((row.attempt, row.device, row.digest) for row in rows)


def _entered(tx: Connection, fleet: str, batch: Sequence[_Entry]) -> dict[tuple[int, str], Received]:
    """The rows of these updates by (attempt, device); those that are new are entered, the first of each stays."""
    rows: dict[tuple[int, str], Received] = {}
    for attempt in {entry.attempt for entry in batch}:
        names = [entry.device for entry in batch if entry.attempt == attempt]
        for row in tx.execute(_THERE, {"name": fleet, "number": attempt, "names": names}):
            rows[attempt, row.device] = received_of(row)
    new: list[_Entry] = []
    for entry in batch:
        if (entry.attempt, entry.device) not in rows:
            rows[entry.attempt, entry.device] = Received(entry.attempt, entry.device, **entry.values)
            new.append(entry)
    if new:
        keys = [{"fleet": fleet, "attempt": entry.attempt, "device": entry.device} for entry in new]
        now = time.time()
        values = [{**key, "changed": now, **entry.values} for key, entry in zip(keys, new, strict=True)]
        tx.execute(_ENTER, values)
        found = [{**key, "found": one.found} for key, one in zip(keys, new, strict=True) if one.found is not None]
        if found:
            tx.execute(_FOUND, found)
        append_all(tx, fleet, [_told(entry) for entry in new])
    return rows


def _told(entry: _Entry) -> Told:
    detail = {"digest": entry.values["digest"], "reason": entry.values["reason"]}
    return Told(f"update-{entry.values['status']}", detail, entry.attempt, entry.device)


def mark_counted(tx: Connection, fleet: str, attempt: int, pairs: Sequence[tuple[int, str]], now: float) -> None:
    """Updates that were stored, as (attempt that they were made for, device), count in the model of ``attempt``, in its
    transaction. Raises StateError for one that is not stored."""
    for made in sorted({made for made, _ in pairs}):
        names = [device for number, device in pairs if number == made]
        for start in range(0, len(names), NAMED):
            some = names[start : start + NAMED]
            mine = _stored(fleet, made, some)
            stored = set(tx.scalars(select(UPDATES.c.device).where(mine)))
            for device in some:
                if device not in stored:
                    raise StateError(
                        f"fleet {fleet!r}: attempt {attempt} cannot count {device!r}: its update of attempt {made} "
                        "is not in the store, or counts already"
                    )
                stored.remove(device)
            tx.execute(update(UPDATES).where(mine).values(status="counted", changed=now))


def _stored(fleet: str, attempt: int, devices: Sequence[str]) -> Any:
    return of_attempt(UPDATES, fleet, attempt) & UPDATES.c.device.in_(devices) & (UPDATES.c.status == "stored")
