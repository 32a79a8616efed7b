"""Reads a numpy file that holds Python objects, without executing anything that it carries.

Such a file is a pickle, and a pickle may name any function and call it. Here it may name five things, and each
stands for a function of this module or a plain numpy type: an array, a dtype, and the bytes of Python 2 text.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from talaria.errors import DataError

_LIMIT = 1 << 28


def _empty(kind: type, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """What numpy's own ``_reconstruct`` does, for plain arrays only: the state that follows fills it."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"{kind!r} is not a plain array")
    if int(np.prod(shape, dtype=np.float64)) > _LIMIT:
        raise pickle.UnpicklingError(f"an array of shape {shape} is too large")
    return np.ndarray(shape, dtype)


def _encode(text: str, codec: str) -> bytes:
    """Python 2 bytes are pickled as latin-1 text that is encoded again."""
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"codec {codec!r} is not expected")
    return text.encode("latin-1")


_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("numpy._core.multiarray", "_reconstruct"): _empty,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    """Nothing is imported: each admitted name is looked up in a table, every other is refused."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"it asks for the outside object {pid!r}")


def read_object(data: bytes, name: str) -> Any:
    """The object in the bytes of a version 1.0 ``.npy`` file that holds one 0-dimensional object array.

    :class:`DataError`: not such a file, damaged, or asking for anything but arrays and text. ``name`` stands in
    the message. Callers check the bytes' sha256 first; this reader is the second wall, not the first.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"format version {version} instead of (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if shape != () or dtype != np.dtype(object):
            raise ValueError(f"an array of {dtype} {shape} instead of one object")
        array = _Reader(stream).load()
        if not isinstance(array, np.ndarray) or array.shape != () or array.dtype != np.dtype(object):
            raise ValueError("the pickle inside is not one object")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{name}: refused, {error}; restore the original file") from None
    return array.item()
