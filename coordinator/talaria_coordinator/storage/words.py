"""What was said in secure rounds, in order, as the record keeps it: those of a fleet's last such attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from talaria_coordinator.storage.database import Database
from talaria_coordinator.storage.tables import WORDS, of_attempt


@dataclass(frozen=True)
class Words:
    """See the module."""

    _database: Database

    def keep(self, fleet: str, attempt: int, said: Sequence[tuple[int, str, bytes]]) -> None:
        """Keep what was said (step, device and word) in this order, after all that was said before it. The first of an
        attempt puts those of others away."""
        with self._database.writing(fleet) as tx:
            keep_words(tx, fleet, attempt, said)

    def of(self, fleet: str, attempt: int) -> list[tuple[int, str, bytes]]:
        """What was said in this attempt, in order: step, device and word."""
        with self._database.reading() as tx:
            rows = tx.execute(select(WORDS).where(of_attempt(WORDS, fleet, attempt)).order_by(WORDS.c.seq))
            return [(row.step, row.device, row.data) for row in rows]


def keep_words(tx: Connection, fleet: str, attempt: int, said: Sequence[tuple[int, str, bytes]]) -> None:
    """As :meth:`Words.keep`, in the transaction of what goes with it."""
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
