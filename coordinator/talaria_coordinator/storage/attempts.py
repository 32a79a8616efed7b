"""Attempts at rounds: opened under the next number, and closed by failure or by the commit of a new global model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import delete, insert, select, update

from talaria import time
from talaria.errors import StateError
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.database import Database, require_epoch
from talaria_coordinator.storage.records import Attempt, Spent, attempt_of, storable
from talaria_coordinator.storage.tables import ATTEMPTS, FLEETS, UPDATES, of_attempt
from talaria_coordinator.storage.updates import mark_counted

FAILED_KEPT = 100
"""So many rounds back, those that failed and got no update are kept with their cohorts."""
BEGUN_KEPT = 64


@dataclass(frozen=True)
class Attempts:
    """See the module."""

    _database: Database
    _begun: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)

    def open(self, fleet: str, round: int, cohort: Sequence[str], base_digest: str) -> Attempt:
        """A new try at round ``round``, under the next number."""
        with self._database.writing(fleet) as tx:
            number = tx.execute(select(FLEETS.c.tried).where(FLEETS.c.fleet == fleet)).scalar_one() + 1
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(tried=number))
            names = json.dumps(sorted(cohort))
            values = {"round": round, "cohort": names, "base_digest": base_digest, "opened": time.time()}
            tx.execute(insert(ATTEMPTS).values(fleet=fleet, attempt=number, **values))
            asked = {"devices": len(cohort), "sha256": hashlib.sha256(names.encode()).hexdigest()}
            detail = {"round": round, "cohort": asked, "base_digest": base_digest}
            append(tx, "round-opened", detail, fleet=fleet, attempt=number)
            return attempt_of(tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one())

    def fail(self, fleet: str, number: int, reason: str, remembered: Iterable[int] = ()) -> None:
        """Close a round whose updates count nowhere; a closed one stays as it is. Updates of those ``remembered`` may
        still come, whenever they were opened."""
        with self._database.writing(fleet) as tx:
            open_ = of_attempt(ATTEMPTS, fleet, number) & ATTEMPTS.c.closed.is_(None)
            done = tx.execute(update(ATTEMPTS).where(open_).values(closed=time.time(), failure=storable(reason)))
            if done.rowcount:
                append(tx, "round-failed", {"reason": reason}, fleet=fleet, attempt=number)
                # The audit log has them all; their cohorts would fill the disk of a fleet that declines.
                old = (ATTEMPTS.c.fleet == fleet) & (ATTEMPTS.c.attempt <= number - FAILED_KEPT)
                came = select(UPDATES.c.attempt).where(UPDATES.c.fleet == fleet)
                spent = ATTEMPTS.c.failure.is_not(None) & ATTEMPTS.c.model_digest.is_(None)
                gone = ATTEMPTS.c.attempt.not_in(came) & ATTEMPTS.c.attempt.not_in(sorted(remembered))
                tx.execute(delete(ATTEMPTS).where(old & spent & gone))

    def commit(
        self,
        fleet: str,
        number: int,
        *,
        epoch: int,
        counted: Sequence[tuple[int, str]],
        model_digest: str,
        server: str,
        spent: Spent | None = None,
        down: int | None = None,
        dense: int | None = None,
        means: Mapping[str, float] | None = None,
    ) -> None:
        """Commit the new global model and the exact set of updates in it, as (round, device), at once, and what privacy
        has cost with it; ``down`` are the bytes of models that went to devices since the round before, ``dense`` those
        of a whole one that travels as it is; ``means`` are those of what devices told within a sum. What is committed
        already just so, stays: a database may fall silent after it did what it was asked. The fleet is done with the
        last round of its run as that is now: it may have been extended while this was folded.

        Raises :class:`~talaria.errors.StateError` where another coordinator has taken the fleet over, the round
        is closed already, or an update is not stored.
        """
        pairs = sorted(counted)
        with self._database.writing(fleet) as tx:
            mine = of_attempt(ATTEMPTS, fleet, number)
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one()
            round = tx.execute(select(ATTEMPTS.c.round).where(mine & ATTEMPTS.c.closed.is_(None))).scalar_one_or_none()
            require_epoch(fleet, row.epoch, epoch)
            listed = json.dumps(pairs)
            same = mine & (ATTEMPTS.c.model_digest == model_digest) & (ATTEMPTS.c.counted == listed)
            if tx.execute(select(ATTEMPTS.c.attempt).where(same)).one_or_none() is not None:
                return
            if round != row.round + 1:
                raise StateError(f"fleet {fleet!r}: attempt {number} cannot be committed; it is not the open one")
            now = time.time()
            mark_counted(tx, fleet, number, pairs, now)
            model = {"model_digest": model_digest, "server": server}
            digest = hashlib.sha256(listed.encode()).hexdigest()
            values = {"closed": now, **model, "counted": listed, "counted_sha256": digest, "down": down, "dense": dense}
            told = json.dumps(dict(means)) if means else None
            last = round >= json.loads(row.run)["rounds"]
            tx.execute(update(ATTEMPTS).where(mine).values(**values, means=told))
            values = {"round": round, **model, "status": "done" if last else row.status}
            paid = {} if spent is None else {"privacy": spent.to_json()}
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(**values, **paid))
            detail = {"round": round, "counted": pairs, "model_digest": model_digest}
            append(tx, "round-closed", detail, fleet=fleet, attempt=number)

    def of(self, fleet: str, *, last: int | None = None) -> list[Attempt]:
        """All attempts, or the ``last`` ones, in order."""
        with self._database.reading() as tx:
            asked = select(ATTEMPTS).where(ATTEMPTS.c.fleet == fleet).order_by(ATTEMPTS.c.attempt.desc()).limit(last)
            return [attempt_of(row) for row in reversed(tx.execute(asked).all())]

    def unclosed(self, fleet: str, others: Iterable[int] = ()) -> list[Attempt]:
        """The attempts that are not closed, and those of these numbers, in order."""
        with self._database.reading() as tx:
            wanted = ATTEMPTS.c.closed.is_(None) | ATTEMPTS.c.attempt.in_(sorted(others))
            asked = select(ATTEMPTS).where((ATTEMPTS.c.fleet == fleet) & wanted).order_by(ATTEMPTS.c.attempt)
            return [attempt_of(row) for row in tx.execute(asked)]

    def get(self, fleet: str, number: int) -> Attempt | None:
        """The attempt of this number, or None where there is none."""
        with self._database.reading() as tx:
            row = tx.execute(select(ATTEMPTS).where(of_attempt(ATTEMPTS, fleet, number))).one_or_none()
            return None if row is None else attempt_of(row)

    def begun(self, fleet: str, number: int) -> tuple[int, str] | None:
        """The round that this attempt is at, and the digest of the global model that it began from, or None where there
        is none. Both never change: the last ones asked for are kept."""
        found = self._begun.get((fleet, number))
        if found is None:
            row = self.get(fleet, number)
            if row is None:
                return None
            if len(self._begun) >= BEGUN_KEPT:
                self._begun.clear()
            found = self._begun[fleet, number] = row.round, row.base_digest
        return found
