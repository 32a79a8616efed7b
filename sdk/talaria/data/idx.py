"""Reads the IDX format of MNIST's family, plain or gzipped, with the size known before anything is allocated."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from talaria.errors import DataError


def read(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The uint8 array of exactly ``shape`` in ``path``; :class:`DataError` where it is anything else."""
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
    size = int(np.prod(shape))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            head = stream.read(len(header))
            body = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); install the data set again") from None
    if head != header:
        raise DataError(f"{path}: begins with {head.hex()}, need {header.hex()} for uint8 {shape}; wrong file")
    if len(body) != size:
        more = "more" if len(body) > size else f"{len(body)}"
        raise DataError(f"{path}: holds {more} bytes after its header, need {size}; install the data set again")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)
