"""Queries of the API: plain records read from the store, every list bounded.

Readers have connections of their own that only ever read. They neither wait for the learning nor make it
wait; summaries of closed rounds never change and are computed once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sqlalchemy import URL, ColumnElement, Connection, Row, Select, case, func, select
from sqlalchemy.exc import SQLAlchemyError

from talaria.errors import StateError, TransportError
from talaria.privacy.forms import FORMS
from talaria_coordinator.fleet.waiting import holding
from talaria_coordinator.storage import update_summary
from talaria_coordinator.storage.engine import open_engine
from talaria_coordinator.storage.records import Life, Spent, means_of, storable, workers_of
from talaria_coordinator.storage.tables import (
    ATTEMPTS,
    DEVICES,
    EVENTS,
    FINDINGS,
    FLEETS,
    MACHINES,
    UPDATES,
    of_attempt,
)
from talaria_coordinator.storage.update_summary import Findings
from talaria_coordinator.web.schemas import (
    AttemptDetail,
    AttemptView,
    DeviceView,
    DriftView,
    EventView,
    FleetView,
    OverlapView,
    SpentView,
    Spread,
    UpdateView,
    WorkerView,
)

PAIRED = 64
"""Masked updates of a round, first by name, that are compared pair by pair."""
REMEMBERED = 2048
DRIFT_ATTEMPTS = 20
"""What devices told of their samples longer ago than this is not looked for."""
TROUBLE = {"error": ("round-closed", "started"), "disconnected": ("connected",), "failed": ("started",)}
"""Events of the journal that tell what keeps a coordinator from its work, and which say that it is over."""


class Views:
    """Reads of the store at ``where``, a path (SQLite) or a database URL. Safe to use from many threads.

    These connections outlive those of the coordinator: ``password`` tells what the database's is now, before each."""

    def __init__(self, where: Path | URL | str, password: Callable[[], str] | None = None) -> None:
        self._engine = open_engine(where, reader=True, password=password)
        self._closed: dict[tuple[str, int], AttemptView] = {}
        self._trouble: dict[str, dict[str, str]] = {}

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except (SQLAlchemyError, TransportError) as error:
            cause = str(error.__cause__ or error).splitlines()[0]
            raise StateError(f"store: the database does not answer a reader ({cause}); try again") from error

    def tell(self, fleet: str, event: Mapping[str, Any]) -> None:
        """An event of the journal: what a disk or a broker refuses may not be in the store, and is shown until it is
        over."""
        kind, before = event["event"], self._trouble.get(fleet, {})
        trouble = {other: said for other, said in before.items() if kind not in TROUBLE[other]}
        if kind in TROUBLE:
            trouble[kind] = storable(str(event.get("error", "")))
        self._trouble[fleet] = trouble

    def fleets(self, limit: int = 100) -> list[FleetView]:
        """The first ``limit`` fleets by name."""
        with self._reading() as tx:
            rows = tx.execute(select(FLEETS).order_by(FLEETS.c.fleet).limit(limit))
            return [self._fleet(tx, row) for row in rows]

    def fleet(self, fleet: str) -> FleetView | None:
        """One fleet, or None."""
        with self._reading() as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one_or_none()
            return None if row is None else self._fleet(tx, row)

    def _fleet(self, tx: Connection, row: Row[Any]) -> FleetView:
        return _fleet(tx, row, list(self._trouble.get(row.fleet, {}).values()))

    def attempts(self, fleet: str, before: int | None = None, limit: int = 50) -> list[AttemptView]:
        """The last ``limit`` attempts with numbers below ``before`` (None: all), newest first."""
        chosen = ATTEMPTS.c.fleet == fleet
        if before is not None:
            chosen &= ATTEMPTS.c.attempt < before
        with self._reading() as tx:
            rows = tx.execute(select(ATTEMPTS).where(chosen).order_by(ATTEMPTS.c.attempt.desc()).limit(limit)).all()
            return [self._summary(tx, row) for row in rows]

    def committed(self, fleet: str) -> AttemptView | None:
        """The last attempt that was committed, however many failed since; None where none was."""
        chosen = (ATTEMPTS.c.fleet == fleet) & ATTEMPTS.c.closed.is_not(None) & ATTEMPTS.c.failure.is_(None)
        with self._reading() as tx:
            row = tx.execute(select(ATTEMPTS).where(chosen).order_by(ATTEMPTS.c.attempt.desc()).limit(1)).one_or_none()
            return None if row is None else self._summary(tx, row)

    def attempt(self, fleet: str, number: int, after: str = "", limit: int = 200) -> AttemptDetail | None:
        """One attempt with its updates of devices named after ``after``; None where there is no such attempt."""
        with self._reading() as tx:
            row = tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one_or_none()
            if row is None:
                return None
            return AttemptDetail(self._summary(tx, row), _updates(tx, fleet, number, after, limit))

    def overlap(self, fleet: str, number: int, limit: int = 24) -> OverlapView:
        """How far the masks of a round's first ``limit`` masked devices agree, pair by pair; empty where none is
        masked."""
        with self._reading() as tx:
            row = tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one_or_none()
            entries = () if row is None else _entries(tx, row)
            named = ((entry.device, update_summary.read(entry.found)) for entry in entries if entry.found)
            masked = list(islice(((device, found) for device, found in named if found.bits), limit))
        matrix = [[round(update_summary.overlap(a, b), 4) for _, b in masked] for _, a in masked]
        return OverlapView(number, [device for device, _ in masked], matrix)

    def devices(self, fleet: str, after: str = "", limit: int = 200, quarantined: bool = False) -> list[DeviceView]:
        """The first ``limit`` devices named after ``after``, or only those in quarantine."""
        chosen = (DEVICES.c.fleet == fleet) & (DEVICES.c.device > after)
        if quarantined:
            chosen &= DEVICES.c.quarantine.is_not(None)
        with self._reading() as tx:
            rows = tx.execute(select(DEVICES).where(chosen).order_by(DEVICES.c.device).limit(limit)).all()
            moved = _drift(tx, fleet, [row.device for row in rows])
            return [_device(row, moved.get(row.device)) for row in rows]

    def device(self, fleet: str, name: str) -> DeviceView | None:
        """One device, or None."""
        with self._reading() as tx:
            row = tx.execute(
                select(DEVICES).where((DEVICES.c.fleet == fleet) & (DEVICES.c.device == name))
            ).one_or_none()
            return None if row is None else _device(row, _drift(tx, fleet, [name]).get(name))

    def device_updates(self, fleet: str, name: str, limit: int = 50) -> list[UpdateView]:
        """A device's last ``limit`` updates, newest first."""
        with self._reading() as tx:
            rows = tx.execute(
                select(UPDATES, FINDINGS.c.found)
                .outerjoin(FINDINGS, _same())
                .where((UPDATES.c.fleet == fleet) & (UPDATES.c.device == name))
                .order_by(UPDATES.c.attempt.desc())
                .limit(limit)
            )
            return [_update(row) for row in rows]

    def events(self, fleet: str, before: int | None = None, limit: int = 100) -> list[EventView]:
        """The last ``limit`` events of the audit log with numbers below ``before``, newest first."""
        chosen = EVENTS.c.fleet == fleet
        if before is not None:
            chosen &= EVENTS.c.seq < before
        with self._reading() as tx:
            rows = tx.execute(select(EVENTS).where(chosen).order_by(EVENTS.c.seq.desc()).limit(limit))
            return [
                EventView(r.seq, r.at, r.kind, r.attempt, r.device, json.loads(r.detail, object_hook=_told))
                for r in rows
            ]

    def _summary(self, tx: Connection, row: Row[Any]) -> AttemptView:
        key = (row.fleet, row.attempt)
        view = self._closed.get(key)
        if view is not None:
            return view
        view = _attempt(tx, row)
        if row.closed is not None:
            if len(self._closed) >= REMEMBERED:
                self._closed.clear()
            self._closed[key] = view
        return view


