"""Reads arrays from a ``.npz`` file that nobody vouches for: no pickle, and every size is checked before it is used."""

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from talaria.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]

LIMIT = 8 << 30
"""Bytes that the arrays of one file may fill."""


def read(path: Path, needed: Iterable[str], optional: Iterable[str] = (), limit: int = LIMIT) -> dict[str, Array]:
    """The arrays ``needed`` and those of ``optional`` that are there.

    :class:`DataError`: the file is missing, damaged or no ``.npz``, an array is missing, holds Python objects,
    or they would fill more than ``limit`` bytes together.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [key for key in needed if key not in there]
            if missing:
                raise DataError(
                    f"{path}: array {missing[0]!r} is missing, it holds {sorted(there)[:8]}; write it with "
                    f"numpy.savez({path.name!r}, {missing[0]}=...)"
                )
            keys = [*needed, *(key for key in optional if key in there)]
            total = sum(there[key].file_size for key in keys)
            if total > limit:
                raise DataError(f"{path}: its arrays fill {total} bytes, the limit is {limit}; write fewer samples")
            return {key: _array(archive, there[key], f"{path}: array {key!r}") for key in keys}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the path of a .npz file") from None
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{path}: not a .npz file ({error}); write it with numpy.savez") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> Array:
    try:
        with archive.open(info) as stream:
            shape, dtype, header = _header(stream)
            count = 1
            for size in shape:
                count *= size
            if dtype.hasobject:
                raise DataError(f"{what} holds Python objects; write numbers, e.g. with .astype('float32')")
            if header + count * dtype.itemsize != info.file_size:
                raise DataError(f"{what} claims shape {shape} but has {info.file_size - header} bytes; write it again")
        with archive.open(info) as stream:
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    except (ValueError, EOFError, zlib.error, RuntimeError) as error:
        # zipfile raises the last one for an encrypted member, and a kind of it for a compression that it lacks
        raise DataError(f"{what} is damaged ({error}); write it again with numpy.savez") from None


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"format version {version} is not 1.0 or 2.0")
    return shape, dtype, stream.tell()
