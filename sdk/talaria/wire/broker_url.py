"""Where a broker is and how its link is secured."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from talaria.errors import ConfigError


def at(host: str, port: int) -> str:
    """``host:port`` as it stands in a URL, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback(host: str) -> bool:
    """True where only this machine reaches what listens on ``host``; told without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Tls:
    """Files of a TLS link: the CA that signed the broker, and our own certificate and key where it asks for one."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer, host name checked. Raises :class:`ConfigError` for a file that cannot be read."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as why:
            raise ConfigError(
                f"tls: cannot load {self.ca} / {self.cert} / {self.key}: {why}; check the files"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


@dataclass(frozen=True)
class Address:
    """A broker's address, from a URL such as ``mqtt://host:1883``, ``mqtts://``, ``ws://`` or ``wss://host/path``."""

    host: str
    port: int
    tls: bool = False
    websocket: bool = False
    path: str = "/mqtt"
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises :class:`ConfigError` for another scheme, a missing host or a bad port."""
        ports = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError("broker: the port of the URL is not a number in 0..65535") from None
        if parts.scheme not in ports or not parts.hostname:
            shown = f"{parts.scheme}://{parts.hostname or ''}"
            raise ConfigError(f"broker={shown!r} is no MQTT URL; write mqtt://host:1883, mqtts://, ws:// or wss://")
        return cls(
            parts.hostname,
            port or ports[parts.scheme],
            parts.scheme in ("mqtts", "wss"),
            parts.scheme in ("ws", "wss"),
            parts.path or "/mqtt",
            None if parts.username is None else unquote(parts.username),
            None if parts.password is None else unquote(parts.password),
        )

    def __str__(self) -> str:
        return at(self.host, self.port)


def require_safe(host: str, url: str | None, keys: bool, mend: str) -> None:
    """Raise :class:`ConfigError`, ending with ``mend``, where strangers could listen or speak: beyond this machine the
    link to the broker at ``url`` (None: our own, on ``host``) needs TLS, and both ends need ``keys``."""
    if loopback(host):
        return
    if url is not None and not Address.parse(url).tls:
        raise ConfigError(
            f"broker={url!r} is beyond this machine and without TLS: anybody on the way could read and alter all that "
            f"is said. Use mqtts:// or wss://, and {mend}"
        )
    if not keys:
        raise ConfigError(
            f"broker on {host!r}: without [identity] anybody who reaches the broker could take a device's place or the "
            f"coordinator's; {mend}"
        )
