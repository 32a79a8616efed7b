"""A copy of a coordinator's state that any store can be restored from, taken while the coordinator runs::

    DEST/manifest.json    what it is, how much, and the sha256 of the rows
    DEST/rows.jsonl       every row, of one snapshot of the database
    DEST/blobs/ab/cd...   every global model, server state and waiting update that the rows name

It holds no keys and no passwords.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from talaria import durable, time
from talaria.errors import ConfigError, StateError
from talaria.foreign import shown
from talaria_coordinator.storage import migrate, table_dump
from talaria_coordinator.storage.blobs import Blobs, FolderBlobs
from talaria_coordinator.storage.store import Store

FORMAT = 1
TRIES = 5
LARGEST_MANIFEST = 1 << 16


@dataclass(frozen=True)
class Manifest:
    """What a backup holds. ``created`` is in seconds since 1970; ``revision`` is that of its tables."""

    format: int
    revision: str
    created: float
    rows: int
    sha256: str
    blobs: int
    bytes: int

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the backup in ``folder``. Raises ConfigError where there is none that this version reads."""
        path = folder / "manifest.json"
        mend = "give the folder that `talaria coordinator backup` made"
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_MANIFEST + 1)
            values = json.loads(data if len(data) <= LARGEST_MANIFEST else b"")
            found = cls(**{name: values[name] for name in cls.__annotations__})
            if not table_dump.is_moment(found.created):
                raise ValueError
        except OSError as error:
            raise ConfigError(f"restore: {path} cannot be read ({error.strerror}); {mend}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"restore: {path} is damaged; {mend}") from None
        if found.format != FORMAT or found.revision not in migrate.REVISIONS:
            raise ConfigError(
                f"restore: {folder} is of format {shown(found.format)}, revision {shown(found.revision)}; this version "
                f"reads format {FORMAT} up to revision {migrate.HEAD}; restore it with the version that made it"
            )
        return found


def back_up(store: Store, blobs: Blobs, dest: Path) -> Manifest:
    """Write a backup to the new folder ``dest``; it is there whole or not at all.

    Raises :class:`ConfigError` where ``dest`` is there already, and :class:`StateError` where the disk refuses or the
    state is damaged.
    """
    if dest.exists():
        raise ConfigError(f"backup: {dest} is there already; give a folder that is not")
    beside = None
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        # Of its own: another backup to the same place may run now.
        beside = Path(mkdtemp(prefix=f".{dest.name[:200]}.", suffix=".part", dir=dest.parent))
        manifest = _copy(store, blobs, beside)
        durable.write(beside / "manifest.json", json.dumps(asdict(manifest), indent=1).encode())
        beside.rename(dest)
        durable.flush(dest.parent)
    except OSError as error:
        raise StateError(
            f"backup: {dest} could not be written ({error.strerror}); free space or give another"
        ) from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return manifest


def _copy(store: Store, blobs: Blobs, folder: Path) -> Manifest:
    kept = FolderBlobs(folder / "blobs")
    for _ in range(TRIES):
        created = time.time()
        keep, count, digest = _rows(store, folder / "rows.jsonl")
        if _fill(store, blobs, kept, keep):
            kept.gc(keep)
            size = sum(file.stat().st_size for file in (folder / "blobs").glob("??/*"))
            return Manifest(FORMAT, migrate.HEAD, created, count, digest, len(keep), size)
    raise StateError(f"backup: the state changed faster than it could be copied, {TRIES} times; pause the fleet first")


def _rows(store: Store, path: Path) -> tuple[set[str], int, str]:
    digest, count = hashlib.sha256(), 0
    with store.database.reading() as tx, path.open("wb") as out:
        for line in table_dump.dump(tx):
            out.write(line)
            digest.update(line)
            count += 1
        out.flush()
        os.fsync(out.fileno())
        return table_dump.in_use(tx), count, digest.hexdigest()


def _fill(store: Store, blobs: Blobs, kept: FolderBlobs, keep: set[str]) -> bool:
    """True once all of ``keep`` is copied; False where the coordinator dropped some of it meanwhile."""
    for digest in sorted(keep):
        if kept.has(digest):
            continue
        try:
            data = blobs.get(digest)
        except StateError:
            if digest in store.blobs_in_use():
                raise
            return False
        kept.put(data)
    return True


def summary(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain data."""
    return asdict(manifest)
