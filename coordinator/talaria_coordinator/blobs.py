"""Content-addressed bytes in a folder: a blob is named by its sha256, is written once and never changes."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from talaria.errors import StateError

_DIGEST = re.compile(r"[0-9a-f]{64}")
PIECE = 1 << 20


class Blobs(Protocol):
    """Where bodies and updates lie. All digests are lower-case hex sha256."""

    def put(self, data: bytes | memoryview) -> str:
        """Keep ``data`` durably and return its digest; the same bytes are kept once."""
        ...

    def get(self, digest: str) -> bytes:
        """The bytes, verified. Raises :class:`~talaria.errors.StateError` where missing or damaged."""
        ...

    def has(self, digest: str) -> bool:
        """True where the blob is here (its bytes are verified by ``get``)."""
        ...

    def digests(self) -> Iterator[str]:
        """All blobs here, in no order."""
        ...

    def gc(self, keep: Iterable[str], older_s: float = 0.0) -> int:
        """Remove blobs that are not in ``keep`` and older than ``older_s`` seconds; the bytes freed."""
        ...


class FolderBlobs:
    """Blobs as files ``ab/cdef...`` below ``folder``: written beside, flushed, renamed, folder flushed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"blobs: cannot make {folder}: {error.strerror}; give a folder to write to") from None

    def put(self, data: bytes | memoryview) -> str:
        digest = hashlib.sha256(data).hexdigest()
        target = self._path(digest)
        if target.exists():
            return digest
        beside = target.parent / f".{digest[:16]}.{os.getpid()}.part"
        try:
            target.parent.mkdir(exist_ok=True)
            with beside.open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            beside.replace(target)
            flush_folder(target.parent)
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise StateError(
                f"blobs: {len(data)} bytes could not be written to {self.folder}: {error.strerror}; "
                "free space there; all earlier state is intact"
            ) from None
        return digest

    def get(self, digest: str) -> bytes:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StateError(
                f"blobs: {digest[:16]} cannot be read from {path}: {error.strerror}; restore it from a backup"
            ) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise StateError(f"blobs: {path} is damaged (its sha256 is another); restore it from a backup")
        return data

    def has(self, digest: str) -> bool:
        return self._path(digest).exists()

    def digests(self) -> Iterator[str]:
        for file in self.folder.glob("??/*"):
            name = file.parent.name + file.name
            if _DIGEST.fullmatch(name):
                yield name

    def gc(self, keep: Iterable[str], older_s: float = 0.0) -> int:
        wanted, freed, now = set(keep), 0, time.time()
        for file in [*self.folder.glob("??/*"), *self.folder.glob("??/.*.part")]:
            if file.parent.name + file.name in wanted:
                continue
            with suppress(FileNotFoundError):
                info = file.stat()
                if now - info.st_mtime >= older_s:
                    file.unlink()
                    freed += info.st_size
        return freed

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StateError(f"blobs: {digest[:80]!r} is not a sha256 in hex")
        return self.folder / digest[:2] / digest[2:]


def flush_folder(folder: Path) -> None:
    """Make a rename or a new name within ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
