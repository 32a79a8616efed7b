"""When the certificates of a fleet end: the authority's, the broker's, the coordinator's with its ingest workers', and
each member's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from talaria.wire.validity import DAY, Validity, validity_of, warnings
from talaria_coordinator.identity.ca import LEAF_DAYS
from talaria_coordinator.identity.membership import Membership, workers_in

OWN = ("ca.crt", "coordinator.crt", "broker/server.crt")


@dataclass(frozen=True)
class Ending:
    """``own`` are the fleet's certificates, ``members`` those of devices that were not revoked, by name."""

    own: tuple[Validity, ...] = ()
    members: tuple[Validity, ...] = ()

    @classmethod
    def of(cls, folder: Path, roll: Membership) -> Ending:
        """As the files and the list of members have it."""
        names = (*OWN, *(f"ingest-{number}.crt" for number in workers_in(folder)))
        own = tuple(found for name in names for found in validity_of(folder / name))
        members = tuple(
            Validity(f"the certificate of {name!r}", member.since, member.since + LEAF_DAYS * DAY)
            for name, member in sorted(roll.members.items())
            if member.revoked is None
        )
        return cls(own, members)

    @property
    def first(self) -> Validity | None:
        """The one that ends first."""
        return min((*self.own, *self.members), key=lambda one: one.ends, default=None)

    def warnings(self, now: float) -> list[str]:
        """What ends within 30 days, or has ended."""
        return warnings((*self.own, *self.members), now)
