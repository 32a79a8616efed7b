"""Reads tensors from torch's file format of before 2020, without running anything that the file says.

Such a file is five pickles and then the raw storages. Unpickling would call whatever the file names. This reader
only disassembles (``pickletools``), keeps a stack of plain values, knows four names, and refuses every other one.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any

import torch
from torch import Tensor

from talaria.errors import StateError

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_DTYPES = {"torch FloatStorage": torch.float32, "torch LongStorage": torch.int64}
_ORDERED_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_CONSTANTS = {"NONE": None, "NEWFALSE": False, "NEWTRUE": True}


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass(frozen=True)
class _View:
    """A tensor before its storage is read: storage key, element kind, elements, first element, sizes, strides."""

    key: str
    dtype: torch.dtype
    elements: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Mark:
    pass


def read(data: bytes) -> dict[str, Tensor]:
    """The named float32 and int64 tensors of a state dict, in their order.

    Raises :class:`~talaria.errors.StateError` for another format and for anything that a plain state dict does not
    need; storages are checked against the bytes that are there before they are read.
    """
    stream = BytesIO(data)
    try:
        magic, version, system = (_machine(stream) for _ in range(3))
        if magic != _MAGIC or version != _VERSION or system.get("little_endian") is not True:
            raise StateError("weights: not a little-endian torch file of the old format; get the published file again")
        views = _machine(stream)
        keys = _machine(stream)
        storages = _storages(stream, data, views, keys)
        return {name: _tensor(view, storages[view.key]) for name, view in views.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise StateError(f"weights: the file is damaged ({error}); get the published file again") from error


def _storages(stream: BytesIO, data: bytes, views: dict[str, _View], keys: list[str]) -> dict[str, Tensor]:
    wanted = {view.key: view for view in views.values()}
    if sorted(keys) != sorted(wanted):
        raise ValueError("storages do not match the tensors")
    out = {}
    at = stream.tell()
    for key in keys:
        view = wanted[key]
        elements = int.from_bytes(data[at : at + 8], "little")
        size = elements * view.dtype.itemsize
        at += 8
        if elements != view.elements or not 0 < size <= len(data) - at:
            raise ValueError(f"storage {key} has {elements} elements")
        out[key] = torch.frombuffer(bytearray(data[at : at + size]), dtype=view.dtype)
        at += size
    return out


def _tensor(view: _View, storage: Tensor) -> Tensor:
    last = view.offset + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    if min((view.offset, *view.size, *view.stride)) < 0 or prod(view.size) > view.elements or last >= view.elements:
        raise ValueError(f"a tensor of {view.size} does not fit its storage of {view.elements}")
    return storage.as_strided(view.size, view.stride, view.offset).clone()


def _machine(stream: BytesIO) -> Any:
    """The value of one pickle, built from plain values alone."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for op, argument, _ in pickletools.genops(stream):
        name = op.name
        if name in ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            if argument not in (_ORDERED_DICT, _TENSOR, *_DTYPES):
                raise StateError(f"weights: the file asks for {argument!r}; only plain state dicts are read")
            stack.append(_Name(argument))
        elif name in ("EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list}[name]())
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "TUPLE":
            stack.append(tuple(_to_mark(stack)))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "APPENDS":
            items = _to_mark(stack)
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = _to_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "BINPERSID":
            stack.append(_storage_of(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_made(stack.pop(), arguments))
        elif name == "BUILD":
            stack.pop()  # the state dict's version notes
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise StateError(f"weights: the file holds {name}; only plain state dicts are read")
    raise ValueError("a pickle without an end")


def _to_mark(stack: list[Any]) -> list[Any]:
    at = max(i for i, value in enumerate(stack) if isinstance(value, _Mark))
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _storage_of(persistent: Any) -> tuple[str, torch.dtype, int]:
    kind, dtype, key, _device, elements, _view = persistent
    if kind != "storage" or not isinstance(key, str) or not isinstance(elements, int):
        raise ValueError("an unknown persistent value")
    return key, _DTYPES[dtype.name], elements


def _made(what: _Name, arguments: tuple[Any, ...]) -> Any:
    if what.name == _ORDERED_DICT and arguments == ():
        return {}
    if what.name == _TENSOR:
        (key, dtype, elements), offset, size, stride = arguments[:4]
        return _View(key, dtype, elements, int(offset), tuple(map(int, size)), tuple(map(int, stride)))
    raise StateError(f"weights: the file calls {what.name!r}; only plain state dicts are read")
