"""The ``[store]`` table of a ``fleet.toml``: which database and which blobs, instead of SQLite and a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.identity import credentials
from talaria.wire.broker_url import loopback

DATABASE = 'a URL like "postgresql+psycopg://talaria@db.example/talaria"; leave it out for SQLite in the state folder'
BLOBS = '"s3://bucket/prefix" or "file:///folder"; leave it out for a folder in the state folder'
VERIFIED = ("verify-ca", "verify-full")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """No field holds a secret. ``database`` None is SQLite, ``blobs`` None a folder, both in the state folder."""

    database: str | None = None
    password_file: Path | None = None
    """The database's password; without it libpq looks where it always does (PGPASSFILE, PGPASSWORD, ~/.pgpass)."""
    blobs: str | None = None
    endpoint: str | None = None
    """An S3-compatible server other than Amazon's; its keys come from the environment or from ``profile``."""
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.database is not None:
            _database(self.database)
        elif self.password_file is not None:
            raise ConfigError(f"store: password_file={str(self.password_file)!r} needs database, {DATABASE}")
        if self.blobs is not None:
            _blobs(self.blobs)
        if not (self.blobs or "").startswith("s3:") and (self.endpoint or self.profile):
            raise ConfigError(
                'store: endpoint and profile are those of an S3 server; give blobs = "s3://bucket/prefix"'
            )
        if self.endpoint is not None:
            _endpoint(self.endpoint)

    def where(self, state: Path) -> Path | URL:
        """The database's path, or its URL with the password in it, which no ``str`` or ``repr`` of it shows."""
        if self.database is None:
            return state / "coordinator.db"
        url = _database(self.database)
        return url if self.password_file is None else url.set(password=credentials.password(self.password_file))

    def require_safe(self) -> None:
        """Raise :class:`ConfigError` where the state would cross a network that others could read or alter."""
        if self.database is not None:
            url = _database(self.database)
            given = [url.host, *(name for key in ("host", "hostaddr") for name in _texts(url.query, key))]
            else_ = (os.environ.get(name) for name in ("PGHOSTADDR", "PGSERVICE", "PGHOST"))
            # A service's file, which names a host, is not read here: it counts as beyond this machine.
            hosts = list(filter(None, given)) or filter(None, (*_texts(url.query, "service"), *else_))
            far = next((name for name in hosts if not name.startswith("/") and not loopback(name)), None)
            mode = next(iter(_texts(url.query, "sslmode")), None) or os.environ.get("PGSSLMODE")
            if far is not None and mode not in VERIFIED:
                raise ConfigError(
                    f"store: database on {far!r} is beyond this machine; without a verified certificate anybody on "
                    "the way could read and alter the state. Add ?sslmode=verify-full&sslrootcert=FILE to the URL, or "
                    "accept the risk with --insecure"
                )
        if (self.blobs or "").startswith("s3:"):
            environment = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
            endpoint = self.endpoint or next((url for url in environment if url), "https://amazon")
            parts = urlsplit(endpoint)
            if parts.scheme == "http" and not loopback(parts.hostname or ""):
                raise ConfigError(
                    f"store: endpoint={endpoint!r} is beyond this machine and without TLS; use https://, or accept "
                    "the risk with --insecure"
                )


def store_of(section: Section) -> StoreConfig:
    """The configuration in a ``[store]`` table."""
    try:
        config = StoreConfig(
            database=section.text("database", None),
            password_file=section.path("password_file", None),
            blobs=section.text("blobs", None),
            endpoint=section.text("endpoint", None),
            profile=section.text("profile", None),
        )
    except ConfigError as error:
        told = str(error)
        raise ConfigError(f"{section.file}: {told}" if told.startswith("store:") else told) from None
    section.done()
    return config


def _database(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(f"store: database is not {DATABASE}") from None
    if url.password is not None or "password" in url.query:
        raise ConfigError("store: database holds a password, which logs would repeat; give password_file instead")
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername != "postgresql+psycopg":
        raise ConfigError(f"store: database={shown(text)} must be {DATABASE}")
    return url


def _blobs(text: str) -> None:
    try:
        parts = urlsplit(text)
        secret = parts.username is not None or bool(parts.query or parts.fragment)
        s3 = parts.scheme == "s3" and bool(parts.hostname)
    except ValueError:
        raise ConfigError(f"store: blobs must be {BLOBS}") from None
    if secret:
        raise ConfigError(
            "store: blobs is more than bucket and prefix; keys come from the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY) or from profile, and another server is named by endpoint"
        )
    folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    if not s3 and not folder:
        raise ConfigError(f"store: blobs={shown(text)} must be {BLOBS}")


def _endpoint(text: str) -> None:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        secret = parts.username is not None
    except ValueError:
        good = secret = False
    if secret:
        raise ConfigError("store: endpoint holds keys, which logs would repeat; give them by environment or profile")
    if not good:
        raise ConfigError(f'store: endpoint={shown(text)} must be a URL like "https://s3.example:9000"')


def _texts(query: Mapping[str, str | Sequence[str]], name: str) -> Sequence[str]:
    """All values of a part of a URL that may stand in it several times."""
    value = query.get(name, ())
    return (value,) if isinstance(value, str) else value
