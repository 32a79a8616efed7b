"""Files that survive a power cut (written beside, flushed, renamed, the folder flushed), and files as locks."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EBUSY, EINVAL, EISDIR
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from threading import get_ident
from typing import BinaryIO

from talaria.errors import StateError, so_that_it_can_be_written


def write(path: Path, data: bytes | memoryview, *, mode: int = 0o600, alone: bool = True) -> None:
    """Replace ``path`` by ``data``, or leave it as it was and raise OSError, also where it is a device or a pipe.

    The file never has more rights than ``mode``, by default its owner's alone. Where others may write the same path at
    the same time, it is not ``alone``; what a crash leaves beside it is then not overwritten by the next write.
    """
    if path.name in ("", ".."):  # "." and "/" too: folders by their names alone
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if path.exists() and (_is_open(path) or (not path.is_file() and not path.is_dir())):
        raise OSError(EBUSY, "it is no file that can be replaced", str(path))
    name = f".{path.name}.part" if alone else f".{path.name[:16]}.{os.getpid()}.{get_ident()}.part"
    beside = path.with_name(name)
    try:
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        rename(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _is_open(path: Path) -> bool:
    """Whether ``path`` is a link to what each process has open, such as /dev/stdout, which may lead to a file: whoever
    may, would replace it for all."""
    return path.is_symlink() and path.readlink().is_relative_to("/proc")


def write_as(what: str, path: Path, data: bytes | memoryview, *, mode: int = 0o600) -> None:
    """:func:`write`, for people. Raises :class:`~talaria.errors.StateError`, which begins with ``what`` asked for the
    file, names it, and says the mend."""
    try:
        write(path, data, mode=mode)
    except OSError as error:
        mend = so_that_it_can_be_written(error)
        raise StateError(f"{what} {path} cannot be written ({error.strerror}); {mend}") from None


def rename(source: Path, target: Path) -> None:
    """Rename within one folder so that the new name survives a power cut. Raises OSError."""
    source.replace(target)
    flush(target.parent)


def flush(folder: Path) -> None:
    """Make new names within ``folder`` survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, most: int = -1) -> bytes:
    """The bytes of the file ``path``, the first ``most`` if that is told. Raises OSError, also where it is a device or
    a pipe: those may never give a byte, or never an end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(EINVAL, "it is no file", str(path))
        return file.read(most)


def own(path: Path) -> None:
    """Whatever lies at ``path`` and has its bytes elsewhere too, as a link, is removed: who goes on to write there
    would write to that. Raises OSError."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not S_ISREG(found.st_mode) or found.st_nlink > 1:
            path.unlink()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have the lock of ``folder`` meanwhile; where there are no such locks, or no such folder, nothing. What this
    process forks does not have it. Raises BlockingIOError at once where another process or thread has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        _held.discard(handle)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # what was forked just now may not have let go of it yet
        os.close(handle)


_held: set[int] = set()


def _let_go() -> None:
    """In a process that was forked: it would go on to have the locks after its parent ended."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def lock(path: Path, *, wait: bool = True, make: bool = True) -> BinaryIO:
    """The open file ``path``, which no other process has locked until it is closed. It is left as it is.

    Raises BlockingIOError at once where another one has it and there is no ``wait``, OSError where it cannot be opened,
    is a link, or is not there and there is no ``make``.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    file = FileIO(os.open(path, flags, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        raise
    return file
