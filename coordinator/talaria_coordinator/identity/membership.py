"""Who belongs to a fleet: its folder of keys, one-time codes, members and revocations.

ca.crt, ca.key             the authority; the key is needed to enrol and revoke, not to serve
sign.key                   the coordinator's Ed25519 key
ingest-N.crt, .key         the link of ingest worker N, where the fleet has such
coordinator.crt, .key      the coordinator's link to the broker
broker/                    what Mosquitto needs: server.crt, server.key, ca.crt, revoked.pem, acl
barred.json                devices that the running coordinator has shut out
members.json               devices, their public keys and certificates, open codes (public halves only)
fleet.toml                 the coordinator's settings
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from talaria import durable
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.identity import badges, credentials
from talaria.identity.enrolment import Answer, Code, Request, fingerprint, named
from talaria.wire.broker_url import Tls
from talaria.wire.signing import KEY_BYTES, Signer
from talaria_coordinator.broker import mosquitto
from talaria_coordinator.config.ingest import MOST
from talaria_coordinator.identity import ca
from talaria_coordinator.identity.ca import Authority

COORDINATOR, WORKER = "_coordinator", "_ingest-{}"
"""The names of the coordinator and its ingest workers at the broker: no device can have them."""
BARRED = "barred.json"
FORMAT = 1
"""The version of ``members.json``."""
HOURS = 24.0
LARGEST = 64 * 2**20
"""Bytes of the list of members at most: about 200,000 devices."""


@dataclass(frozen=True)
class EnrolledDevice:
    """A device that was let in: its Ed25519 key, its certificate's serial number, and whether it still belongs."""

    key: bytes
    serial: int
    since: float
    revoked: float | None = None


@dataclass(frozen=True)
class Membership:
    """What ``members.json`` holds. ``codes`` are open ones: device -> (public half, end as Unix time)."""

    fleet: str
    broker: str
    hosts: tuple[str, ...]
    members: Mapping[str, EnrolledDevice] = field(default_factory=dict)
    codes: Mapping[str, tuple[bytes, float]] = field(default_factory=dict)
    taken: tuple[int, ...] = ()
    """Serial numbers of all revoked certificates."""

    def encode(self) -> bytes:
        """As JSON."""
        members = {
            name: {"key": m.key.hex(), "serial": str(m.serial), "since": m.since, "revoked": m.revoked}
            for name, m in sorted(self.members.items())
        }
        codes = {name: {"public": public.hex(), "end": end} for name, (public, end) in sorted(self.codes.items())}
        facts = {"format": FORMAT, "fleet": self.fleet, "broker": self.broker, "hosts": list(self.hosts)}
        taken = [str(serial) for serial in self.taken]
        return json.dumps({**facts, "members": members, "codes": codes, "taken": taken}, indent=1).encode()

    @classmethod
    def load(cls, folder: Path) -> Membership:
        """The list in ``folder``. Raises :class:`ConfigError` where there is none, or it is damaged, or of
        another version."""
        path = folder / "members.json"
        mend = f"make a fleet with `talaria fleet init {folder}`, or restore this file from a backup"
        facts = credentials.read_json(path, mend, LARGEST)
        if facts.get("format", FORMAT) != FORMAT:
            raise ConfigError(
                f"identity: {path} is of format {shown(facts['format'])}, and this version reads {FORMAT}; "
                "run the version that wrote it"
            )
        try:
            members = {
                name: EnrolledDevice(_key(m["key"]), int(m["serial"]), float(m["since"]), _moment(m["revoked"]))
                for name, m in facts["members"].items()
            }
            codes = {name: (_key(c["public"]), float(c["end"])) for name, c in facts["codes"].items()}
            taken = tuple(int(serial) for serial in facts["taken"])
            return cls(str(facts["fleet"]), str(facts["broker"]), tuple(facts["hosts"]), members, codes, taken)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"identity: {path} is damaged ({type(error).__name__}: {error}); {mend}") from None


def create(folder: Path, fleet: str, broker: str, hosts: Sequence[str]) -> None:
    """Make a new fleet's folder: authority, keys of coordinator and broker, the broker's files, no members.

    Raises :class:`ConfigError` where the folder holds anything already: keys are never overwritten, and what else lies
    there would be shut to everybody but its owner.
    """
    named(fleet, "device")
    if (folder / "ca.key").exists() or (folder / "members.json").exists():
        raise ConfigError(f"identity: {folder} holds a fleet already; give a new folder, or remove that one first")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"identity: {folder} is not empty, and a fleet's folder is for its keys alone; name a new one"
        )
    credentials.make_private(folder)
    credentials.make_private(folder / "broker")
    Authority.new(fleet).save(folder)
    credentials.write(folder / "sign.key", credentials.pem(Ed25519PrivateKey.generate()), private=True)
    with changing(folder, Membership(fleet, broker, tuple(hosts))) as change:
        renew(folder, change.roll)


