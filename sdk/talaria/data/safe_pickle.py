"""Reads a numpy file that holds Python objects, without executing anything that it carries.

Such a file is a pickle, and a pickle may name any function and call it. Here it may name the few that make up an
array, a dtype, and the bytes of Python 2 text, and each name stands for a function of this module.
"""

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from talaria.errors import DataError
from talaria.tensors import Array

_PLAIN = "numpy.ndarray"
"""Stands for the type, which a pickle may name but not call: ``ndarray(shape)`` would allocate any size."""


def _empty(kind: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """What numpy's own ``_reconstruct`` gives, for plain arrays only: nothing yet, the state that follows fills it."""
    if kind != _PLAIN or shape != (0,):
        raise pickle.UnpicklingError(f"it asks for {kind!r} of shape {shape}")
    del dtype
    return np.ndarray(shape, np.int8)


def _dtype(spec: str, *flags: object) -> np.dtype[Any]:
    if re.fullmatch(r"[Oiufb][1248]", spec) is None:
        raise pickle.UnpicklingError(f"dtype {spec!r} is not expected")
    del flags
    return np.dtype(spec)


def _encode(text: str, codec: str) -> bytes:
    """Python 2 bytes are pickled as latin-1 text that is encoded again."""
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"codec {codec!r} is not expected")
    return text.encode("latin-1")


_ADMITTED: dict[tuple[str, str], Callable[..., Any] | str] = {
    ("numpy", "ndarray"): _PLAIN,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("numpy._core.multiarray", "_reconstruct"): _empty,
    ("_codecs", "encode"): _encode,
}


_REFUSALS = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError),
    pickle.UnpicklingError,
)
"""What the unpickler and numpy raise on damaged bytes."""


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
    except _REFUSALS as error:
        raise DataError(f"{name}: refused, {error}; restore the original file") from None
    return array.item()
