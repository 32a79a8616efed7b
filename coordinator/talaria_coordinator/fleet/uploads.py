"""Uploads on their way in: partial files that survive a restart, and what becomes of a complete one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from talaria import time
from talaria.errors import StateError, WireError
from talaria.protocol import events as e
from talaria.wire.chunks import Cut, FileAssembly
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.update_summary import findings_of


@dataclass
class Uploads:
    """The partial files in ``folder``, none above ``limit`` bytes."""

    folder: Path
    limit: int
    _open: dict[str, FileAssembly] = field(default_factory=dict, init=False)

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> dict[tuple[str, str], frozenset[int]]:
        """The intact chunks of these transfers; files of any other are removed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"uploads: cannot make {self.folder}: {error.strerror}; give another folder") from None
        found = {key: frozenset(self._part(*key, cut).found()) for key, cut in transfers.items()}
        for file in self.folder.glob("*.part"):
            if file.stem not in self._open:
                file.unlink(missing_ok=True)
        return found

    def keep(self, chunk: e.KeepChunk) -> None:
        """Write one chunk in its place; StateError where the disk refuses."""
        self._part(chunk.dev, chunk.xfer, chunk.cut).put(chunk.index, chunk.data)

    def take(self, upload: e.Complete) -> FileAssembly:
        """The file of a complete upload, out of reach of :meth:`drop`, so that no deadline closes it while it is
        read. The caller closes it."""
        part = self._part(upload.dev, upload.xfer, upload.cut)
        del self._open[f"{upload.dev}.{upload.xfer}"]
        return part

    def drop(self, dev: str, xfer: str) -> None:
        """Forget a transfer and its file."""
        part = self._open.pop(f"{dev}.{xfer}", None)
        if part is not None:
            part.close()
        (self.folder / f"{dev}.{xfer}.part").unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files; they stay where they are."""
        for part in self._open.values():
            part.close()
        self._open.clear()

    def _part(self, dev: str, xfer: str, cut: Cut) -> FileAssembly:
        key = f"{dev}.{xfer}"
        if key not in self._open:
            self._open[key] = FileAssembly(self.folder / f"{key}.part", cut, self.limit)
        return self._open[key]


def receive(
    fleet: str, upload: e.Complete, part: FileAssembly, learning: Learning, store: Store
) -> e.Stored | e.Rejected | e.Damaged:
    """Check a complete upload and enter it: the answer for the machine, which sends the receipt.

    When this returns :class:`~talaria.protocol.events.Stored`, the update's bytes and its row are durable. Raises
    :class:`~talaria.errors.StateError` where the disk refuses; it may be called again then.
    """
    digest, now = upload.cut.sha256.hex(), time.monotonic()
    try:
        part.finish()
    except WireError:
        return e.Damaged(now, upload.round, upload.dev, frozenset(part.found()))
    data = b"".join(part.read(i) for i in range(upload.cut.count))
    facts: dict[str, Any] = {"digest": digest, "size": upload.cut.size, "base": upload.base}
    tried = store.round_numbered(fleet, upload.round)
    if tried is None:
        raise StateError(f"fleet {fleet!r}: round {upload.round} is not in the store; restore it from a backup")
    try:
        update = learning.checked(data, upload.dev, tried.step, tried.base)
    except WireError as error:
        store.reject_update(fleet, upload.round, upload.dev, reason=str(error), **facts)
        return e.Rejected(now, upload.round, upload.dev, str(error))
    learning.blobs.put(data)
    found = findings_of(update, learning.dense)
    row = store.keep_update(fleet, upload.round, upload.dev, found=found, **facts)
    if row.digest != digest or row.status == "rejected":
        return e.Rejected(now, upload.round, upload.dev, row.reason or "another update of this round came first")
    return e.Stored(now, upload.round, upload.dev, upload.cut.sha256)