def renew(folder: Path, roll: Membership) -> None:
    """New keys and certificates for the links of the broker, the coordinator and its ingest workers; devices notice
    nothing."""
    signed_by = Authority.load(folder)
    for path, name, hosts in (
        (folder / "broker" / "server", "broker", roll.hosts),
        (folder / "coordinator", COORDINATOR, ()),
        *((folder / f"ingest-{number}", WORKER.format(number), ()) for number in workers_in(folder)),
    ):
        key = ca.new_key()
        badge = (roll.fleet, load_signer(folder).public) if name == COORDINATOR else None
        certificate = signed_by.sign(key.public_key(), name, server=bool(hosts), hosts=hosts, badge=badge)
        credentials.write_pair(path, credentials.pem(key), ca.to_pem(certificate))
    credentials.write(folder / "broker" / "ca.crt", ca.to_pem(signed_by.certificate))


def workers_in(folder: Path) -> list[int]:
    """The ingest workers that have certificates, by number."""
    return [number for number in range(MOST) if (folder / f"ingest-{number}.crt").exists()]


def staff(folder: Path, workers: int) -> None:
    """A key and a certificate for each of so many ingest workers, which the broker is told of. Where ``ca.key`` is
    kept here they are made anew; raises :class:`ConfigError` where it is not, and one is missing."""
    paths = [folder / f"ingest-{number}" for number in range(workers)]
    if not (folder / "ca.key").exists():
        missing = next((path for path in paths if not path.with_suffix(".crt").exists()), None)
        if missing is not None:
            raise ConfigError(
                f"ingest: workers={workers} and {missing}.crt is not there, nor is ca.key, which makes it: start once "
                "where ca.key is kept, and bring ingest-*.crt, ingest-*.key and broker/acl here; or set fewer workers"
            )
        return
    with _alone(folder):
        signed_by = Authority.load(folder)
        for number, path in enumerate(paths):
            key = ca.new_key()
            certificate = signed_by.sign(key.public_key(), WORKER.format(number))
            credentials.write_pair(path, credentials.pem(key), ca.to_pem(certificate))
        for number in workers_in(folder)[workers:]:  # of a start with more of them
            for end in ("crt", "key"):
                (folder / f"ingest-{number}.{end}").unlink(missing_ok=True)
        _tell_broker(folder, Membership.load(folder), signed_by, _barred(folder))


class Change:
    """The list of members while it is changed."""

    def __init__(self, roll: Membership) -> None:
        self.roll = roll


@contextmanager
def changing(folder: Path, roll: Membership | None = None) -> Iterator[Change]:
    """Change the list, for one process at a time; the broker's lists are written first, the members' last."""
    if roll is None:
        Membership.load(folder)  # before a lock is left in a folder that is no fleet's
    with _alone(folder):
        change = Change(roll or Membership.load(folder))
        yield change
        _tell_broker(folder, change.roll, Authority.load(folder), _barred(folder))
        credentials.write(folder / "members.json", change.roll.encode(), private=True)


def bar(folder: Path, out: Collection[str]) -> bool:
    """Have the broker's lists keep ``out`` away, whoever was barred before and is not among them let in again; True
    where that changed the lists. Where ``ca.key`` is not kept here, they lose their rights, but can still connect."""
    with _alone(folder):
        if sorted(out) == _barred(folder):
            return False
        signed_by = Authority.load(folder) if (folder / "ca.key").exists() else None
        _tell_broker(folder, Membership.load(folder), signed_by, out)
        # Last, as it says that the lists are as they should be.
        credentials.write(folder / BARRED, json.dumps(sorted(out)).encode(), private=True)
    return True


@contextmanager
def standing_in(folder: Path, device: str) -> Iterator[Tls]:
    """Means to connect as ``device``, for a quarter of an hour: a broker that takes names from certificates then ends
    the link that the device has. Needs ``ca.key``."""
    signed_by, key = Authority.load(folder), ca.new_key()
    certificate = signed_by.sign(key.public_key(), device, days=1 / 96)
    with tempfile.TemporaryDirectory(prefix="talaria-") as name:
        place = Path(name)
        credentials.write(place / "tls.key", credentials.pem(key), private=True)
        credentials.write(place / "tls.crt", ca.to_pem(certificate))
        yield Tls(folder / "ca.crt", place / "tls.crt", place / "tls.key")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        lock = durable.lock(folder / "members.lock")
    except OSError as error:
        raise ConfigError(f"identity: cannot use {folder}: {error.strerror}; is it a fleet's folder?") from None
    with lock:
        yield


def _tell_broker(folder: Path, roll: Membership, signed_by: Authority | None, kept_out: Collection[str]) -> None:
    """Write the broker's lists: who is revoked or to be ``kept_out`` has no rights, and no certificate that is good."""
    barred = {name for name in kept_out if name in roll.members}
    out = barred | {name for name, member in roll.members.items() if member.revoked is not None}
    if signed_by is not None:
        taken = [*roll.taken, *(roll.members[name].serial for name in sorted(barred))]
        credentials.write(folder / "broker" / "revoked.pem", signed_by.revoked(taken))
    workers = [WORKER.format(number) for number in workers_in(folder)]
    text = mosquitto.acl(roll.fleet, COORDINATOR, out, workers)
    credentials.write(folder / "broker" / "acl", text.encode(), private=True)


