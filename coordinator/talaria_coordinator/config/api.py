"""The ``[api]`` table of a ``fleet.toml``: where the API, the metrics and the dashboard are served, and to whom."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.wire.broker_url import loopback

SHORTEST = 16
PORT = 8420


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """``port`` 0 is a free one. With ``token_file`` every request needs its token; beyond this machine it must."""

    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def local(self) -> bool:
        """True where only this machine can reach it."""
        return loopback(self.host)

    def token(self, insecure: bool = False) -> str | None:
        """The token that requests must show, or None for none. Raises :class:`ConfigError` where strangers could get
        in, or listen (unless ``insecure``)."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("api: cert and key belong together; give both files, or neither")
        if self.key is not None and self.key.exists() and self.key.stat().st_mode & stat.S_IRWXO:
            raise ConfigError(f"api: key {self.key} can be read by everybody here; run `chmod 600 {self.key}`")
        if not self.local and self.token_file is None:
            raise ConfigError(
                f"api: host={self.host!r} is beyond this machine; give [api] token_file, a file with one long word "
                "(`openssl rand -hex 32`), or keep to 127.0.0.1"
            )
        if not self.local and self.cert is None and not insecure:
            raise ConfigError(
                f"api: host={self.host!r} is beyond this machine and without TLS, so that the token could be read on "
                "the way; give [api] cert and key, or serve on 127.0.0.1 behind a proxy with TLS, or accept the risk "
                "with --insecure"
            )
        return None if self.token_file is None else read_token(self.token_file)


def read_token(path: Path) -> str:
    """The token in a file that its owner alone can read. Raises :class:`ConfigError` for any other."""
    try:
        with path.open("rb") as file:
            mode, data = path.stat().st_mode, file.read(4097)
        token = data.decode("ascii").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not ASCII"
        raise ConfigError(
            f"api: token_file {path} cannot be read ({why}); write one by `openssl rand -hex 32`"
        ) from None
    if len(data) > 4096:
        raise ConfigError(f"api: token_file {path} is no token; it has one word of {SHORTEST} characters or more")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"api: token_file {path} can be read by others; run `chmod 600 {path}`")
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise ConfigError(
            f"api: token_file {path} must hold one word of at least {SHORTEST} characters; write one by "
            "`openssl rand -hex 32`"
        )
    return token


def api_of(section: Section) -> ApiConfig:
    """The configuration in an ``[api]`` table."""
    config = ApiConfig(
        host=section.text("host", "127.0.0.1"),
        port=section.whole("port", PORT, high=65535),
        token_file=section.path("token_file", None),
        cert=section.path("cert", None),
        key=section.path("key", None),
    )
    section.done()
    return config
