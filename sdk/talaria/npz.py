"""Reads arrays from ``.npz`` and ``.npy`` files that nobody vouches for.

No pickle, and every size is checked against the bytes that are there before anything of that size is allocated.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from talaria.errors import DataError
from talaria.foreign import named

Array = np.ndarray[Any, np.dtype[Any]]

LIMIT = 8 << 30
"""Bytes that the arrays of one file may fill."""
UNREADABLE = (ValueError, EOFError, SyntaxError, TypeError, RecursionError, TokenError)
"""What numpy raises for a header that is none: it parses it as Python's literals."""
_MEMBERS = 4096
_DENSEST = 1100
"""Deflate makes at most 1032 bytes of one; a member that claims more is not what it says."""


def read(path: Path, needed: Iterable[str], optional: Iterable[str] = (), limit: int = LIMIT) -> dict[str, Array]:
    """The arrays ``needed`` and those of ``optional`` that are there, of a ``.npz`` or of ``.npy`` files in a folder.

    :class:`DataError`: the file is missing, damaged or no ``.npz``, an array is missing, holds Python objects,
    or they would fill more than ``limit`` bytes together.
    """
    needed, optional = tuple(needed), tuple(optional)
    if path.is_dir():
        return _folder(path, needed, optional, limit)
    try:
        if path.exists() and not path.is_file():  # what it ends with would be sought for ever
            raise DataError(f"{path}: is a device or a pipe; give the path of a .npz file")
        with zipfile.ZipFile(path) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()[:_MEMBERS]}
            _require(path, needed, there)
            keys = [*needed, *(key for key in optional if key in there)]
            _bounded(path, sum(there[key].file_size for key in keys), limit)
            return {key: _member(archive, there[key], f"{path}: array {key!r}") for key in keys}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the path of a .npz file") from None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a .npz file ({str(error)[:200]}); write it with numpy.savez") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from None


def names(path: Path) -> tuple[str, ...]:
    """What the arrays in ``path`` are called; empty where it is no ``.npz`` (:func:`read` says why)."""
    try:
        if path.is_dir():
            return tuple(sorted(p.stem for p in path.glob("*.npy")))
        if not path.is_file():
            return ()
        with zipfile.ZipFile(path) as archive:
            return tuple(info.filename.removesuffix(".npy") for info in archive.infolist()[:_MEMBERS])
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, struct.error, EOFError):
        return ()


def read_npy(path: Path, limit: int = LIMIT) -> Array:
    """The array of one ``.npy`` file; :class:`DataError` as in :func:`read`."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            _bounded(path, size, limit)
            return _array(stream, size, str(path))
    except FileNotFoundError:
        raise DataError(f"cannot read {path}: no such file; check the path") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the path and its rights") from None


def _folder(path: Path, needed: tuple[str, ...], optional: tuple[str, ...], limit: int) -> dict[str, Array]:
    there = {p.stem: p for p in sorted(path.glob("*.npy"))[:_MEMBERS]}
    _require(path, needed, there)
    keys = [*needed, *(key for key in optional if key in there)]
    _bounded(path, sum(there[key].stat().st_size for key in keys), limit)
    return {key: read_npy(there[key], limit) for key in keys}


def _require(path: Path, needed: tuple[str, ...], there: Iterable[str]) -> None:
    missing = [key for key in needed if key not in there]
    if missing:
        raise DataError(
            f"{path}: array {missing[0]!r} is missing, it holds {named(sorted(there)[:8]) if there else 'none'}; "
            + (
                f"name a .npz file, or put {missing[0]}.npy there"
                if path.is_dir()
                else f"write it with numpy.savez({path.name!r}, {missing[0]}=...)"
            )
        )


def _bounded(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(f"{path}: its arrays fill {size} bytes, more than {limit}; write fewer samples")


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> Array:
    if info.flag_bits & 1:
        raise DataError(f"{what} is encrypted; write it plainly, with numpy.savez")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{what} is compressed in a way that numpy does not write; write it with numpy.savez")
    if info.file_size > info.compress_size * (_DENSEST if info.compress_type else 1):
        raise DataError(f"{what} claims {info.file_size} bytes in {info.compress_size}; write it with numpy.savez")
    try:
        with archive.open(info) as stream:
            return _array(stream, info.file_size, what)
    except (zlib.error, RuntimeError, zipfile.BadZipFile, struct.error) as error:
        raise DataError(f"{what} is damaged ({str(error)[:200]}); write it again with numpy.savez") from None


def _array(stream: IO[bytes], size: int, what: str) -> Array:
    try:
        shape, fortran, dtype, header = _header(stream)
        if dtype.hasobject:
            raise DataError(f"{what} holds Python objects; write numbers, e.g. with .astype('float32')")
        count = 1
        for length in shape:
            count *= length
        if min(shape, default=0) < 0 or header + count * dtype.itemsize != size:
            raise DataError(f"{what} claims shape {shape} but has {size - header} bytes; write it again")
        if not size - header:
            if shape and shape[0]:  # of which others make arrays of as many, and numpy one of a letter each
                raise DataError(f"{what} claims {shape[0]} rows but holds no value; write a number for each")
            return np.empty(shape, dtype)
        values = _whole(stream, size - header).view(dtype)
        return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
    except (*UNREADABLE, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} is damaged ({str(error)[:200]}); write it again with numpy.savez or save") from None


def _whole(stream: IO[bytes], size: int) -> Array:
    out = np.empty(size, np.uint8)
    at, view = 0, out.data
    while at < size:
        data = stream.read(min(size - at, 1 << 20))
        if not data:
            raise ValueError(f"{at} bytes of {size}")
        view[at : at + len(data)] = data
        at += len(data)
    return out


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"format version {version} is not 1.0 or 2.0")
    return shape, fortran, dtype, stream.tell()
