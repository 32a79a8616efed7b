"""Large bytes as chunks of at most 1 MiB: cut by offset, rejoined in any order, each known by its sha256.

A chunk may come twice, late or out of order; it lands in its place or is refused. The file form survives a
restart by looking, not by trusting: each place is hashed again, and what does not match is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from talaria import durable
from talaria.errors import ConfigError, StateError, TooLarge, WireError
from talaria.wire.frames import MAX_PAYLOAD
from talaria.wire.messages import MAX_CHUNKS, Parcel

CHUNK = 120 * 1024
"""Bytes of a chunk where nothing else is asked for: slow links and hosted brokers carry it."""
ROOM = 1280
"""Bytes of a message beside what it carries, at most: its topic, the frame's header and checksum, MQTT's own."""
LEAST = 4096
"""Bytes that a broker must take as one message."""

Key = TypeVar("Key")


@dataclass(frozen=True)
class Cut:
    """How some bytes are cut: their size, the chunk size, and the sha256 of the whole and of each chunk."""

    size: int
    chunk: int
    sha256: bytes
    hashes: bytes

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return -(-self.size // self.chunk)

    def place(self, index: int) -> tuple[int, int]:
        """Offset and length of chunk ``index``. Raises :class:`WireError` beyond the last."""
        if not 0 <= index < self.count:
            raise WireError(f"chunk {index} is beyond the manifest; this transfer has {self.count} chunks")
        offset = index * self.chunk
        return offset, min(self.chunk, self.size - offset)

    def fits(self, index: int, data: bytes | memoryview) -> bool:
        """True where ``data`` is exactly chunk ``index``."""
        _, length = self.place(index)
        return len(data) == length and hashlib.sha256(data).digest() == self.hashes[32 * index : 32 * index + 32]


def cut_of(parcel: Parcel) -> Cut:
    """The cut that a received manifest or offer declares."""
    return Cut(parcel.size, parcel.chunk, parcel.sha256, parcel.hashes)


def describe(data: bytes, chunk: int = CHUNK) -> Cut:
    """How ``data`` is cut into chunks of ``chunk`` bytes. Raises :class:`TooLarge` beyond 3600 chunks."""
    if not 1 <= chunk <= MAX_PAYLOAD:
        raise ConfigError(f"chunk={chunk} must be in 1..{MAX_PAYLOAD} bytes")
    if not data:
        raise ConfigError("describe: there are no bytes to send")
    if len(data) > chunk * MAX_CHUNKS:
        raise TooLarge(f"{len(data)} bytes need more than {MAX_CHUNKS} chunks of {chunk}; use larger chunks")
    view = memoryview(data)
    hashes = b"".join(hashlib.sha256(view[i : i + chunk]).digest() for i in range(0, len(data), chunk))
    return Cut(len(data), chunk, hashlib.sha256(data).digest(), hashes)


def chunk_within(largest: int | None, chunk: int = CHUNK) -> int:
    """The size of chunks, at most ``chunk``, where a broker takes ``largest`` bytes as one message (None: no bound is
    known).

    Raises :class:`ConfigError` below 4096.
    """
    if largest is None:
        return chunk
    if largest < LEAST:
        raise ConfigError(
            f"the broker takes at most {largest} bytes as one message, and {LEAST} are needed; raise its bound "
            "(Mosquitto: max_packet_size)"
        )
    return min(chunk, largest - ROOM)


def most_within(largest: int | None, chunk: int = CHUNK) -> int:
    """The most bytes that can be sent in such chunks: the sha256 of each must stand in one message too."""
    chunk = chunk_within(largest, chunk)
    return chunk * MAX_CHUNKS if largest is None else chunk * min(MAX_CHUNKS, (largest - ROOM) // 32)


class TornError(WireError):
    """Of chunks that were here, ``intact`` are left: the disk lost the others."""

    def __init__(self, name: str, intact: frozenset[int]) -> None:
        super().__init__(f"{name}: not all chunks lie there as they came; what is missing is asked for again")
        self.intact = intact


class FileAssembly:
    """Chunks rejoined in a file, one chunk in memory at a time; :meth:`found` picks up after a restart."""

    def __init__(self, path: Path, cut: Cut, limit: int) -> None:
        if cut.size > limit:
            raise TooLarge(f"transfer of {cut.size} bytes is above the limit of {limit}")
        self.path, self.cut, self._fd = path, cut, -1
        try:
            self._fd = _opened(path)
            os.ftruncate(self._fd, cut.size)
        except OSError as why:
            self.close()
            raise StateError(
                f"cannot open {path} for a transfer: {why.strerror}; free space or fix its rights"
            ) from why

    def put(self, index: int, data: bytes | memoryview, *, known: bool = False) -> None:
        """Write one chunk in its place; one that is ``known`` to have its sha256, because a protocol's machine let it
        in, is not hashed once more. Raises :class:`WireError` if it does not fit, :class:`StateError` if the disk
        refuses."""
        offset, length = self.cut.place(index)
        if len(data) != length or not (known or self.cut.fits(index, data)):
            raise WireError(f"chunk {index} does not match its sha256 or length in the manifest")
        self._write(index, data, offset)

    def _write(self, index: int, data: bytes | memoryview, offset: int) -> None:
        try:
            if os.pwrite(self._fd, data, offset) != len(data):
                raise StateError(f"cannot write chunk {index} to {self.path}: disk full; free space")
        except OSError as why:
            raise StateError(f"cannot write chunk {index} to {self.path}: {why.strerror}; free space") from why

    def reserve(self, but: Container[int]) -> None:
        """Take the room of all chunks ``but`` these, which are here. Raises :class:`StateError` if the disk refuses."""
        for index in range(self.cut.count):
            if index not in but:
                offset, length = self.cut.place(index)
                self._write(index, bytes(length), offset)

    def read(self, index: int) -> bytes:
        """The bytes at the place of chunk ``index``."""
        offset, length = self.cut.place(index)
        return os.pread(self._fd, length, offset)

    def found(self) -> set[int]:
        """The chunks that lie intact in the file, each hashed again."""
        return {i for i in range(self.cut.count) if self.cut.fits(i, self.read(i))}

    def joined(self) -> bytes:
        """All bytes, read once and hashed once. Where their sha256 differs :class:`TornError`, or, where each chunk is
        right, :class:`WireError`: then the manifest itself lies."""
        data = os.pread(self._fd, self.cut.size, 0)
        if len(data) != self.cut.size:  # one read gives 2 GiB at most
            data = b"".join(self.read(i) for i in range(self.cut.count))
        if hashlib.sha256(data).digest() == self.cut.sha256:
            return data
        view, chunk = memoryview(data), self.cut.chunk
        intact = frozenset(i for i in range(self.cut.count) if self.cut.fits(i, view[i * chunk : (i + 1) * chunk]))
        if len(intact) == self.cut.count:
            raise WireError("each chunk is as the manifest says, but their whole sha256 is not; the manifest is wrong")
        raise TornError(self.path.name, intact)

    def finish(self) -> None:
        """Make the file durable after checking the whole sha256 (:class:`WireError` where it differs)."""
        whole = hashlib.sha256()
        for i in range(self.cut.count):
            whole.update(self.read(i))
        if whole.digest() != self.cut.sha256:
            raise WireError(f"{self.path.name}: the joined chunks do not match the whole sha256 of the manifest")
        try:
            os.fsync(self._fd)
        except OSError as why:
            raise StateError(f"cannot make {self.path} durable: {why.strerror}; free space") from why

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileAssembly:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> int:
    """The file at ``path``, open to be read and written; made, with its folder, where it is not there."""
    how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(
            path, how | os.O_EXCL, 0o600
        )  # of most transfers nothing is there, and this is all that it takes
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        durable.own(path)
    return os.open(path, how, 0o600)


class Assemblies(Generic[Key]):
    """Unfinished transfers by key, none above ``limit`` bytes; ``path`` says where the file of each lies."""

    def __init__(self, path: Callable[[Key], Path], limit: int) -> None:
        self.path, self.limit = path, limit
        self._open: dict[Key, FileAssembly] = {}

    def part(self, key: Key, cut: Cut) -> FileAssembly:
        """The file of one, opened if need be. Raises :class:`StateError` where the disk refuses."""
        if key not in self._open:
            self._open[key] = FileAssembly(self.path(key), cut, self.limit)
        return self._open[key]

    def found(self, key: Key, cut: Cut) -> frozenset[int]:
        """The chunks of one that lie intact in its file; none of one above the limit, as where that is lower by now."""
        if cut.size > self.limit or not self.path(key).exists():
            return frozenset()
        return frozenset(self.part(key, cut).found())

    def take(self, key: Key, cut: Cut) -> FileAssembly:
        """The file of a complete one, out of reach of :meth:`drop`, so that nothing closes it while it is read. The
        caller closes it."""
        part = self.part(key, cut)
        del self._open[key]
        return part

    def drop(self, key: Key) -> None:
        """Forget one, and its file; one that the disk keeps is in nobody's way."""
        part = self._open.pop(key, None)
        if part is not None:
            part.close()
        with suppress(OSError):
            self.path(key).unlink()

    def close(self) -> None:
        """Close all files; they stay where they are."""
        for part in self._open.values():
            part.close()
        self._open.clear()
