"""Machine states as plain bytes: dataclasses of numbers, text, bytes, lists, sets and dicts, through msgpack.

A saved state is read back by the types that its class declares; anything else is :class:`StateError`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from talaria.errors import StateError, WireError
from talaria.wire.frames import unpack

FORMAT = 3
DEPTH = 16
T = TypeVar("T")


def dump(state: object) -> bytes:
    """``state`` (a dataclass) as bytes; equal states give equal bytes."""
    kind: Any = type(state)
    way = _way(kind)
    packed: bytes = msgpack.packb([FORMAT, state if way is None else way(state)], unicode_errors="replace")
    return packed


class Saver:
    """Dumps of a state that is saved again and again, to the bytes of :func:`dump`. What its dicts hold of dataclasses,
    which is thousands of devices and their parts in rounds, is packed anew only where it has changed since."""

    def __init__(self) -> None:
        self._last: _Known = {}
        self._packer = msgpack.Packer(unicode_errors="replace")

    def dump(self, state: object) -> bytes:
        """``state`` (a dataclass) as bytes."""
        parts = [self._packer.pack_array_header(2), self._packer.pack(FORMAT)]
        self._fields(state, type(state), self._last, parts)
        return b"".join(parts)

    def _fields(self, value: object, kind: Any, known: _Known, parts: list[bytes]) -> None:
        """Adds what ``value`` is packed to; of its dicts of dataclasses, what is ``known`` from the last time."""
        pack, plan = self._packer.pack, _plan(kind)
        parts.append(self._packer.pack_map_header(len(plan)))
        for name, way, of in plan:
            one = getattr(value, name)
            parts.append(pack(name))
            if of is None:
                parts.append(pack(one if way is None else way(one)))
            else:
                known[name] = self._entries(one, known.get(name, {}), *of, parts)

    def _entries(
        self, value: dict[Any, Any], last: dict[Any, Any], of_key: Any, of_value: Any, parts: list[bytes]
    ) -> dict[Any, Any]:
        parts.append(self._packer.pack_array_header(len(value)))
        if any(of for _, _, of in _plan(of_value)):
            return self._deeper(value, last, of_key, of_value, parts)
        look, ways, now = _look(of_value), [_way(of_key), _way(of_value)], dict[Any, tuple[Any, bytes]]()
        for key, one in value.items():
            seen = one if look is None else look(one)
            was = last.get(key)
            if was is None or was[0] != seen:
                was = (seen, self._packer.pack(_places(ways, (key, one))))
            now[key] = was
        parts += [data for _, data in now.values()]
        return now

    def _deeper(
        self, value: dict[Any, Any], last: dict[Any, _Known], of_key: Any, of_value: Any, parts: list[bytes]
    ) -> dict[Any, _Known]:
        """Of entries that hold such dicts themselves, as rounds their devices."""
        way, now = _way(of_key), dict[Any, _Known]()
        for key, one in value.items():
            now[key] = last.get(key, {})
            parts += [self._packer.pack_array_header(2), self._packer.pack(key if way is None else way(key))]
            self._fields(one, of_value, now[key], parts)
        return now


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


Way = Callable[[Any], Any]
_Known = dict[str, dict[Any, Any]]
"""By a field's name, of each entry of its dict: how it looked and its bytes, or what is known of its own fields."""


@cache
def _plan(kind: Any) -> list[tuple[str, Way | None, tuple[Any, Any] | None]]:
    """Of each field that is kept its name, how it becomes plain, and of a dict of dataclasses the types of its keys and
    values."""
    hints = get_type_hints(kind)
    found = list[tuple[str, Way | None, tuple[Any, Any] | None]]()
    for name in (f.name for f in _kept(kind)):
        origin, args = get_origin(hints[name]), get_args(hints[name])
        found.append((name, _way(hints[name]), args if origin is dict and is_dataclass(args[1]) else None))
    return found


