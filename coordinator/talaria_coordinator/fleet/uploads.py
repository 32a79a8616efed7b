""":class:`Uploads`: partial uploads, in files that survive a restart, and the check of complete ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from talaria import time
from talaria.errors import AggregationError, StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.wire.chunks import Assemblies, Cut, FileAssembly, TornError
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.secure import GoneError, LateError, Secure
from talaria_coordinator.storage.store import Store
from talaria_coordinator.storage.update_summary import findings_of, findings_unseen


class Uploads(Assemblies[tuple[str, str]]):
    """The partial files in ``folder``, by (device, transfer)."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(lambda key: folder / f"{'.'.join(key)}.part", limit)
        self.folder = folder

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> dict[tuple[str, str], frozenset[int]]:
        """The intact chunks of these transfers; files of any other are removed."""
        self.prepare()
        self.sweep(transfers)
        return {key: self.found(key, cut) for key, cut in transfers.items()}

    def prepare(self) -> None:
        """Make the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"uploads: cannot make {self.folder}: {error.strerror}; give another folder") from None

    def sweep(self, transfers: Collection[tuple[str, str]]) -> None:
        """Remove the files of any other transfer. One that the disk keeps is in nobody's way."""
        for file in set(self.folder.glob("*.part")) - set(map(self.path, transfers)):
            with suppress(OSError):
                file.unlink()


Verdict = str | WireError | frozenset[int]
"""What a complete upload is found to be: what it says of itself, why it may not count, or which chunks are intact."""


def receive(
    fleet: str, upload: a.Complete, part: FileAssembly, learning: Learning, store: Store, secure: Secure | None = None
) -> e.Stored | e.UpdateRejected | e.Damaged | e.WordRefused:
    """Check a complete upload and enter it: the answer for the machine, which sends the receipt.

    When this returns :class:`~talaria.protocol.events.Stored`, the update's bytes and its row are durable. Raises
    :class:`~talaria.errors.StateError` where the disk refuses; it may be called again then.
    """
    if secure is not None:
        data = _joined(part)
        if not isinstance(data, bytes):
            return enter(fleet, upload, data, store)
        begun(fleet, upload, store)
        return _receive_masked(fleet, upload, part.path, data, learning, store, secure)
    return enter(fleet, upload, check(part, upload.device, *begun(fleet, upload, store), learning), store)


def begun(fleet: str, upload: a.Complete, store: Store) -> tuple[int, str]:
    """The round that the upload is for, and the digest of the global model that it began from."""
    tried = store.attempts.begun(fleet, upload.attempt)
    if tried is None:
        raise StateError(f"fleet {fleet!r}: attempt {upload.attempt} is not in the store; restore it from a backup")
    return tried


def check(part: FileAssembly, device: str, round: int, base_digest: str, learning: Learning) -> Verdict:
    """Look at a complete upload; one that may count is a durable blob when this returns. Raises
    :class:`~talaria.errors.StateError` where the disk refuses; it may be called again then."""
    data = _joined(part)  # not made durable here: the blob is, and a crash before it asks for what is missing
    if not isinstance(data, bytes):
        return data
    try:
        update = learning.checked(data, device, round, base_digest)
    except WireError as error:
        return error
    learning.blobs.adopt(part.path, data, part.cut.sha256.hex())
    return findings_of(update, learning.dense)


def _joined(part: FileAssembly) -> bytes | WireError | frozenset[int]:
    try:
        return part.joined()
    except TornError as torn:
        return torn.intact
    except WireError as error:
        return error


def enter(fleet: str, upload: a.Complete, verdict: Verdict, store: Store) -> e.Stored | e.UpdateRejected | e.Damaged:
    """Make durable what a complete upload was found to be."""
    attempt, device, now = upload.attempt, upload.device, time.monotonic()
    if isinstance(verdict, frozenset):
        return e.Damaged(now, attempt, device, verdict)
    digest = upload.cut.sha256.hex()
    facts: dict[str, Any] = {"digest": digest, "size": upload.cut.size, "base_version": upload.base_version}
    if isinstance(verdict, WireError):
        store.updates.reject(fleet, attempt, device, reason=str(verdict), **facts)
        return e.UpdateRejected(now, attempt, device, str(verdict))
    row = store.updates.keep(fleet, attempt, device, found=verdict, **facts)
    if row.digest != digest or row.status == "rejected":
        return e.UpdateRejected(now, attempt, device, row.reason or "another update of this round came first")
    return e.Stored(now, attempt, device, upload.cut.sha256)


def _receive_masked(
    fleet: str, upload: a.Complete, file: Path, data: bytes, learning: Learning, store: Store, secure: Secure
) -> e.Stored | e.UpdateRejected | e.WordRefused:
    """As :func:`receive`, of an update that is masked: its size and its device's signature are all that can be seen."""
    digest, now = upload.cut.sha256.hex(), time.monotonic()
    facts: dict[str, Any] = {"digest": digest, "size": upload.cut.size, "base_version": upload.base_version}
    try:
        with secure.masked(upload.attempt, upload.device, data) as mask:
            learning.blobs.adopt(file, data, digest)
            facts |= {"found": findings_unseen(mask, learning.dense), "step": words.UPLOAD}
            row = store.updates.keep(fleet, upload.attempt, upload.device, **facts)
            if row.digest != digest or row.status == "rejected":
                raise StateError(f"attempt {upload.attempt}: the store holds another update of {upload.device!r}")
    except LateError:
        pass  # the machine finds it late
    except GoneError as error:  # as of any other word: no offence of a device that was asked before we began anew
        return e.WordRefused(now, upload.attempt, upload.device, str(error), offence=False)
    except (WireError, AggregationError) as error:
        facts = {name: facts[name] for name in ("digest", "size", "base_version")}
        store.updates.reject(fleet, upload.attempt, upload.device, reason=str(error), **facts)
        return e.UpdateRejected(now, upload.attempt, upload.device, str(error))
    return e.Stored(now, upload.attempt, upload.device, upload.cut.sha256)
