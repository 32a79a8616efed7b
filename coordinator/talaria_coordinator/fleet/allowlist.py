""":class:`Members`: the devices that may speak, read again whenever an operator changed the list."""

from __future__ import annotations

from talaria.errors import ConfigError
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, Rules
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.identity.expiry import Ending
from talaria_coordinator.identity.membership import Membership, load_signer

REVOKED = "revoked by the operator"


class Members:
    """The members of a fleet with keys; of one without, everybody, unsigned."""

    def __init__(self, config: FleetConfig) -> None:
        self._fleet, self._folder = config.name, config.identity
        self._apart = "://" not in config.broker  # our own broker has the rights of mosquitto.acl
        self.signer = None if self._folder is None else load_signer(self._folder)
        self._seen, self._roll = (0, 0), Membership(config.name, "", ())
        self.renewed: set[str] = set()
        """Members that got new keys: what links they have by the old ones are to be cut."""
        self.refresh()

    def half(self, rules: Rules, spec: bytes) -> CoordinatorMachine:
        """The coordinator's machine, which accepts messages of members only and signs its own."""
        keys = self._folder is not None
        return CoordinatorMachine(self._fleet, rules, spec, self.signer, self.key, enrolled=keys, apart=self._apart)

    def key(self, device: str) -> bytes | None:
        """The public key of a member, or None for anybody else."""
        member = self._roll.members.get(device)
        return None if member is None or member.revoked is not None else member.key

    def refresh(self) -> bool:
        """Look at the list; True where it has changed since the last look. Raises :class:`ConfigError` where it is
        damaged, once; the list read before stays in force."""
        if self._folder is None:
            return False
        try:
            found = (self._folder / "members.json").stat()
            stamp = (found.st_mtime_ns, found.st_ino)
        except OSError:
            stamp = (-1, -1)
        if stamp == self._seen:
            return False
        self._seen = stamp
        roll = Membership.load(self._folder)
        if roll.fleet != self._fleet:
            raise ConfigError(
                f"identity: {self._folder} is of fleet {roll.fleet!r}, not {self._fleet!r}; give the right folder"
            )
        before, self._roll = self._roll, roll
        self.renewed |= {
            name
            for name, member in roll.members.items()
            if name in before.members and before.members[name].serial != member.serial
        }
        return True

    def ending(self, now: float) -> list[str]:
        """The certificates of the fleet and its members that end within 30 days, or have ended."""
        if self._folder is None:
            return []
        return Ending.of(self._folder, self._roll).warnings(now)

    def changes(self, now: float, out: dict[str, str]) -> list[e.Revoke | e.Release]:
        """What to tell the machine, where ``out`` are the devices that it has shut out, and why."""
        revoked = {name for name, member in self._roll.members.items() if member.revoked is not None}
        back = sorted(name for name, why in out.items() if why == REVOKED and name not in revoked)
        return [
            *(e.Revoke(now, name, REVOKED) for name in sorted(revoked - set(out))),
            *(e.Release(now, n) for n in back),
        ]
