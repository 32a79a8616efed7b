"""Opens the database and the blobs that ``[store]`` names, and locks a state folder for one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from talaria import durable
from talaria.errors import ConfigError, StateError
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.storage.blobs import Blobs, FolderBlobs
from talaria_coordinator.storage.store import Store

LOCK = "lock"
LOOK_S = 0.2
"""Longer than anybody holds the lock who only looks whether another does."""


def open_store(config: FleetConfig, *, make: bool = True) -> Store:
    """The database, made or brought up to date where that is asked for. Raises :class:`~talaria.errors.StateError`
    where it refuses, or is not there."""
    where = config.database
    if not make and isinstance(where, Path) and not where.exists():
        raise StateError(f"store: {where} is not there; serve the fleet first, or correct [fleet] state")
    return Store(where, make=make)


def open_blobs(config: FleetConfig) -> Blobs:
    """The blobs. Raises :class:`~talaria.errors.StateError` where the folder or the server refuses."""
    url = config.store.blobs
    if url is None:
        return FolderBlobs(config.state / "blobs")
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderBlobs(Path(unquote(parts.path)))
    try:
        from talaria_coordinator.storage.s3 import S3Blobs
    except ModuleNotFoundError:
        raise ConfigError(f"store: blobs={url!r} needs the s3 extra; pip install 'talaria[s3]'") from None
    return S3Blobs(url, endpoint=config.store.endpoint, profile=config.store.profile)


def write_url(state: Path, name: str, url: str) -> None:
    """Write where something is reached now to the state folder. Raises :class:`~talaria.errors.StateError` where that
    refuses, or something else than a file has the place."""
    durable.write_as("fleet:", state / name, f"{url}\n".encode(), mode=0o666)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The state folder, for this process alone. Raises :class:`~talaria.errors.StateError` where another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except BlockingIOError:
        raise StateError(
            f"fleet: {folder} is in use by another coordinator; stop it, or give this one another state folder"
        ) from None
    except OSError as error:
        raise StateError(f"fleet: cannot use {folder}: {error.strerror}; give [fleet] state another folder") from None
    with lock:
        yield


def is_held(folder: Path) -> bool | None:
    """Whether a process has this state folder now; None where no process of this machine ever had it."""
    try:
        with durable.lock(folder / LOCK, wait=False, make=False):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def _lock(folder: Path) -> BinaryIO:
    try:
        return durable.lock(folder / LOCK, wait=False)
    except BlockingIOError:  # somebody may only have looked
        time.sleep(LOOK_S)
        return durable.lock(folder / LOCK, wait=False)