def _told(detail: dict[str, Any]) -> dict[str, Any]:
    """What an event tells, as it can be answered: a reason given at a terminal may hold bytes that are no text."""
    return {key: storable(value) if isinstance(value, str) else value for key, value in detail.items()}


def _same() -> ColumnElement[bool]:
    return (
        (FINDINGS.c.fleet == UPDATES.c.fleet)
        & (FINDINGS.c.attempt == UPDATES.c.attempt)
        & (FINDINGS.c.device == UPDATES.c.device)
    )


def _found(fleet: str, number: int, status: Sequence[str], after: str, limit: int | None) -> Select[Any]:
    return (
        select(UPDATES, FINDINGS.c.found)
        .outerjoin(FINDINGS, _same())
        .where(of_attempt(UPDATES, fleet, number) & UPDATES.c.status.in_(status) & (UPDATES.c.device > after))
        .order_by(UPDATES.c.device)
        .limit(limit)
    )


def _updates(tx: Connection, fleet: str, number: int, after: str, limit: int) -> list[UpdateView]:
    rows = tx.execute(_found(fleet, number, ("stored", "counted", "rejected"), after, limit))
    return [_update(row) for row in rows]


def _fleet(tx: Connection, row: Row[Any], trouble: list[str]) -> FleetView:
    run = json.loads(row.run)
    mine = DEVICES.c.fleet == row.fleet
    here = case(((DEVICES.c.online == 1) & DEVICES.c.quarantine.is_(None), 1), else_=0)
    known, online, out = tx.execute(
        select(func.count(), func.coalesce(func.sum(here), 0), func.count(DEVICES.c.quarantine)).where(mine)
    ).one()
    machine = None
    if row.status != "done":
        machine = tx.execute(select(MACHINES.c.state).where(MACHINES.c.fleet == row.fleet)).scalar_one_or_none()
    return FleetView(
        name=row.fleet,
        status=row.status,
        round=row.round,
        rounds=int(run.get("rounds", 0)),
        tried=row.tried,
        epoch=row.epoch,
        algorithm=str(run.get("algorithm", "")),
        model=str((run.get("spec") or {}).get("name", "")) if isinstance(run.get("spec"), dict) else "",
        model_digest=row.model_digest,
        created=row.created,
        devices=known,
        online=online,
        quarantined=out,
        roster=len(json.loads(row.roster)) if row.roster else 0,
        waits_for=holding(machine),
        canary=list(Life.of(row.life).canary.get("members", [])),
        privacy=spent_view(Spent.of(row.privacy)),
        trouble=trouble,
        workers=[WorkerView(**vars(one)) for one in workers_of(row.workers)],
    )