@cache
def _way(kind: Any) -> Way | None:
    """How a value of this declared type becomes plain; None where msgpack packs it as it is. Found once for a type: the
    state of a large fleet is thousands of small objects, and is saved often."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (_way(a) for a in args if a is not type(None))
        return None if inner is None else partial(_if_any, inner)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        ways = [(f.name, _way(hints[f.name])) for f in _kept(kind)]
        names = tuple(name for name, _ in ways)
        deeper = tuple((name, way) for name, way in ways if way is not None)
        return partial(_fields, names, attrgetter(*names) if len(names) > 1 else None, deeper)
    if origin is dict:
        return partial(_pairs, _way(args[0]), _way(args[1]))
    if origin is set:
        return sorted
    if origin in (list, tuple):
        inners = [_way(a) for a in args if a is not ...]
        first = inners[0] if inners else None
        if first is not None and (origin is list or args[-1] is ...):
            return partial(_each, first)
        return partial(_places, inners) if any(inners) else None
    return None


def _if_any(way: Way, value: Any) -> Any:
    return None if value is None else way(value)


def _fields(names: tuple[str, ...], get: Way | None, deeper: tuple[tuple[str, Way], ...], value: Any) -> Any:
    plain = dict(zip(names, get(value) if get else (getattr(value, names[0]),), strict=True)) if names else {}
    for name, way in deeper:
        plain[name] = way(plain[name])
    return plain


def _pairs(of_key: Way | None, of_value: Way | None, value: dict[Any, Any]) -> Any:
    keys = value if of_key is None else map(of_key, value)
    values = value.values() if of_value is None else map(of_value, value.values())
    return list(zip(keys, values, strict=True))


def _each(way: Way, value: Any) -> Any:
    return [way(v) for v in value]


def _places(ways: list[Way | None], value: Any) -> Any:
    return [v if way is None else way(v) for v, way in zip(value, ways, strict=True)]


@cache
def _look(kind: Any) -> Way | None:
    """How to see of a value of this declared type whether it has changed in place since, for a fifth of what packing it
    takes; None where it cannot change."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (_look(a) for a in args if a is not type(None))
        return None if inner is None else partial(_if_any, inner)
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return None
        flat = _flat(kind)
        get = attrgetter(*(name for name, _ in flat), flat[0][0])  # one name alone would give no tuple
        deeper = [(place, look) for place, (_, look) in enumerate(flat) if look is not None]
        return partial(_looks, get, deeper) if deeper else get
    if origin is dict:
        return partial(_looks_of_items, _look(args[1]))
    if origin in (list, set):
        inner = _look(args[0])
        return (list if origin is list else frozenset) if inner is None else partial(_each, inner)
    return None  # a tuple too: none here holds what can change


def _flat(kind: Any) -> list[tuple[str, Way | None]]:
    """The fields of a dataclass, and in place of each that is one itself that one's, as ``inner.name``; and how to look
    at each."""
    hints, found = get_type_hints(kind), list[tuple[str, Way | None]]()
    for name in (f.name for f in _kept(kind)):
        look = _look(hints[name])
        if look is not None and is_dataclass(hints[name]):
            found += [(f"{name}.{inner}", inner_look) for inner, inner_look in _flat(hints[name])]
        else:
            found.append((name, look))
    return found


def _looks(get: Way, deeper: Sequence[tuple[int, Way]], value: Any) -> Any:
    found = list(get(value))
    for place, look in deeper:
        found[place] = look(found[place])
    return found


def _looks_of_items(look: Way | None, value: dict[Any, Any]) -> Any:
    return [*value, *(value.values() if look is None else map(look, value.values()))]


@cache
def _expected(kind: Any) -> tuple[dict[str, Any], set[str], set[str]]:
    """The types of its fields, those that a saved one must have, and those that it may have."""
    kept = _kept(kind)
    needed = {f.name for f in kept if f.default is MISSING and f.default_factory is MISSING}
    return get_type_hints(kind), needed, {f.name for f in kept}


def _shaped(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in args if a is not type(None))
        return _shaped(kind, value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        hints, needed, known = _expected(kind)
        # What was added since a state was saved has a default: an update of Talaria in mid-round loses nothing.
        if not isinstance(value, dict) or not needed <= value.keys() <= known:
            raise StateError(f"saved {where} does not have the fields of {kind.__name__}; restore a backup")
        return kind(**{n: _shaped(hints[n], one, f"{where}.{n}") for n, one in value.items()})
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
