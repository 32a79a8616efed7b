"""Named tensors as bytes in the safetensors layout, read by a parser that trusts nothing.

``u64 header length | JSON header | raw little-endian values``, in one piece without holes. The same tensors
always give the same bytes. A file written here opens in every safetensors reader.

numpy has no bfloat16: here its values are uint16 arrays, the upper halves of float32's bits, and every uint16 array is
bfloat16 in a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from talaria.errors import ConfigError, TooLarge, WireError
from talaria.foreign import parsed, shown
from talaria.tensors import Array, Tensors

MAX_HEADER = 2**20
MAX_DIMS = 8
MAX_NAME = 200
META_HEADER, ENTRY_HEADER = 2**16, 2**11
"""Bytes of a header at most: for its metadata, and for each tensor (a name may be escaped to six times its length)."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FOREIGN = (
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"PK\x03\x04", "a zip archive (torch.save or npz)"),
    (b"\x93NUMPY", "a numpy file"),
)


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies, checked but not yet read."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    raw: memoryview = field(repr=False)

    def array(self) -> Array:
        """A copy of the values."""
        if self.dtype == np.bool_ and bool((np.frombuffer(self.raw, np.uint8) > 1).any()):
            raise WireError("a truth value is neither 0 nor 1")
        return np.array(np.frombuffer(self.raw, self.dtype)).reshape(self.shape)


def pack(tensors: Tensors, meta: Mapping[str, str] | None = None) -> bytes:
    """The arrays (of any stride) and ``meta`` as bytes. Raises :class:`ConfigError` for a dtype or name
    that the layout cannot hold."""
    names = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    entries = _entries(tuple((name, tensors[name].dtype, tensors[name].shape) for name in names))
    about = [f'"__metadata__":{_text(dict(sorted(meta.items())))}'] if meta else []
    text = f"{{{','.join([*about, *entries])}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ConfigError(f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {MAX_HEADER}")
    values = (np.ascontiguousarray(tensors[name]).data for name in names)
    return b"".join((struct.pack("<Q", len(text)), text, *values))


@lru_cache(maxsize=8)
def _entries(specs: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> tuple[str, ...]:
    """What a header says of tensors that lie behind each other. Kept, as a fleet's updates are of few forms."""
    found, offset = list[str](), 0
    for name, dtype, shape in specs:
        if dtype not in NAMES or name == "__metadata__" or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(f"tensor {name[:80]!r} of {dtype} cannot be stored; use one of {', '.join(DTYPES)}")
        end = offset + math.prod(shape) * dtype.itemsize
        about = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        found.append(f"{_text(name)}:{_text(about)}")
        offset = end
    return tuple(found)


_text = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def entries_of(tensors: Tensors) -> dict[str, Entry]:
    """The entries that :func:`unpack` finds in what :func:`pack` made of ``tensors``; they share memory with those that
    are contiguous."""
    flat = {name: np.ascontiguousarray(value).reshape(-1).view(np.uint8).data for name, value in tensors.items()}
    return {name: Entry(value.dtype, value.shape, flat[name]) for name, value in tensors.items()}


def unpack(data: bytes, *, most: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries and metadata of ``data``, at most ``most`` tensors, without copying a value.

    Raises :class:`TooLarge` for a header above 1 MiB or too many tensors, :class:`WireError` for everything
    that is not exactly one well-formed file: foreign formats, holes, overlaps, wrong sizes, doubled names.
    """
    size = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if size > MAX_HEADER or len(data) < 8:  # a header's length may begin as another format's mark does
        for magic, what in _FOREIGN:
            if data.startswith(magic):
                raise WireError(f"this is {what}, not tensors in the safetensors layout; it is never opened")
    if len(data) < 8:
        raise WireError(f"{len(data)} bytes are too few for tensors; truncated")
    largest = min(MAX_HEADER, META_HEADER + most * ENTRY_HEADER)
    if size > largest:
        raise TooLarge(f"declares a header of {size} bytes, above {largest}; refused unread")
    if 8 + size > len(data):
        raise WireError(f"truncated: {len(data)} bytes cannot hold a header of {size}")
    header = _json(data[8 : 8 + size], "tensor header")
    if not isinstance(header, dict):
        raise WireError("the tensor header is not a map")
    meta = header.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise WireError("the metadata is not a map of texts")
    if len(header) > most:
        raise TooLarge(f"declares {len(header)} tensors, above {most}")
    content = memoryview(data)[8 + size :]
    found = {name: _entry(name, value, content) for name, value in header.items()}
    end = 0
    for start, stop, name in sorted((*v["data_offsets"], n) for n, v in header.items()):
        if start != end:
            raise WireError(f"tensor {name[:80]!r} begins at {start}, not at {end}: a hole or an overlap")
        end = stop
    if end != len(content):
        raise WireError(f"{len(content) - end} bytes follow the last tensor" if end < len(content) else "truncated")
    return found, meta


def _entry(name: str, value: Any, content: memoryview) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"tensor {name[:80]!r} needs dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None or not 0 < len(name) <= MAX_NAME:
        raise WireError(f"tensor {name[:80]!r}: dtype {shown(value['dtype'], 20)} or its name is not allowed")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(type(d) is int and d >= 0 for d in shape):
        raise WireError(f"tensor {name[:80]!r}: shape {_figures(shape)} must be at most {MAX_DIMS} whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int for o in offsets):
        raise WireError(f"tensor {name[:80]!r}: data_offsets {_figures(offsets)} must be two numbers")
    start, stop = offsets
    if not 0 <= start <= stop <= len(content) or stop - start != math.prod(shape) * dtype.itemsize:
        raise WireError(f"tensor {name[:80]!r}: bytes {start}..{stop} do not hold shape {_figures(shape)} of {dtype}")
    return Entry(dtype, tuple(shape), content[start:stop])


def _figures(value: Any) -> str:
    """The beginning of a list of numbers as an error quotes it."""
    return f"[{', '.join(map(shown, value[: MAX_DIMS + 1]))}]" if isinstance(value, list) else shown(value)


def _json(text: bytes, what: str) -> Any:
    try:
        return parsed(text.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except ValueError as why:
        raise WireError(f"{what}: not valid JSON ({str(why)[:80]})") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise WireError(f"name {twice[:80]!r} stands twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise WireError(f"{text} is not a number")


def parse_meta(meta: Mapping[str, str], key: str) -> dict[str, Any]:
    """The JSON map under ``key`` of the metadata; :class:`WireError` where there is none."""
    value = _json(meta.get(key, "").encode("utf-8", "surrogatepass"), f"metadata {key!r}")
    if not isinstance(value, dict):
        raise WireError(f"metadata {key!r} is not a map")
    return value
