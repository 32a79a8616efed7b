""":class:`Uploads`: partial uploads, in files that survive a restart, and the check of complete ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from talaria import time
from talaria.errors import AggregationError, StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.wire.chunks import Assemblies, Cut, FileAssembly
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.secure import LateError, Secure, findings
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.update_summary import findings_of


class Uploads(Assemblies[tuple[str, str]]):
    """The partial files in ``folder``, by (device, transfer)."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(lambda key: folder / f"{'.'.join(key)}.part", limit)
        self.folder = folder

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> dict[tuple[str, str], frozenset[int]]:
        """The intact chunks of these transfers; files of any other are removed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"uploads: cannot make {self.folder}: {error.strerror}; give another folder") from None
        found = {key: self.found(key, cut) for key, cut in transfers.items()}
        for file in set(self.folder.glob("*.part")) - set(map(self.path, transfers)):
            file.unlink(missing_ok=True)
        return found


def receive(
    fleet: str, upload: a.Complete, part: FileAssembly, learning: Learning, store: Store, secure: Secure | None = None
) -> e.Stored | e.UpdateRejected | e.Damaged:
    """Check a complete upload and enter it: the answer for the machine, which sends the receipt.

    When this returns :class:`~talaria.protocol.events.Stored`, the update's bytes and its row are durable. Raises
    :class:`~talaria.errors.StateError` where the disk refuses; it may be called again then.
    """
    digest, now = upload.cut.sha256.hex(), time.monotonic()
    try:
        data = part.joined()  # not made durable here: the blob is, and a crash before it asks for what is missing
    except WireError:
        return e.Damaged(now, upload.attempt, upload.device, frozenset(part.found()))
    facts: dict[str, Any] = {"digest": digest, "size": upload.cut.size, "base_version": upload.base_version}
    tried = store.begun(fleet, upload.attempt)
    if tried is None:
        raise StateError(f"fleet {fleet!r}: attempt {upload.attempt} is not in the store; restore it from a backup")
    if secure is not None:
        return _receive_masked(fleet, upload, part.path, data, learning, store, secure)
    try:
        update = learning.checked(data, upload.device, *tried)
    except WireError as error:
        store.reject_update(fleet, upload.attempt, upload.device, reason=str(error), **facts)
        return e.UpdateRejected(now, upload.attempt, upload.device, str(error))
    learning.blobs.adopt(part.path, data, digest)
    found = findings_of(update, learning.dense)
    row = store.keep_update(fleet, upload.attempt, upload.device, found=found, **facts)
    if row.digest != digest or row.status == "rejected":
        return e.UpdateRejected(
            now, upload.attempt, upload.device, row.reason or "another update of this round came first"
        )
    return e.Stored(now, upload.attempt, upload.device, upload.cut.sha256)


def _receive_masked(
    fleet: str, upload: a.Complete, file: Path, data: bytes, learning: Learning, store: Store, secure: Secure
) -> e.Stored | e.UpdateRejected:
    """As :func:`receive`, of an update that is masked: its size and its device's signature are all that can be seen."""
    digest, now = upload.cut.sha256.hex(), time.monotonic()
    facts: dict[str, Any] = {"digest": digest, "size": upload.cut.size, "base_version": upload.base_version}
    with secure.line():
        try:
            mask = secure.masked(upload.attempt, upload.device, data)
        except LateError:
            return e.Stored(now, upload.attempt, upload.device, upload.cut.sha256)  # which the machine finds late
        except (WireError, AggregationError) as error:
            store.reject_update(fleet, upload.attempt, upload.device, reason=str(error), **facts)
            return e.UpdateRejected(now, upload.attempt, upload.device, str(error))
        learning.blobs.adopt(file, data, digest)
        row = store.keep_update(fleet, upload.attempt, upload.device, found=findings(mask, learning.dense), **facts)
        if row.digest != digest or row.status == "rejected":
            raise StateError(f"attempt {upload.attempt}: the store holds another update of {upload.device!r}")
        secure.keep_masked(upload.attempt, upload.device, digest)
    return e.Stored(now, upload.attempt, upload.device, upload.cut.sha256)
