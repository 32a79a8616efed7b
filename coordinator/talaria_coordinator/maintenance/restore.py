"""Restores a backup into an empty store, with any kind of database and any kind of blobs.

Since the backup, devices may have heard of later epochs and rounds. The restored fleets begin a later epoch, whenever
and however often that is done; devices then follow their rounds from where the backup has them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sqlalchemy import URL, Connection, func, select, update

from talaria.errors import ConfigError, StateError
from talaria.foreign import shown
from talaria_coordinator.maintenance.backup import Manifest
from talaria_coordinator.storage import audit, migrate, table_dump
from talaria_coordinator.storage.blobs import PIECE, Blobs, FolderBlobs
from talaria_coordinator.storage.database import answering, epoch_after
from talaria_coordinator.storage.engine import open_engine
from talaria_coordinator.storage.tables import EVENTS, FLEETS


def restore(where: Path | URL, blobs: Blobs, source: Path, fleet: str = "") -> Manifest:
    """Fill the empty store at ``where`` and ``blobs`` from the backup in ``source``, which must hold this ``fleet``,
    where one is named.

    Blobs come first, each verified, and rows last, in one transaction: broken off, it can be run again. Raises
    :class:`~talaria.errors.ConfigError` for a folder that is no backup of it or a store that holds something, and
    :class:`~talaria.errors.StateError` for a damaged backup.
    """
    path = source / "rows.jsonl"
    for each in (source / "manifest.json", path):
        if each.exists() and not each.is_file():  # a pipe or a device may have no end
            raise StateError(f"restore: {each} is damaged (it is no file); take another backup")
    manifest = Manifest.read(source)
    _require_intact(path, manifest.sha256)
    if fleet and fleet not in (held := table_dump.fleets(path)):
        raise ConfigError(
            f"restore: {source} holds {', '.join(map(shown, held[:5])) or 'no fleet'}, and fleet.toml names {fleet!r}; "
            "give a backup of that one"
        )
    engine = open_engine(where)
    try:
        with answering(engine), engine.begin() as tx:
            _require_empty(tx, manifest)
        kept = FolderBlobs(source / "blobs")
        for digest in kept.digests():
            blobs.put(kept.get(digest))
        with answering(engine), engine.begin() as tx:
            _require_empty(tx, manifest)
            migrate.migrate(tx, manifest.revision)
            with path.open("rb") as lines:
                if table_dump.load(tx, lines) != manifest.rows:
                    raise StateError(f"restore: {path} has not the {manifest.rows} rows that it began with")
            migrate.migrate(tx, migrate.HEAD)
            audit.verify(tx)
            missing = [digest for digest in sorted(table_dump.in_use(tx)) if not blobs.has(digest)]
            if missing:
                raise StateError(
                    f"restore: the backup lacks {len(missing)} blobs, {missing[0][:16]} first; take another"
                )
            _go_ahead(tx, manifest)
    finally:
        engine.dispose()
    return manifest


def _go_ahead(tx: Connection, manifest: Manifest) -> None:
    for row in tx.execute(select(FLEETS)).all():
        epoch = epoch_after(row.epoch)
        tx.execute(update(FLEETS).where(FLEETS.c.fleet == row.fleet).values(epoch=epoch))
        audit.append(tx, "restored", {"backup": manifest.created, "epoch": epoch}, fleet=row.fleet)


def _require_empty(tx: Connection, manifest: Manifest) -> None:
    found = migrate.revision(tx)
    if found is None:
        migrate.require_ours(tx)
        return
    held = tx.execute(select(FLEETS.c.fleet)).scalars().all()
    if held or tx.execute(select(func.count()).select_from(EVENTS)).scalar_one():
        raise ConfigError(
            f"restore: the store holds {', '.join(map(repr, sorted(held))) or 'events'} already; move its state away "
            "first, or give [store] database an empty one"
        )
    if found != manifest.revision:
        raise ConfigError(
            f"restore: the store's tables are made, of revision {found}, and the backup's are of "
            f"{manifest.revision}; give a database without tables"
        )


def _require_intact(path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except OSError as error:
        raise StateError(f"restore: {path} cannot be read ({error.strerror}); take another backup") from None
    if digest.hexdigest() != sha256:
        raise StateError(f"restore: {path} is damaged (its sha256 is another); take another backup")
