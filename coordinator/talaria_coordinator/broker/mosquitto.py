"""Mosquitto's configuration: memory bounds, persistence, and for a fleet with keys TLS and access rights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from talaria import durable
from talaria.errors import ConfigError, StateError
from talaria.identity import credentials
from talaria.wire.chunks import CHUNK
from talaria.wire.frames import MAX_HEADER, OVERHEAD

BESIDE = OVERHEAD + MAX_HEADER + 1024
"""Bytes of a packet beside a chunk, at most: the frame's header, the topic, MQTT's own header."""
LARGEST_PACKET = CHUNK + BESIDE
"""Of a fleet with chunks of the usual size."""
IN_FLIGHT = 20
"""Messages under way to one client."""
MEMORY = 256 * 2**20
"""Bytes that the broker may use beside what is in flight to the devices."""
SHARE = 0.5
"""Of this machine's memory, at most."""
DATABASE = "mosquitto.db"
"""What it keeps over a restart, in its folder: sessions and retained messages, all of which are sent again."""
AUTOSAVE_S = 300
HOME = "home-assistant"
"""The name under which a Home Assistant is let in: `talaria fleet enroll FOLDER home-assistant`."""
FILES = ("ca.crt", "server.crt", "server.key", "revoked.pem", "acl")


def acl(fleet: str, coordinator: str, out: Iterable[str], workers: Iterable[str] = ()) -> str:
    """Each device its own topics (``%u`` is the name in its certificate); the coordinator its side of them, and its
    ``workers`` to hear uploads, and themselves.

    Who is ``out``, revoked or in quarantine, is denied everything: also on a link that stands already, whose
    certificate the broker does not look at again.
    """
    root = f"fl/1/{fleet}"
    lines = [
        f"user {coordinator}",
        f"topic readwrite {root}/co/state",
        f"topic write {root}/co/model",
        f"topic write {root}/m/#",
        f"topic write {root}/d/+/cmd",
        f"topic write {root}/d/+/dn/+",
        # To write there too is to clear what somebody left, and to hear whether the broker still delivers.
        f"topic readwrite {root}/d/+/state",
        f"topic readwrite {root}/d/+/evt",
        f"topic readwrite {root}/d/+/up/+",
        "",
    ]
    for worker in workers:
        lines += [f"user {worker}", f"topic read {root}/d/+/up/+", f"topic write {root}/d/echo/up/+"]
        lines += [f"topic write {root}/d/+/dn/+", ""]
    # Home Assistant, where it was let in under this name, hears what devices show there and may give its two words.
    if HOME not in out:
        lines += [
            f"user {HOME}",
            f"topic read homeassistant/device/{fleet}/+/config",
            "topic readwrite homeassistant/status",
            f"topic read {root}/d/+/ha",
            f"topic read {root}/d/+/ha/bundle",
            f"topic read {root}/d/+/ha/alive",
            f"topic write {root}/d/+/ha/set",
            "",
        ]
    for device in sorted(out):
        lines += [f"user {device}", "topic deny #", ""]
    lines += [
        f"pattern read {root}/co/#",
        f"pattern read {root}/m/#",
        f"pattern read {root}/d/%u/cmd",
        f"pattern read {root}/d/%u/dn/+",
        f"pattern write {root}/d/%u/state",
        f"pattern write {root}/d/%u/evt",
        f"pattern write {root}/d/%u/up/+",
        f"pattern write homeassistant/device/{fleet}/%u/config",
        f"pattern write {root}/d/%u/ha",
        f"pattern write {root}/d/%u/ha/bundle",
        f"pattern write {root}/d/%u/ha/alive",
        f"pattern read {root}/d/%u/ha/set",
    ]
    return "\n".join(lines) + "\n"


def config(
    host: str, port: int, data: Path, *, user: str | None = None, security: Path | None = None, devices: int = 16,
    chunk: int = CHUNK,
) -> str:  # fmt: skip
    """The configuration file. ``security`` is a folder with :data:`FILES`: TLS 1.2 or newer, a certificate from
    everyone, and its name as user name and client id, so that nobody can evict another's connection. ``devices`` is
    how many are expected, and ``chunk`` the bytes of a model or an update in one message."""
    who = [] if security is None else [line.format(folder=security) for line in _SECURE]
    lines = [
        f"listener {port}" if host == "::" else f"listener {port} {host}",  # without one it is all of IPv4 and IPv6
        "allow_anonymous " + ("true" if security is None else "false"),
        *who,
        "set_tcp_nodelay true",
        "persistence true",
        f"persistence_location {data}/",
        # By time: counted in changes, one device could have all that is retained written again and again.
        "autosave_on_changes false",
        f"autosave_interval {AUTOSAVE_S}",
        "persistent_client_expiration 7d",
        # Whatever is larger than a frame does not come from us.
        f"max_packet_size {chunk + BESIDE}",
        f"memory_limit {memory(devices, chunk)}",
        f"max_inflight_messages {IN_FLIGHT}",
        "max_queued_messages 1000",
        # A reader that stops reading must not fill our memory.
        "max_queued_bytes 33554432",
        "log_dest stderr",
        "log_timestamp_format %Y-%m-%dT%H:%M:%S",
        "log_type error",
        "log_type warning",
        "log_type notice",
    ]
    if user:
        lines.append(f"user {user}")
    return "\n".join(lines) + "\n"


def memory(devices: int, chunk: int = CHUNK) -> int:
    """Bytes that a broker for so many devices may use. At its limit Mosquitto disconnects whoever needs more."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MEMORY + devices * IN_FLIGHT * (chunk + BESIDE), int(SHARE * machine))


def forget(data: Path) -> bool:
    """Move away what Mosquitto kept in its folder ``data``; False where there is nothing."""
    kept = data / DATABASE
    if not kept.exists():
        return False
    os.replace(kept, data / f"{DATABASE}.old")
    return True


_SECURE = (
    "cafile {folder}/ca.crt",
    "certfile {folder}/server.crt",
    "keyfile {folder}/server.key",
    "crlfile {folder}/revoked.pem",
    "tls_version tlsv1.2",
    "require_certificate true",
    "use_identity_as_username true",
    "use_username_as_clientid true",
    "acl_file {folder}/acl",
)


def copy(source: Path, target: Path) -> None:
    """Bring the files of ``source`` to the broker's own folder, in place: they keep the owner they have there. Raises
    :class:`~talaria.errors.ConfigError` where one cannot be read, and :class:`~talaria.errors.StateError` where one
    cannot be written, or leads elsewhere: who runs the broker may have put it there, for us to write as root."""
    credentials.settle_pair(source / "server")
    target.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for name in FILES:
        try:
            data = durable.read(source / name)
        except OSError as error:
            raise ConfigError(
                f"identity: {source / name} cannot be read ({error.strerror}); let [identity] folder be the one that "
                "`talaria fleet init` made, with its broker/ in it"
            ) from None
        try:
            with os.fdopen(os.open(target / name, flags, 0o600), "wb") as out:
                out.truncate(0)
                out.write(data)
        except OSError as error:
            raise StateError(
                f"broker: {target / name} cannot be written ({error.strerror}); free space there, or remove it where "
                "it is no file"
            ) from None
