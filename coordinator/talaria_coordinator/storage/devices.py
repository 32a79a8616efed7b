"""Devices in the record: seen, kept out of rounds, and gone for good."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from talaria import time
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.database import Database
from talaria_coordinator.storage.records import Device, LeftBy, device_of, fleet_of, storable, why
from talaria_coordinator.storage.tables import DEVICES, FLEETS


@dataclass(frozen=True)
class Sight:
    """The birth of a device, or (not ``online``) its death; ``profile`` is what it says of itself, empty where it says
    nothing."""

    device: str
    boot: int
    profile: dict[str, Any]
    online: bool = True


@dataclass(frozen=True)
class Devices:
    """See the module."""

    _database: Database

    def see(self, fleet: str, *sights: Sight) -> None:
        """Record births and deaths of devices, all of them or none, as the protocol's machine says them: it knows late
        ones, and that a device enrolled anew counts its boots from one again."""
        if not sights:
            return
        with self._database.writing(fleet) as tx:
            for sight in sights:
                _enter(tx, fleet, sight)

    def quarantine(self, fleet: str, device: str, reason: str | None) -> None:
        """Keep a device out of further rounds for ``reason``, or (None) let it in again. One that never announced
        itself is entered, so that it can be seen among those that are out."""
        with self._database.writing(fleet) as tx:
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
        with self._database.writing(fleet) as tx:
            where = (DEVICES.c.fleet == fleet) & (DEVICES.c.device == device)
            now = fleet_of(tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one())
            left = {"retired": time.time(), "left_by": by} if for_good else {"retired": None, "left_by": None}
            tx.execute(update(DEVICES).where(where).values(**left))
            if now.roster:
                roster = sorted({*now.roster} - {device} if for_good else {*now.roster, device})
                tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(roster=json.dumps(roster)))
            kind = "device-retired" if for_good else "device-readmitted"
            append(tx, kind, ({"by": by} if for_good else {}) | why(reason), fleet=fleet, device=device)

    def of(self, fleet: str) -> list[Device]:
        """All devices by name."""
        with self._database.reading() as tx:
            rows = tx.execute(select(DEVICES).where(DEVICES.c.fleet == fleet))
            return sorted((device_of(row) for row in rows), key=lambda device: device.device)

    def naming(self, fleet: str, text: str) -> list[Device]:
        """Those whose profile holds ``text``."""
        with self._database.reading() as tx:
            mine = (DEVICES.c.fleet == fleet) & DEVICES.c.profile.contains(text, autoescape=True)
            return [device_of(row) for row in tx.execute(select(DEVICES).where(mine))]

    def retired(self, fleet: str) -> set[str]:
        """The names of those that left for good."""
        with self._database.reading() as tx:
            mine = (DEVICES.c.fleet == fleet) & DEVICES.c.retired.is_not(None)
            return set(tx.execute(select(DEVICES.c.device).where(mine)).scalars())

    def able(self, fleet: str) -> int:
        """How many may take part: those that have come, and neither left for good nor are shut out."""
        mine = (DEVICES.c.fleet == fleet) & DEVICES.c.quarantine.is_(None) & DEVICES.c.retired.is_(None)
        with self._database.reading() as tx:
            return tx.execute(select(func.count()).select_from(DEVICES).where(mine)).scalar_one()


def _enter(tx: Connection, fleet: str, sight: Sight) -> None:
    where = (DEVICES.c.fleet == fleet) & (DEVICES.c.device == sight.device)
    row = tx.execute(select(DEVICES.c.profile).where(where)).one_or_none()
    seen: dict[str, Any] = {"boot": sight.boot, "online": int(sight.online), "seen": (now := time.time())}
    if row is None:
        new = {"profile": json.dumps(sight.profile), "joined": now}
        tx.execute(insert(DEVICES).values(fleet=fleet, device=sight.device, **new, **seen))
        append(tx, "device-joined", {"boot": sight.boot}, fleet=fleet, device=sight.device)
        return
    if sight.profile:
        old = json.loads(row.profile)
        gate = {"gate": old["gate"]} if "gate" in old else {}  # said once, also by who boots again after it
        seen["profile"] = json.dumps({**gate, **sight.profile})
    tx.execute(update(DEVICES).where(where).values(**seen))
