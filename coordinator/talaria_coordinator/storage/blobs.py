"""Content-addressed bytes in a folder: a blob is named by its sha256, is written once and never changes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from talaria import durable
from talaria.errors import StateError

_DIGEST = re.compile(r"[0-9a-f]{64}")
PIECE = 1 << 20
LARGEST = 1 << 32
"""No blob has more bytes: the largest update that a fleet may allow."""


class BlobLost(StateError):  # noqa: N818 - it is a state of affairs, which only a backup mends
    """A blob is not there, or not what its name says."""


class Swept(NamedTuple):
    """Bytes of blobs that nothing names."""

    freed: int
    younger: int
    """Left, for they are not old enough."""


class Blobs(Protocol):
    """Where global models and updates lie. All digests are lower-case hex sha256."""

    def put(self, data: bytes | memoryview, digest: str = "") -> str:
        """Keep ``data`` durably and return its digest; the same bytes are kept once, and count as young again. Who has
        just hashed them gives the ``digest``."""
        ...

    def adopt(self, file: Path, data: bytes, digest: str) -> None:
        """Keep ``data`` of this ``digest`` durably, which is all that ``file`` holds: that may become the blob, and is
        then gone from where it was. Nobody may write to it any more."""
        ...

    def expect(self, digest: str) -> None:
        """Another process is about to put this blob: it counts as young, as if it were put here."""
        ...

    def get(self, digest: str, *, again: bool = True) -> bytes:
        """The bytes, verified. Where nobody is about to read them ``again``, no memory is kept for that. Raises
        :class:`BlobLost` where missing or damaged, and another :class:`~talaria.errors.StateError` where they cannot be
        read now."""
        ...

    def has(self, digest: str) -> bool:
        """True where the blob is here (its bytes are verified by ``get``)."""
        ...

    def digests(self) -> Iterator[str]:
        """All blobs here, in no order."""
        ...

    def gc(self, keep: Iterable[str], older_s: float = 0.0, *, dry_run: bool = False) -> Swept:
        """Remove blobs that are not in ``keep`` and older than ``older_s`` seconds; the bytes freed (or, with
        ``dry_run``, that would be), and those left. Where ``older_s`` is above 0, what was put here since the sweep
        before is not old, whatever the clocks say. Raises :class:`~talaria.errors.StateError` where some cannot be
        removed."""
        ...


class Young:
    """What was put since the sweep before. The record may not name it yet, or did not when it was asked what is in use;
    and its age tells nothing once a clock was set, or is another machine's."""

    def __init__(self) -> None:
        self.lock = Lock()
        """Held while one blob is looked at and removed."""
        self._before: set[str] = set()
        self._now: set[str] = set()

    def add(self, digest: str) -> None:
        """It is about to be put."""
        with self.lock:
            self._now.add(digest)

    def sweep(self) -> None:
        """A sweep begins."""
        with self.lock:
            self._before, self._now = self._now, set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._now or digest in self._before


