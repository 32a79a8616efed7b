"""Machine states as plain bytes: dataclasses of numbers, text, bytes, lists, sets and dicts, through msgpack.

A saved state is read back by the types that its class declares; anything else is :class:`StateError`.
"""

from __future__ import annotations

import types
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from talaria.errors import StateError, WireError
from talaria.wire.frames import unpack

FORMAT = 3
DEPTH = 16
T = TypeVar("T")


def dump(state: object) -> bytes:
    """``state`` (a dataclass) as bytes; equal states give equal bytes."""
    packed: bytes = msgpack.packb([FORMAT, _plain(state)], unicode_errors="replace")
    return packed


def load(cls: type[T], data: bytes) -> T:
    """The state that :func:`dump` wrote. Raises :class:`StateError` where it is damaged or of another format."""
    try:
        outer = unpack(data, cls.__name__, DEPTH)
    except WireError as why:
        raise StateError(f"saved {cls.__name__} is damaged: {why}; restore a backup or start anew") from None
    if not isinstance(outer, list) or len(outer) != 2 or outer[0] != FORMAT:
        raise StateError(f"saved {cls.__name__} is not of format {FORMAT}; restore a backup or start anew")
    state: T = _shaped(cls, outer[1], cls.__name__)
    return state


def of_this_life() -> dict[str, bool]:
    """Metadata of a field that is not saved, and begins anew from its default."""
    return {"saved": False}


def _kept(kind: Any) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.metadata.get("saved", True)]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in _kept(value)}
    if isinstance(value, dict):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _shaped(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in args if a is not type(None))
        return _shaped(kind, value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        names = [f.name for f in _kept(kind)]
        if not isinstance(value, dict) or sorted(value) != sorted(names):
            raise StateError(f"saved {where} does not have the fields of {kind.__name__}; restore a backup")
        return kind(**{n: _shaped(hints[n], value[n], f"{where}.{n}") for n in names})
    if origin in (dict, list, set, tuple):
        if not isinstance(value, list):
            raise StateError(f"saved {where} is damaged: not a list; restore a backup")
        if origin is dict:
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
                raise StateError(f"saved {where} is damaged: not pairs; restore a backup")
            return {_shaped(args[0], k, where): _shaped(args[1], v, f"{where}[{k}]") for k, v in value}
        if origin is tuple:
            members = args if args[-1:] != (...,) else (args[0],) * len(value)
            if len(members) != len(value):
                raise StateError(f"saved {where} is damaged: {len(value)} entries; restore a backup")
            return tuple(_shaped(a, v, where) for a, v in zip(members, value, strict=True))
        return origin(_shaped(args[0], v, where) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise StateError(f"saved {where} is damaged: {type(value).__name__}, not {kind.__name__}; restore a backup")
    return value
