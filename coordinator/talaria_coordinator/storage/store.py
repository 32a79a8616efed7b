"""The coordinator's durable memory: fleets, rounds, devices, updates, and the audit log that chains them.

One class over SQLAlchemy Core serves SQLite (a path; WAL, synchronous=FULL: a receipt once sent survives a power
cut) and PostgreSQL (a URL). Every method is one transaction; those that write are done one after another, and end with
:class:`~talaria.errors.StateError` once another coordinator has entered the fleet.

The protocol's own machine decides what happens to an update from offer to upload and is kept here as a whole
(:meth:`Store.save_machine`). A complete update is entered as ``stored`` or ``rejected`` under (fleet, round,
device), and ``stored`` becomes ``counted`` in the one transaction that also names the new global model.

It is longer than 500 lines because all that is ever written to the record stands here, and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from talaria import time
from talaria.errors import ConfigError, StateError, TalariaError
from talaria.federated.run import MOST_ROUNDS, Run
from talaria_coordinator.storage import migrate
from talaria_coordinator.storage.audit import Told, append, append_all, verify
from talaria_coordinator.storage.engine import open_engine, place, snapshots
from talaria_coordinator.storage.records import (
    Attempt,
    Device,
    Fleet,
    LeftBy,
    Life,
    Received,
    Spent,
    Worker,
    attempt_of,
    device_of,
    fleet_of,
    received_of,
    storable,
)
from talaria_coordinator.storage.table_dump import in_use
from talaria_coordinator.storage.tables import (
    ATTEMPTS,
    DEVICES,
    EQUIVOCATIONS,
    EVENTS,
    FINDINGS,
    FLEETS,
    MACHINES,
    UPDATES,
    WORDS,
    of_attempt,
)
from talaria_coordinator.storage.update_summary import read

GIVEN_KEPT = 64
"""So many runs, the newest and the first, may stand in fleet.toml still, though the fleet has gone on."""
BEFORE_KEPT = 8
"""So many runs before the present one are known whole, newest first."""
FAILED_KEPT = 100
"""So many rounds back, those that failed and got no update are kept with their cohorts."""


TOGETHER = 64
"""So many updates are entered in one transaction at most."""
BEGUN_KEPT = 64


class SilentError(StateError):
    """The database's server does not answer, or took another's side in a lock; it may again. What was asked last was
    done as a whole or not at all."""


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


class Store:
    """See the module. ``where`` is a path (SQLite) or the URL of a PostgreSQL database."""

    def __init__(self, where: Path | URL | str, *, make: bool = True) -> None:
        """Makes the tables or brings older ones up to date; without ``make``, both are left to the coordinator."""
        self._engine = open_engine(where)
        self._snapshots = snapshots(self._engine)
        # SQLite lets whoever asks at the right moment go first: among many threads one could wait for ever.
        self._line = threading.Lock()
        self._brought: list[_Entry] = []
        """Updates that wait to be entered."""
        self._epochs: dict[str, int] = {}
        self._begun: dict[tuple[str, int], tuple[int, str]] = {}
        try:
            with self._writing() if make else self.reading() as tx:
                migrate.prepare(tx) if make else migrate.require_current(tx)
        except TalariaError:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One snapshot of everything, which holds up no writer."""
        with answering(self._engine), self._snapshots.begin() as tx:
            yield tx

    @contextmanager
    def _writing(self, fleet: str | None = None) -> Iterator[Connection]:
        """One transaction, alone. Where this store entered ``fleet``, only while nobody else has entered it since."""
        with self._line, self._transaction(fleet) as tx:
            yield tx

    @contextmanager
    def _transaction(self, fleet: str | None) -> Iterator[Connection]:
        """One transaction of whoever has the line."""
        with answering(self._engine), self._engine.begin() as tx:
            if fleet in self._epochs:
                now = tx.execute(select(FLEETS.c.epoch).where(FLEETS.c.fleet == fleet)).scalar_one_or_none()
                _require_epoch(fleet, now, self._epochs[fleet])
            yield tx

    # -- fleets

    def enter(self, fleet: str, run: str, model_digest: str, server: str, *, above: int = 0) -> Fleet:
        """Begin a new epoch of a fleet, creating it with its first ``model_digest`` and ``server`` where it is new.
        The epoch is above ``above``, and later than any that a store of this fleet ever began: it counts from the
        clock.

        Raises :class:`~talaria.errors.ConfigError` where the stored fleet learns another run.
        """
        with self._writing() as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one_or_none()
            epoch = epoch_after(max(above, 0 if row is None else row.epoch))
            if row is None:
                tx.execute(
                    insert(FLEETS).values(
                        fleet=fleet,
                        run=run,
                        epoch=epoch,
                        round=0,
                        tried=0,
                        status="running",
                        model_digest=model_digest,
                        server=server,
                        created=time.time(),
                    )
                )
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
        self._epochs[fleet] = now.epoch
        return now

    def fleet(self, fleet: str) -> Fleet | None:
        """The fleet, or None."""
        with self.reading() as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one_or_none()
            return None if row is None else fleet_of(row)

    def fleets(self) -> list[Fleet]:
        """All fleets by name."""
        with self.reading() as tx:
            return sorted((fleet_of(row) for row in tx.execute(select(FLEETS))), key=lambda fleet: fleet.name)

    def set_status(self, fleet: str, status: Literal["running", "paused", "done", "aborted"], reason: str = "") -> None:
        """Change what the fleet is doing; logged, with the reason."""
        with self._writing(fleet) as tx:
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(status=status))
            append(tx, f"fleet-{status}", _why(reason), fleet=fleet)

    def note_workers(self, fleet: str, workers: Sequence[Worker]) -> None:
        """How the fleet's ingest workers are now; for people, so that it is in no log."""
        text = json.dumps([asdict(one) for one in workers]) if workers else None
        with self._writing(fleet) as tx:
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(workers=text))

    def extend(self, fleet: str, rounds: int) -> int:
        """Let the fleet's run go on for ``rounds`` rounds more, from what it has learned; how many it has then. One
        that was done runs again; one that was paused or called off stays so. Logged."""
        with self._writing(fleet) as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one()
            life, run = Life.of(row.life), Run.from_json(row.run, allow=None)
            longer = replace(run, rounds=run.rounds + rounds)
            given = _recent(tuple(dict.fromkeys((run.identity, *life.given))))
            if life.canary:  # they are the fleet's, also where the run that is tried is called off
                back = Run.from_json(life.canary["run"], allow=None)
                back = replace(back, rounds=min(MOST_ROUNDS, back.rounds + rounds))
                life = replace(life, canary={**life.canary, "run": back.to_json()})
            status = "running" if row.status == "done" else row.status
            values = {"run": longer.to_json(), "life": replace(life, given=given).to_json(), "status": status}
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(**values))
            append(tx, "run-extended", {"by": rounds, "rounds": longer.rounds}, fleet=fleet)
            return longer.rounds

    def follow(
        self, fleet: Fleet, run: Run, model_digest: str, server: str, given: Sequence[str], facts: Mapping[str, Any],
        canary: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Let the fleet learn ``run`` from now on, which goes on from what it has learned as ``model_digest`` and
        ``server`` say; ``given`` are the identities that fleet.toml may give; with ``canary`` (:class:`Life`) it is
        tried first. Logged, with ``facts``."""
        with self._writing(fleet.name) as tx:
            mine = FLEETS.c.fleet == fleet.name
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            if (now.run, now.round) != (fleet.run, fleet.round):
                raise StateError(f"fleet {fleet.name!r}: it has learned on meanwhile; try again")
            known = _recent(tuple(dict.fromkeys((*given, *now.life.given))))
            life = Life(
                given=known,
                began=now.round,
                model_digest=model_digest,
                server=server,
                before=(now.run, *now.life.before)[:BEFORE_KEPT],
                canary=canary or {},
            )
            values = {"run": run.to_json(), "model_digest": model_digest, "server": server, "status": "running"}
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json(), **values))
            detail = {"rounds": run.rounds, "model_digest": model_digest, "identity": run.identity, **facts}
            detail |= {"round": now.round} | ({} if canary is None else {"tried_by": canary["members"]})
            append(tx, "run-followed", detail, fleet=fleet.name)

    def replace_canary(self, fleet: str, members: Sequence[str]) -> None:
        """Others try the present run than were drawn, where some of those have left; logged."""
        with self._writing(fleet) as tx:
            mine = FLEETS.c.fleet == fleet
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            life = replace(now.life, canary={**now.life.canary, "members": sorted(members)})
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json()))
            append(tx, "canary-members", {"members": sorted(members)}, fleet=fleet)

    def end_canary(self, fleet: str, back: Run | None, facts: Mapping[str, Any]) -> None:
        """The present run was tried: it goes on with all, or (``back``) the run before it does, from its own last
        model. Logged, with ``facts``."""
        with self._writing(fleet) as tx:
            mine = FLEETS.c.fleet == fleet
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            tried, life = now.life.canary, replace(now.life, canary={})
            values: dict[str, Any] = {}
            if back is not None:
                old = {name: tried[name] for name in ("model_digest", "server")}
                life = replace(life, began=now.round, **old)
                stays = now.status if now.status in ("paused", "aborted") else "running"
                status = "done" if now.round >= back.rounds else stays
                values = {"run": back.to_json(), "status": status, **old}
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json(), **values))
            kind = "canary-passed" if back is None else "canary-called-off"
            facts = {"members": tried["members"], "identity": tried["identity"], "round": now.round, **facts}
            model = now.model_digest if back is None else tried["model_digest"]
            append(tx, kind, {**facts, "model_digest": model}, fleet=fleet)

    def set_roster(self, fleet: str, roster: Sequence[str]) -> None:
        """Fix the devices that cohorts are drawn from; logged."""
        with self._writing(fleet) as tx:
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(roster=json.dumps(sorted(roster))))
            append(tx, "roster-fixed", {"roster": sorted(roster)}, fleet=fleet)

    # -- attempts

    def open_attempt(self, fleet: str, round: int, cohort: Sequence[str], base_digest: str) -> Attempt:
        """A new try at round ``round``, under the next number."""
        with self._writing(fleet) as tx:
            number = tx.execute(select(FLEETS.c.tried).where(FLEETS.c.fleet == fleet)).scalar_one() + 1
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(tried=number))
            names = json.dumps(sorted(cohort))
            tx.execute(
                insert(ATTEMPTS).values(
                    fleet=fleet, attempt=number, round=round, cohort=names, base_digest=base_digest, opened=time.time()
                )
            )
            asked = {"devices": len(cohort), "sha256": hashlib.sha256(names.encode()).hexdigest()}
            append(
                tx,
                "round-opened",
                {"round": round, "cohort": asked, "base_digest": base_digest},
                fleet=fleet,
                attempt=number,
            )
            return attempt_of(tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one())

    def fail_attempt(self, fleet: str, number: int, reason: str) -> None:
        """Close a round whose updates count nowhere; a closed one stays as it is."""
        with self._writing(fleet) as tx:
            open_ = of_attempt(ATTEMPTS, fleet, number) & ATTEMPTS.c.closed.is_(None)
            done = tx.execute(update(ATTEMPTS).where(open_).values(closed=time.time(), failure=storable(reason)))
            if done.rowcount:
                append(tx, "round-failed", {"reason": reason}, fleet=fleet, attempt=number)
                # The audit log has them all; their cohorts would fill the disk of a fleet that declines.
                old = (ATTEMPTS.c.fleet == fleet) & (ATTEMPTS.c.attempt <= number - FAILED_KEPT)
                came = select(UPDATES.c.attempt).where(UPDATES.c.fleet == fleet)
                spent = (
                    ATTEMPTS.c.failure.is_not(None)
                    & ATTEMPTS.c.model_digest.is_(None)
                    & ATTEMPTS.c.attempt.not_in(came)
                )
                tx.execute(delete(ATTEMPTS).where(old & spent))

    def attempts(self, fleet: str, *, last: int | None = None) -> list[Attempt]:
        """All attempts, or the ``last`` ones, in order."""
        with self.reading() as tx:
            asked = select(ATTEMPTS).where(ATTEMPTS.c.fleet == fleet).order_by(ATTEMPTS.c.attempt.desc()).limit(last)
            return [attempt_of(row) for row in reversed(tx.execute(asked).all())]

    def open_attempts(self, fleet: str, others: Iterable[int] = ()) -> list[Attempt]:
        """The attempts that are not closed, and those of these numbers, in order."""
        with self.reading() as tx:
            wanted = (ATTEMPTS.c.fleet == fleet) & (
                ATTEMPTS.c.closed.is_(None) | ATTEMPTS.c.attempt.in_(sorted(others))
            )
            return [attempt_of(row) for row in tx.execute(select(ATTEMPTS).where(wanted).order_by(ATTEMPTS.c.attempt))]

    def counted_rounds(self, fleet: str) -> dict[str, int]:
        """By device, the newest round that it made an update for which counted."""
        with self.reading() as tx:
            both = (ATTEMPTS.c.fleet == UPDATES.c.fleet) & (ATTEMPTS.c.attempt == UPDATES.c.attempt)
            mine = (UPDATES.c.fleet == fleet) & (UPDATES.c.status == "counted")
            newest = select(UPDATES.c.device, func.max(ATTEMPTS.c.round)).join_from(UPDATES, ATTEMPTS, both)
            return {row[0]: row[1] for row in tx.execute(newest.where(mine).group_by(UPDATES.c.device))}

    def attempt_numbered(self, fleet: str, number: int) -> Attempt | None:
        """The attempt of this number, or None where there is none."""
        with self.reading() as tx:
            row = tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one_or_none()
            return None if row is None else attempt_of(row)

    def begun(self, fleet: str, number: int) -> tuple[int, str] | None:
        """The round that this attempt is at, and the digest of the global model that it began from, or None where there
        is none. Both never change: the last ones asked for are kept."""
        found = self._begun.get((fleet, number))
        if found is None:
            row = self.attempt_numbered(fleet, number)
            if row is None:
                return None
            if len(self._begun) >= BEGUN_KEPT:
                self._begun = {}
            found = self._begun[fleet, number] = row.round, row.base_digest
        return found

    def leave_out(self, fleet: str, attempt: int, device: str, reason: str) -> None:
        """An update that was stored will not count after all; one that is not stored stays as it is."""
        with self._writing(fleet) as tx:
            entry = _key(fleet, attempt, device) & (UPDATES.c.status == "stored")
            values = {"status": "rejected", "reason": storable(reason), "changed": time.time()}
            if tx.execute(update(UPDATES).where(entry).values(**values)).rowcount:
                append(tx, "update-left-out", {"reason": reason}, fleet=fleet, attempt=attempt, device=device)

    def commit_attempt(
        self,
        fleet: str,
        number: int,
        *,
        epoch: int,
        counted: Sequence[tuple[int, str]],
        model_digest: str,
        server: str,
        last: bool,
        spent: Spent | None = None,
        down: int | None = None,
        dense: int | None = None,
        means: Mapping[str, float] | None = None,
    ) -> None:
        """Commit the new global model and the exact set of updates in it, as (round, device), at once, and what privacy
        has cost with it; ``down`` are the bytes of models that went to devices since the round before, ``dense`` those
        of a whole one that travels as it is; ``means`` are those of what devices told within a sum. What is committed
        already just so, stays: a database may fall silent after it did what it was asked.

        Raises :class:`~talaria.errors.StateError` where another coordinator has taken the fleet over, the round
        is closed already, or an update is not stored.
        """
        pairs = sorted(counted)
        with self._writing(fleet) as tx:
            mine = of_attempt(ATTEMPTS, fleet, number)
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one()
            round = tx.execute(select(ATTEMPTS.c.round).where(mine & ATTEMPTS.c.closed.is_(None))).scalar_one_or_none()
            _require_epoch(fleet, row.epoch, epoch)
            listed = json.dumps(pairs)
            same = mine & (ATTEMPTS.c.model_digest == model_digest) & (ATTEMPTS.c.counted == listed)
            if tx.execute(select(ATTEMPTS.c.attempt).where(same)).one_or_none() is not None:
                return
            if round != row.round + 1:
                raise StateError(f"fleet {fleet!r}: attempt {number} cannot be committed; it is not the open one")
            now = time.time()
            for made, device in pairs:
                entry = _key(fleet, made, device) & (UPDATES.c.status == "stored")
                if tx.execute(update(UPDATES).where(entry).values(status="counted", changed=now)).rowcount != 1:
                    raise StateError(
                        f"fleet {fleet!r}: attempt {number} cannot count {device!r} (its update of attempt {made} is "
                        "stored, or counted already)"
                    )
            digest = hashlib.sha256(listed.encode()).hexdigest()
            values = {
                "closed": now,
                "model_digest": model_digest,
                "server": server,
                "counted": listed,
                "counted_sha256": digest,
                "down": down,
                "dense": dense,
                "means": json.dumps(dict(means)) if means else None,
            }
            tx.execute(update(ATTEMPTS).where(mine).values(**values))
            status = "done" if last else row.status
            paid = {} if spent is None else {"privacy": spent.to_json()}
            tx.execute(
                update(FLEETS)
                .where(FLEETS.c.fleet == fleet)
                .values(round=round, model_digest=model_digest, server=server, status=status, **paid)
            )
            append(
                tx,
                "round-closed",
                {"round": round, "counted": pairs, "model_digest": model_digest},
                fleet=fleet,
                attempt=number,
            )

    def machine(self, fleet: str) -> bytes | None:
        """The protocol machine as it was saved last, or None."""
        with self.reading() as tx:
            where = MACHINES.c.fleet == fleet
            return tx.execute(select(MACHINES.c.state).where(where)).scalar_one_or_none()

    def save_machine(self, fleet: str, epoch: int, state: bytes) -> None:
        """Keep the protocol machine; refused (StateError) once another coordinator has the fleet."""
        with self._writing(fleet) as tx:
            now = tx.execute(select(FLEETS.c.epoch).where(FLEETS.c.fleet == fleet)).scalar_one()
            _require_epoch(fleet, now, epoch)
            where = MACHINES.c.fleet == fleet
            if tx.execute(update(MACHINES).where(where).values(state=state)).rowcount == 0:
                tx.execute(insert(MACHINES).values(fleet=fleet, state=state))

    # -- devices

    def see(self, fleet: str, device: str, boot: int, profile: dict[str, Any], online: bool = True) -> Device:
        """Record a birth (or, with ``online=False``, a death) of a device, as the protocol's machine says it: it knows
        late ones, and that a device enrolled anew counts its boots from one again."""
        with self._writing(fleet) as tx:
            where = (DEVICES.c.fleet == fleet) & (DEVICES.c.device == device)
            row = tx.execute(select(DEVICES).where(where)).one_or_none()
            now = time.time()
            if row is None:
                tx.execute(
                    insert(DEVICES).values(
                        fleet=fleet, device=device, boot=boot, online=int(online), profile=json.dumps(profile),
                        joined=now, seen=now,
                    )
                )  # fmt: skip
                append(tx, "device-joined", {"boot": boot}, fleet=fleet, device=device)
            else:
                old = json.loads(row.profile)
                gate = {"gate": old["gate"]} if "gate" in old else {}  # said once, also by who boots again after it
                kept = json.dumps({**gate, **profile}) if profile else row.profile
                tx.execute(update(DEVICES).where(where).values(boot=boot, online=int(online), profile=kept, seen=now))
            return device_of(tx.execute(select(DEVICES).where(where)).one())

    def quarantine(self, fleet: str, device: str, reason: str | None) -> None:
        """Keep a device out of further rounds for ``reason``, or (None) let it in again. One that never announced
        itself is entered, so that it can be seen among those that are out."""
        with self._writing(fleet) as tx:
            where = (DEVICES.c.fleet == fleet) & (DEVICES.c.device == device)
            kept, now = None if reason is None else storable(reason), time.time()
            changed = tx.execute(update(DEVICES).where(where).values(quarantine=kept))
            if kept is not None and not changed.rowcount:
                row = {"boot": 0, "online": 0, "profile": "{}", "joined": now, "seen": now, "quarantine": kept}
                tx.execute(insert(DEVICES).values(fleet=fleet, device=device, **row))
            append(tx, "quarantined" if reason else "released", {"reason": reason}, fleet=fleet, device=device)

    def retire(self, fleet: str, device: str, for_good: bool, reason: str = "", by: LeftBy = "operator") -> None:
        """A device leaves the roster for good, ``by`` whose hand, or (``for_good`` false) is a member again; logged,
        with the reason."""
        with self._writing(fleet) as tx:
            where = (DEVICES.c.fleet == fleet) & (DEVICES.c.device == device)
            now = fleet_of(tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one())
            left = {"retired": time.time(), "left_by": by} if for_good else {"retired": None, "left_by": None}
            tx.execute(update(DEVICES).where(where).values(**left))
            if now.roster:
                roster = sorted({*now.roster} - {device} if for_good else {*now.roster, device})
                tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(roster=json.dumps(roster)))
            kind = "device-retired" if for_good else "device-readmitted"
            append(tx, kind, ({"by": by} if for_good else {}) | _why(reason), fleet=fleet, device=device)

    def devices(self, fleet: str) -> list[Device]:
        """All devices by name."""
        with self.reading() as tx:
            rows = tx.execute(select(DEVICES).where(DEVICES.c.fleet == fleet))
            return sorted((device_of(row) for row in rows), key=lambda device: device.device)

    # -- updates

    def keep_update(
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

    def reject_update(
        self, fleet: str, attempt: int, device: str, *, digest: str, size: int, base_version: int, reason: str
    ) -> Received:
        """Enter an update that will never count, and why."""
        values = {
            "digest": digest,
            "size": size,
            "base_version": base_version,
            "status": "rejected",
            "reason": storable(reason),
        }
        return self._enter(_Entry(fleet, attempt, device, values))

    def _enter(self, entry: _Entry) -> Received:
        """Enter one update, together with those that other threads brought while the last transaction was written: one
        transaction, and one wait for the disk, for all of them. It returns once the entry is durable."""
        self._brought.append(entry)
        with self._line:
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
        with self._transaction(batch[0].fleet) as tx:
            rows = _entered(tx, batch[0].fleet, batch)
            said: dict[int, list[tuple[int, str, bytes]]] = {}
            for one in batch:
                digest = one.values["digest"]
                if one.step is not None and rows[one.attempt, one.device].digest == digest:
                    said.setdefault(one.attempt, []).append((one.step, one.device, bytes.fromhex(digest)))
            for attempt, each in said.items():
                _keep_words(tx, batch[0].fleet, attempt, each)
        for one in batch:
            one.row = rows[one.attempt, one.device]

    def equivocation(self, fleet: str, attempt: int, device: str, first: str, second: str) -> None:
        """Record that a device offered a second, different update of a round."""
        with self._writing(fleet) as tx:
            key = {"fleet": fleet, "attempt": attempt, "device": device, "digest": second}
            same = [EQUIVOCATIONS.c[name] == value for name, value in key.items()]
            if tx.execute(select(EQUIVOCATIONS).where(*same)).one_or_none() is None:
                tx.execute(insert(EQUIVOCATIONS).values(seen=time.time(), **key))
                append(
                    tx, "equivocation", {"first": first, "second": second}, fleet=fleet, attempt=attempt, device=device
                )

    def updates(self, fleet: str, attempt: int) -> list[Received]:
        """All updates of a round, by device."""
        with self.reading() as tx:
            rows = tx.execute(select(UPDATES).where(of_attempt(UPDATES, fleet, attempt)))
            return sorted((received_of(row) for row in rows), key=lambda update: update.device)

    def clients(self, fleet: str, attempt: int) -> int:
        """How many devices are in the updates of a round that count, a gateway's site in full."""
        same = (FINDINGS.c.attempt == UPDATES.c.attempt) & (FINDINGS.c.device == UPDATES.c.device)
        both = (FINDINGS.c.fleet == UPDATES.c.fleet) & same
        counted = of_attempt(UPDATES, fleet, attempt) & (UPDATES.c.status == "counted")
        with self.reading() as tx:
            found = tx.execute(select(FINDINGS.c.found).join_from(UPDATES, FINDINGS, both).where(counted)).scalars()
            return sum(read(text).clients for text in found)

    def equivocations(self, fleet: str) -> list[tuple[int, str, str]]:
        """All second, different updates as (round, device, digest)."""
        with self.reading() as tx:
            rows = tx.execute(select(EQUIVOCATIONS).where(EQUIVOCATIONS.c.fleet == fleet))
            return sorted((row.attempt, row.device, row.digest) for row in rows)

    # -- what is said in a secure round

    def keep_words(self, fleet: str, attempt: int, said: Sequence[tuple[int, str, bytes]]) -> None:
        """Keep what was said (step, device and word) in this order, after all that was said before it. The first of an
        attempt puts those of others away."""
        with self._writing(fleet) as tx:
            _keep_words(tx, fleet, attempt, said)

    def words(self, fleet: str, attempt: int) -> list[tuple[int, str, bytes]]:
        """What was said in this attempt, in order: step, device and word."""
        with self.reading() as tx:
            rows = tx.execute(select(WORDS).where(of_attempt(WORDS, fleet, attempt)).order_by(WORDS.c.seq))
            return [(row.step, row.device, row.data) for row in rows]

    # -- blobs in use and the audit log

    def blobs_in_use(self) -> set[str]:
        """Digests that must be kept: every global model and server state of a round, and updates not yet folded."""
        with self.reading() as tx:
            return in_use(tx)

    def log(self, fleet: str, kind: str, attempt: int | None = None, device: str | None = None, **detail: Any) -> None:
        """Append to the audit log."""
        with self._writing(fleet) as tx:
            append(tx, kind, detail, fleet=fleet, attempt=attempt, device=device)

    def events(self, fleet: str, last: int = 100, kinds: Collection[str] = ()) -> list[dict[str, Any]]:
        """The last events of a fleet, oldest first; of these ``kinds`` alone, where some are named."""
        mine = EVENTS.c.fleet == fleet
        if kinds:
            mine &= EVENTS.c.kind.in_(sorted(kinds))
        with self.reading() as tx:
            rows = tx.execute(select(EVENTS).where(mine).order_by(EVENTS.c.seq.desc()).limit(last)).all()
            return [
                {
                    "seq": r.seq,
                    "at": r.at,
                    "attempt": r.attempt,
                    "device": r.device,
                    "kind": r.kind,
                    **json.loads(r.detail),
                }
                for r in reversed(rows)
            ]

    def verify_log(self) -> int:
        """Walk the whole hash chain; the number of events. Raises StateError at the first that was altered."""
        with self.reading() as tx:
            return verify(tx)


def _why(reason: str) -> dict[str, str]:
    return {"reason": storable(reason)} if reason else {}


def _recent(given: tuple[str, ...]) -> tuple[str, ...]:
    """As many identities, newest first, as are kept; the first run's, which fleet.toml may name for ever, with them."""
    return given if len(given) <= GIVEN_KEPT else (*given[: GIVEN_KEPT - 1], given[-1])


@contextmanager
def answering(engine: Engine) -> Iterator[None]:
    """What the database of ``engine`` refuses becomes :class:`~talaria.errors.StateError`, which says where it lies."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        far = isinstance(error, OperationalError) and not isinstance(error.orig, sqlite3.Error)
        raise (SilentError if far else StateError)(
            f"store {place(engine)}: the database refused ({cause}); {_mend(cause)}. Nothing of this step was "
            "written; all earlier state is intact"
        ) from error


def _mend(cause: str) -> str:
    """What helps against a refusal, as far as the database's own words tell."""
    for words, mend in (
        (("full", "no space", "disk i/o"), "free space there, and start again"),
        (("readonly", "read-only", "unable to open"), "let this user write its folder, and start again"),
        (("locked", "lock timeout"), "another program holds it: look which one, and start again"),
        (("malformed", "not a database"), "run `talaria coordinator fsck`, or restore a backup"),
        (("connect", "no answer", "server", "terminat"), "start its server or mend the way to it, and start again"),
    ):
        if any(word in cause.lower() for word in words):
            return mend
    return "mend what its words say, and start again"


def epoch_after(last: int) -> int:
    """The epoch of a start now: milliseconds since 1970, and in any case above ``last``. A store that was lost or
    taken back to an older state so goes on above all that devices have heard."""
    return max(last + 1, int(time.time() * 1000))


def require_same_run(fleet: Fleet, run: str) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where the stored fleet learns another run."""
    if fleet.run != run:
        difference = _difference(fleet.run, run)
        more = json.loads(run)["rounds"] - json.loads(fleet.run)["rounds"]
        mend = (
            "take the old values back; or begin it from the last model by `talaria coordinator next FLEET.TOML`, once "
            "this run is done or paused; or give the new run another name or state folder"
        )
        if difference.startswith("rounds:") and ";" not in difference and more > 0:
            mend = (
                f"take the old value back, and let it go on by `talaria coordinator extend FLEET.TOML --rounds {more}`"
            )
        raise ConfigError(
            f"fleet {fleet.name!r}: its stored run differs from this configuration ({difference}); {mend}"
        )


def _keep_words(tx: Connection, fleet: str, attempt: int, said: Sequence[tuple[int, str, bytes]]) -> None:
    mine = of_attempt(WORDS, fleet, attempt)
    names = {device for _, device, _ in said if device}
    known = set[tuple[int, str]]()
    if names:
        found = tx.execute(select(WORDS.c.step, WORDS.c.device).where(mine, WORDS.c.device.in_(names)))
        known = {(row.step, row.device) for row in found}
    last = tx.execute(select(func.max(WORDS.c.seq)).where(mine)).scalar_one()
    if last is None:
        tx.execute(delete(WORDS).where((WORDS.c.fleet == fleet) & (WORDS.c.attempt != attempt)))
    rows: list[dict[str, Any]] = []
    for step, device, data in said:
        if (step, device) in known:
            continue
        if device:
            known.add((step, device))
        seq = (-1 if last is None else last) + 1 + len(rows)
        rows.append({"fleet": fleet, "attempt": attempt, "seq": seq, "step": step, "device": device, "data": data})
    if rows:
        tx.execute(insert(WORDS), rows)


def _require_epoch(fleet: str, now: int | None, ours: int) -> None:
    if now != ours:
        raise StateError(f"fleet {fleet!r}: another coordinator has it (epoch {now}, ours {ours}); stop one")


def _difference(stored: str, given: str) -> str:
    old, new = _fields(json.loads(stored)), _fields(json.loads(given))
    odd = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
    return "; ".join(f"{k}: stored {json.dumps(old.get(k))}, given {json.dumps(new.get(k))}" for k in odd)


def _fields(run: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run, those of its tables by dotted names."""
    tables = {key: value for key, value in run.items() if isinstance(value, dict)}
    plain = {key: value for key, value in run.items() if key not in tables}
    return plain | {f"{key}.{name}": value for key, table in tables.items() for name, value in table.items()}


def _entered(tx: Connection, fleet: str, batch: Sequence[_Entry]) -> dict[tuple[int, str], Received]:
    """The rows of these updates by (attempt, device); those that are new are entered, the first of each stays."""
    rows: dict[tuple[int, str], Received] = {}
    for attempt in {entry.attempt for entry in batch}:
        names = [entry.device for entry in batch if entry.attempt == attempt]
        for row in tx.execute(select(UPDATES).where(of_attempt(UPDATES, fleet, attempt), UPDATES.c.device.in_(names))):
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
        tx.execute(insert(UPDATES), values)
        found = [{**key, "found": one.found} for key, one in zip(keys, new, strict=True) if one.found is not None]
        if found:
            tx.execute(insert(FINDINGS), found)
        append_all(tx, fleet, [_told(entry) for entry in new])
    return rows


def _told(entry: _Entry) -> Told:
    detail = {"digest": entry.values["digest"], "reason": entry.values["reason"]}
    return Told(f"update-{entry.values['status']}", detail, entry.attempt, entry.device)


def _key(fleet: str, attempt: int, device: str) -> Any:
    return of_attempt(UPDATES, fleet, attempt) & (UPDATES.c.device == device)
