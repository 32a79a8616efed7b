"""Keys on disk: written for their owner only, read with care, and a device's folder of them.

    tls.key, tls.crt    the device's private key and certificate for the link to the broker
    sign.key            the Ed25519 key that signs what the device says
    ca.crt              the fleet's own authority, which signed the broker's certificate
    fleet.json          fleet, device, broker and the coordinator's public key

The folder is made on the device by joining a fleet; no private key ever leaves it.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from talaria import durable
from talaria.errors import ConfigError, StateError, TransportError
from talaria.wire.broker_url import Tls
from talaria.wire.signing import KEY_BYTES, Signer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LARGEST_FILE = 64 * 1024


@dataclass(frozen=True)
class Credentials:
    """What one device proves itself with, and the key that the coordinator's words must be signed by."""

    fleet: str
    device: str
    broker: str
    tls: Tls
    signer: Signer
    coordinator_key: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> Credentials:
        """The device's folder. Raises :class:`ConfigError` where it is not complete, damaged, or open to others."""
        mend = "join the fleet first: `talaria edge join`, then again with the operator's --answer"
        facts = read_json(folder / "fleet.json", mend)
        try:
            fleet, device, broker = (_text(facts[name]) for name in ("fleet", "device", "broker"))
            key = bytes.fromhex(_text(facts["coordinator"]))
        except (KeyError, TypeError, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(f"identity: {folder / 'fleet.json'} is damaged; {mend}")
        for name in ("tls.key", "sign.key"):
            require_private(folder / name)
        tls = Tls(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
        return cls(fleet, device, broker, tls, load_signer(folder / "sign.key"), key)


def make_private(folder: Path) -> None:
    """Make ``folder`` for its owner alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise StateError(f"identity: cannot make {folder}: {error.strerror}; give a folder to write to") from None


def write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` durably; a private file is never, not even for a moment, readable by others."""
    durable.write_as("identity:", path, data, mode=0o600 if private else 0o644)


def read(path: Path, mend: str, largest: int = LARGEST_FILE) -> bytes:
    """The bytes of a small file; :class:`ConfigError` with ``mend`` where there is none, or it is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise ConfigError(f"identity: {path} cannot be read: {error.strerror}; {mend}") from None
    if len(data) > largest:
        raise ConfigError(f"identity: {path} has more than {largest} bytes and is not what it should be; {mend}")
    return data


def read_json(path: Path, mend: str, largest: int = LARGEST_FILE) -> dict[str, Any]:
    """A small JSON table."""
    data = read(path, mend, largest)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"identity: {path} holds no JSON table; {mend}")
    return value


def require_private(path: Path, mend: str = "restore it, or join again") -> None:
    """Raise :class:`ConfigError` where others than the owner may read ``path``; with ``mend`` where it is not there."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"identity: {path} cannot be read: {error.strerror}; {mend}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"identity: others may read {path} (mode {mode & 0o777:o}); run `chmod 600 {path}`")


def password(path: Path) -> str:
    """The password in a file that only its owner can read; one line."""
    mend = "write the password there, in one line, and let its owner alone read it"
    require_private(path, mend)
    try:
        text = read(path, mend, 1024).decode("utf-8-sig").strip()  # Windows puts a mark before it
    except UnicodeDecodeError:
        text = ""
    if not text or "\n" in text:
        raise ConfigError(f"identity: {path} must hold one line, the password")
    return text


def password_in(path: Path | None) -> Callable[[], str] | None:
    """What reads the password in ``path`` before each attempt to connect, so that one that was changed at a server and
    there counts without another start; None without a file. Raises :class:`ConfigError` where it holds none now, and
    what it gives :class:`TransportError` where it holds none then."""
    if path is None:
        return None
    password(path)

    def again() -> str:
        try:
            return password(path)
        except ConfigError as error:
            raise TransportError(str(error)) from None

    return again


def require_no_password(url: str) -> None:
    """Raise :class:`ConfigError` for a broker's URL with a password in it: logs and events repeat URLs."""
    try:
        held = urlsplit(url).password is not None
    except ValueError:
        return
    if held:
        raise ConfigError("broker: the URL holds a password, which logs would repeat; give username and password_file")


def require_login(what: str, username: str | None, password_file: Path | None) -> None:
    """Raise :class:`ConfigError` for a password of nobody: nothing would be said of it to the broker."""
    if password_file is not None and not username:
        raise ConfigError(f"{what}: username is missing, whose password is in {password_file}; give both, or neither")


def load_signer(path: Path) -> Signer:
    """The Ed25519 key in a PEM file that only its owner can read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    require_private(path)
    try:
        key = serialization.load_pem_private_key(read(path, "restore it from a backup"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"identity: {path} holds no Ed25519 key; restore it from a backup, or join the fleet again")
    return Signer(key)


def name_in(certificate: Path | None) -> str | None:
    """Whom a certificate (PEM) is for; None where the file holds none, which opening the link tells."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(b"" if certificate is None else read(certificate, ""))
        (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    except (ConfigError, ValueError, x509.InvalidVersion):
        return None
    return str(name.value)


def write_pair(stem: Path, key: bytes, certificate: bytes) -> None:
    """Replace ``stem.key`` and ``stem.crt`` together: where it is cut off, :func:`settle_pair` makes them fit again."""
    settle_pair(stem)
    write(stem.with_suffix(".key.next"), key, private=True)
    write(stem.with_suffix(".crt.next"), certificate)
    settle_pair(stem)


def settle_pair(stem: Path) -> None:
    """Finish, or let go of, a change of key and certificate that was cut off. With the new certificate both are new."""
    key, certificate = stem.with_suffix(".key.next"), stem.with_suffix(".crt.next")
    if not key.exists() and not certificate.exists():
        return
    try:
        if certificate.exists():
            if key.exists():
                key.replace(stem.with_suffix(".key"))
            certificate.replace(stem.with_suffix(".crt"))
        key.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"identity: {stem}.key and .crt could not be replaced: {error.strerror}") from None


def pem(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    """A private key as PEM, for :func:`write` with ``private=True``."""
    from cryptography.hazmat.primitives import serialization

    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    return value