def _barred(folder: Path) -> list[str]:
    """Whom the broker's lists keep away beside the revoked, in order."""
    path, mend = folder / BARRED, "remove it; the coordinator writes it again"
    if not path.exists():
        return []
    try:
        found = json.loads(credentials.read(path, mend, LARGEST))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"identity: {path} is damaged; {mend}")
    return found


def enroll(folder: Path, device: str, hours: float = HOURS) -> Code:
    """A new one-time code for ``device``, good for ``hours``; an earlier open one is void.

    For a device that is a member already the code brings new keys: rotation. The old ones stay good until then.
    """
    if not 0 < hours <= 24 * 366:
        raise ConfigError(f"enroll: hours={hours:g} must be above 0 and at most a year")
    with changing(folder) as change:
        roll = change.roll
        named(roll.fleet, device)
        public = load_signer(folder).public
        code = Code.new(roll.fleet, device, fingerprint(_ca(folder), public))
        entry = (code.signer().public, time.time() + hours * 3600)
        change.roll = replace(roll, codes={**roll.codes, device: entry})
    return code


def admit(folder: Path, data: bytes, out: Path | None = None) -> Answer:
    """The answer to a request made with an open code: the device is a member from now on, the code is spent.

    It is written to ``out`` before: a code whose answer has no place is not spent. Raises :class:`ConfigError` for a
    request that is damaged, forged, too late, or made with a spent code, :class:`StateError` where ``out`` cannot be
    written. Where the answer is lost later, a new code is needed.
    """
    request = Request.decode(data)
    with changing(folder) as change:
        roll, device, signer = change.roll, request.device, load_signer(folder)
        if request.fleet != roll.fleet:
            raise ConfigError(f"admit: the request is for fleet {request.fleet!r}; this is {roll.fleet!r}")
        public, end = roll.codes.get(device, (b"", 0.0))
        if not public or not request.signed_by(public):
            raise ConfigError(
                f"admit: no open code fits this request of {device!r}: the code was used, replaced or never given; "
                f"run `talaria fleet enroll {folder} {device}` and join with the new code"
            )
        if time.time() > end:
            raise ConfigError(
                f"admit: the code of {device!r} has expired; run `talaria fleet enroll {folder} {device}` for a new one"
            )
        signed_by = Authority.load(folder)
        badge = (roll.fleet, request.key)
        certificate = signed_by.sign(ca.requested_key(request.csr), device, badge=badge)
        before = roll.members.get(device)
        change.roll = replace(
            roll,
            members={**roll.members, device: EnrolledDevice(request.key, certificate.serial_number, time.time())},
            codes={name: code for name, code in roll.codes.items() if name != device},
            taken=roll.taken if before is None else (*roll.taken, before.serial),
        )
        answer = Answer(
            roll.fleet,
            device,
            ca.to_pem(signed_by.certificate).decode(),
            ca.to_pem(certificate).decode(),
            signer.public,
            roll.broker,
        ).signed(signer)
        if out is not None:
            credentials.write(out, answer.encode())
        return answer


def revoke(folder: Path, device: str) -> None:
    """Shut ``device`` out for good: its key, certificate and open code are void at once."""
    with changing(folder) as change:
        roll = change.roll
        member = roll.members.get(device)
        if member is None and device not in roll.codes:
            raise ConfigError(f"revoke: {device!r} is not a member; `talaria fleet list` shows who is")
        codes = {name: code for name, code in roll.codes.items() if name != device}
        change.roll = replace(roll, codes=codes)
        if member is not None and member.revoked is None:
            members = {**roll.members, device: replace(member, revoked=time.time())}
            change.roll = replace(roll, codes=codes, members=members, taken=(*roll.taken, member.serial))


def load_signer(folder: Path) -> Signer:
    """The coordinator's signing key."""
    return credentials.load_signer(folder / "sign.key")


def badge_key(folder: Path, fleet: str) -> bytes:
    """The public key that members' badges are signed by. Raises :class:`ConfigError` where this fleet has none."""
    _, public = badges.read(folder / "coordinator.crt", folder / "ca.crt", fleet, COORDINATOR)
    return public


def tls(folder: Path) -> Tls:
    """The coordinator's link to its broker."""
    return _tls(folder, "coordinator")


def worker_tls(folder: Path, number: int) -> Tls:
    """The link of an ingest worker to the broker."""
    return _tls(folder, f"ingest-{number}")


def _tls(folder: Path, name: str) -> Tls:
    credentials.settle_pair(folder / name)
    credentials.require_private(folder / f"{name}.key")
    return Tls(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


def _ca(folder: Path) -> bytes:
    return ca.to_der(ca.load_certificate(credentials.read(folder / "ca.crt", "restore it from a backup")))


def _key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes")
    return key


def _moment(value: Any) -> float | None:
    return None if value is None else float(value)