class FolderBlobs:
    """Blobs as files ``ab/cdef...`` below ``folder``: written beside, flushed, renamed, folder flushed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"blobs: cannot make {folder}: {error.strerror}; give a folder to write to") from None
        self._young = Young()
        self._sums: dict[str, int] = {}
        """Of what this process has placed: read again, it is known by a sum, which takes a tenth of its sha256."""

    def put(self, data: bytes | memoryview, digest: str = "") -> str:
        require_small(len(data))
        digest = digest or hashlib.sha256(data).hexdigest()
        self._place(digest, data, lambda target: durable.write(target, data, mode=0o666, alone=False))
        return digest

    def adopt(self, file: Path, data: bytes, digest: str) -> None:
        require_small(len(data))

        def take(target: Path) -> None:
            try:
                os.chmod(file, target.parent.stat().st_mode & 0o666)  # as a blob that is written would have it
                durable.flush(file)
                durable.rename(file, target)
            except OSError:  # on another disk, or gone
                durable.write(target, data, mode=0o666, alone=False)

        self._place(digest, data, take)

    def expect(self, digest: str) -> None:
        self._young.add(digest)

    def _place(self, digest: str, data: bytes | memoryview, make: Callable[[Path], None]) -> None:
        target = self._path(digest)
        self._young.add(digest)
        try:
            with suppress(FileNotFoundError):
                if target.stat().st_size == len(data) and target.read_bytes() == data:  # else damaged: written anew
                    os.utime(target)
                    for one in (target, target.parent, self.folder):  # who put it may have been killed before that
                        durable.flush(one)
                    return
            try:
                make(target)
            except FileNotFoundError:  # the first one in its folder
                with suppress(FileExistsError):
                    target.parent.mkdir()
                    durable.flush(self.folder)
                make(target)
            self._sums[digest] = _sum(data)
        except OSError as error:
            raise StateError(
                f"blobs: {len(data)} bytes could not be written to {self.folder}: {error.strerror}; "
                "free space there; all earlier state is intact"
            ) from None

    def get(self, digest: str, *, again: bool = True) -> bytes:
        path = self._path(digest)
        try:
            info = path.stat()
            if info.st_size > LARGEST:
                raise BlobLost(f"blobs: {path} is damaged ({info.st_size} bytes); restore it from a backup")
            if not stat.S_ISREG(info.st_mode):  # a pipe or a device says no size, and may have no end
                raise BlobLost(f"blobs: {path} is damaged (it is no file); restore it from a backup")
            data = path.read_bytes() if again else _read_once(path)
        except OSError as error:
            kind = BlobLost if isinstance(error, FileNotFoundError) else StateError
            raise kind(
                f"blobs: {digest[:16]} cannot be read from {path}: {error.strerror}; restore it from a backup"
            ) from None
        known = self._sums.get(digest) if again else self._sums.pop(digest, None)
        if (hashlib.sha256(data).hexdigest() != digest) if known is None else (_sum(data) != known):
            raise BlobLost(f"blobs: {path} is damaged (its sha256 is another); restore it from a backup")
        return data

    def has(self, digest: str) -> bool:
        return self._path(digest).exists()

    def digests(self) -> Iterator[str]:
        for file in self.folder.glob("??/*"):
            digest = digest_of(f"{file.parent.name}/{file.name}")
            if digest is not None:
                yield digest

    def gc(self, keep: Iterable[str], older_s: float = 0.0, *, dry_run: bool = False) -> Swept:
        wanted, freed, younger, now = set(keep), 0, 0, time.time()
        stays: list[str] = []
        if not dry_run:
            self._young.sweep()
        unused = ((digest, self._path(digest)) for digest in self.digests() if digest not in wanted)
        for digest, file in chain(unused, (("", part) for part in self.folder.glob("??/.*.part"))):
            try:
                with suppress(FileNotFoundError), self._young.lock:
                    info = file.stat()
                    if now - info.st_mtime < older_s or (older_s and digest in self._young):
                        younger += info.st_size
                        continue
                    if not dry_run:
                        file.unlink()
                        self._sums.pop(digest, None)
                    freed += info.st_size
            except OSError as error:
                stays.append(f"{file} cannot be removed ({error.strerror})")
        if stays:
            raise StateError(
                f"blobs: {stays[0]}; let this program write there, or remove it by hand (of {len(stays)} such)"
            )
        return Swept(freed, younger)

    def _path(self, digest: str) -> Path:
        return self.folder / key_of(digest)


def _read_once(path: Path) -> bytes:
    """All bytes of a file. Its pages in memory then go to what is written next, for which a virtual machine would else
    have to be given new ones, at more than the cost of writing."""
    with path.open("rb", buffering=0) as file:
        data = file.read()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return data


def _sum(data: bytes | memoryview) -> int:
    """The size and all words of ``data``, added up: a disk's damage to any of it shows."""
    whole = len(data) // 8
    words = np.frombuffer(data, np.uint64, whole)
    return int(words.sum(dtype=np.uint64)) + int.from_bytes(data[8 * whole :], "little") + (len(data) << 64)


def key_of(digest: str) -> str:
    """The name of a blob below its folder or prefix. Raises StateError for anything but a sha256 in hex."""
    if not _DIGEST.fullmatch(digest):
        raise StateError(f"blobs: {digest[:80]!r} is not a sha256 in hex")
    return f"{digest[:2]}/{digest[2:]}"


def digest_of(key: str) -> str | None:
    """The digest that :func:`key_of` made this name from, or None for any other name."""
    digest = key.replace("/", "", 1)
    return digest if _DIGEST.fullmatch(digest) and key_of(digest) == key else None


def require_small(size: int) -> None:
    """Raise StateError for a blob that would not be read again."""
    if size > LARGEST:
        raise StateError(f"blobs: {size} bytes are too many for one blob; at most {LARGEST}")