def spent_view(spent: Spent | None) -> SpentView | None:
    """What privacy has cost, as it is told."""
    if spent is None:
        return None
    most = max(spent.rounds.values(), default=0)
    facts = {name: getattr(spent, name) for name in ("epsilon", "delta", "budget", "noise", "secure", "clip")}
    return SpentView(**facts, rounds=most, form=FORMS[spent.noise_by])


def _attempt(tx: Connection, row: Row[Any]) -> AttemptView:
    entries = list(_entries(tx, row))
    mine = of_attempt(UPDATES, row.fleet, row.attempt)
    told = tx.execute(select(UPDATES.c.status, func.count().label("came")).where(mine).group_by(UPDATES.c.status))
    came = {one.status: one.came for one in told}
    found = [update_summary.read(entry.found) for entry in entries if entry.found]
    return AttemptView(
        attempt=row.attempt,
        round=row.round,
        state="open" if row.closed is None else ("failed" if row.failure else "closed"),
        cohort=len(json.loads(row.cohort)),
        stored=came.get("stored", 0) + came.get("counted", 0),
        counted=None if row.counted is None else len(json.loads(row.counted)),
        clients=sum(one.clients for one in found),
        rejected=came.get("rejected", 0),
        opened=row.opened,
        closed=row.closed,
        failure=row.failure,
        bytes_up=sum(entry.size for entry in entries),
        bytes_dense=sum(one.dense for one in found),
        bytes_down=row.down,
        bytes_down_dense=None if row.dense is None else row.dense * len(json.loads(row.cohort)),
        accuracy=_spread([one.accuracy for one in found if one.accuracy is not None]),
        kept=_spread([one.kept for one in found if one.bits]),
        overlap=_overlap(found),
        means=means_of(row),
        model_digest=row.model_digest,
    )


def _entries(tx: Connection, row: Row[Any]) -> Iterator[Row[Any]]:
    """The updates that came for an attempt; of a committed one those that count in it, which asynchronously may have
    come for earlier ones."""
    pairs = None if row.counted is None else {(number, device) for number, device in json.loads(row.counted)}
    for number in [row.attempt] if pairs is None else sorted({number for number, _ in pairs}):
        for entry in tx.execute(_found(row.fleet, number, ("stored", "counted"), "", None)):
            if pairs is None or (entry.attempt, entry.device) in pairs:
                yield entry


def _overlap(found: Sequence[Findings]) -> float | None:
    value = update_summary.mean_overlap([one for one in found if one.bits][:PAIRED])
    return None if value is None else round(value, 4)


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    return Spread(len(values), min(values), median(values), fmean(values), max(values))


def _device(row: Row[Any], drift: DriftView | None) -> DeviceView:
    times, left = (row.joined, row.seen), (row.retired, row.left_by)
    return DeviceView(row.device, bool(row.online), row.boot, *times, row.quarantine, *left, drift)


def _drift(tx: Connection, fleet: str, names: Sequence[str]) -> dict[str, DriftView]:
    """What these devices told last of how far their samples have moved, where they told it lately."""
    newest = tx.execute(select(func.max(ATTEMPTS.c.attempt)).where(ATTEMPTS.c.fleet == fleet)).scalar_one()
    if newest is None or not names:
        return {}
    lately = (FINDINGS.c.fleet == fleet) & (FINDINGS.c.attempt > newest - DRIFT_ATTEMPTS)
    told = lately & FINDINGS.c.device.in_(names) & FINDINGS.c.found.like('%"drift.%')
    last = select(FINDINGS.c.device, func.max(FINDINGS.c.attempt).label("last")).where(told).group_by(FINDINGS.c.device)
    each = last.subquery()
    same = (FINDINGS.c.device == each.c.device) & (FINDINGS.c.attempt == each.c.last)
    rows = tx.execute(select(FINDINGS).join(each, same).where(FINDINGS.c.fleet == fleet))
    found = {}
    for row in rows:
        metrics = update_summary.read(row.found).metrics
        found[row.device] = DriftView(row.attempt, metrics.get("drift.labels"), metrics.get("drift.features"))
    return found


def _update(row: Row[Any]) -> UpdateView:
    found = update_summary.read(row.found) if row.found else None
    return UpdateView(
        attempt=row.attempt,
        device=row.device,
        status=row.status,
        reason=row.reason,
        size=row.size,
        digest=row.digest,
        dense=None if found is None else found.dense,
        kept=None if found is None else found.kept,
        accuracy=None if found is None else found.accuracy,
        metrics={} if found is None else dict(found.metrics),
    )
