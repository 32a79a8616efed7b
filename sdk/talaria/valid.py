"""Checks of single fields, for values that must be right from birth: errors name the field, the value, the mend."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from talaria.errors import ConfigError, some_of
from talaria.foreign import printed, shown

BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""


def whole(what: str, name: str, value: object, low: int, high: int = 2**53, *, none: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a whole number in ``low..high`` (or None, where ``none``)."""
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        rule = f"a whole number{', or left out' if none else ''}{by_item(value)}"
        raise ConfigError(f"{what}: {name}={shown(value)} must be {rule}")
    if value < low:
        raise ConfigError(f"{what}: {name}={shown(value)} must be at least {low}{', or left out' if none else ''}")
    if value > high:
        raise ConfigError(f"{what}: {name}={shown(value)} must be at most {high}")


def number(what: str, name: str, value: object, rule: str, *, low: float, high: float = 1e300) -> None:
    """Raise :class:`ConfigError`, saying ``rule``, unless ``value`` is a number in ``low..high`` (so no NaN)."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{what}: {name}={shown(value)} must be {rule}{by_item(value)}")


def by_item(value: object) -> str:
    """The mend of one of numpy's numbers that is none of Python's."""
    return "" if isinstance(value, int | float) or not hasattr(value, "item") else "; write its .item()"


def plain(value: object) -> bool:
    """Whether ``value`` is a number that is finite, a text, true, false or None."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 1 << 63)


def flag(what: str, name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what}: {name}={shown(value)} must be true or false")


def path(what: str, name: str, value: object) -> Path:
    """``value`` as a path. Raises :class:`ConfigError` unless it is a text or a path."""
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise ConfigError(f"{what}: {name}={shown(value)} must be a path, as text or pathlib.Path")
    return Path(value)


def among(what: str, name: str, value: object, known: Collection[str]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of the texts ``known``."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{what}: {name}={shown(value)} is unknown; use {' or '.join(map(repr, known))}")


def names(what: str, name: str, value: object, most: int) -> tuple[str, ...]:
    """``value``, names in a list or a text with commas, as a tuple. Raises :class:`ConfigError` unless it is one of at
    most ``most`` different ones, of 1 to 64 letters each."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    good = isinstance(found, list | tuple) and all(isinstance(one, str) and 1 <= len(one) <= 64 for one in found)
    if not good or len(found) > most or len({*found}) < len(found):  # type: ignore[arg-type, misc]
        raise ConfigError(
            f"{what}: {name}={shown(value)} must be at most {most} different names of 1 to 64 letters, in a list"
        )
    return tuple(found)  # type: ignore[arg-type]


def different(what: str, given: Sequence[str]) -> None:
    """Raise :class:`ConfigError` where one of ``given`` stands there twice."""
    for name, count in Counter(given).items():
        if count > 1:
            raise ConfigError(f"{what}: {shown(name)} stands there {count} times; give each a name of its own")


def only(what: str, given: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise :class:`ConfigError` for the first field of ``given`` whose name is not among ``known``."""
    for name, value in given.items():
        if name not in known:
            mend = nearest(str(name), known).strip(" ()") or f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{what}: {printed(str(name)[:80])}={shown(value)} is unknown; {mend}")


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'krum'?)`` where one of ``known`` looks like ``word``, else nothing."""
    near = difflib.get_close_matches(word[:80], list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True)
class Option:
    """One option of a class or function: the type that it declares, and its default (``MISSING``: it must be given)."""

    hint: Any
    default: Any = MISSING


@dataclass(frozen=True)
class Options:
    """The options that something takes, by name; ``more``: any others too."""

    known: Mapping[str, Option]
    more: bool = False

    def but(self, names: Collection[str]) -> Options:
        """All but these."""
        return Options({name: one for name, one in self.known.items() if name not in names}, self.more)

    def read(self, what: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` as the declared types have it: a whole number for a float, text for a path, a list for a tuple.

        Raises :class:`ConfigError`, beginning with ``what``, for an option that is unknown, missing, or of a wrong type
        (no number is NaN or infinite).
        """
        out = {}
        for name, value in given.items():
            if name not in self.known and not self.more:
                mend = f"it takes {some_of(list(self.known), 20)}" if self.known else "it takes none"
                raise ConfigError(f"{what}: option {shown(name)} is unknown{nearest(str(name), self.known)}; {mend}")
            hint = self.known[name].hint if name in self.known else Any
            out[name] = _fitted(value, hint)
            if out[name] is MISSING:
                mend = "; a command says it in double quotes" if hint is str else ""
                raise ConfigError(f"{what}: {name}={shown(value)} must be {spoken(hint)}{mend}")
        for name, option in self.known.items():
            if name not in given and option.default is MISSING:
                raise ConfigError(f"{what}: option {name!r} is missing; it must be {spoken(option.hint)}")
        return out


@lru_cache(maxsize=256)
def options_of(made: Callable[..., Any]) -> Options:
    """The options of a dataclass (its fields) or of anything else that is called (its parameters that have names)."""
    hints = _hints(made)
    if is_dataclass(made):
        return Options(
            {
                f.name: Option(
                    _hint(hints.get(f.name), f.default),
                    f.default if f.default_factory is MISSING else None,
                )
                for f in fields(made)
                if f.init
            }
        )
    try:
        taken = inspect.signature(made).parameters.values()
    except (ValueError, TypeError):  # written in C, it does not say
        return Options({}, more=True)
    empty = inspect.Parameter.empty
    known = {
        p.name: Option(_hint(hints.get(p.name), p.default), MISSING if p.default is empty else p.default)
        for p in taken
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return Options(known, more=any(p.kind is p.VAR_KEYWORD for p in taken))


def spoken(hint: Any) -> str:
    """A declared type in words."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if origin is Annotated:
        return spoken(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = dict.fromkeys(spoken(part) for part in get_args(hint))
        return " or ".join(sorted(parts, key=lambda part: part == _WORDS[NoneType]))
    if origin in (tuple, list):
        return "a list of whole numbers (9,10)" if get_args(hint)[:1] == (int,) else "a list"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "left out",
}


def _hints(made: Any) -> dict[str, Any]:
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, type) and not is_dataclass(made):
        made = made.__init__  # type: ignore[misc]
    try:
        return get_type_hints(made)
    except (NameError, AttributeError, TypeError):  # a name that only a type checker imports: the defaults tell
        return {}


def _hint(declared: Any, default: Any) -> Any:
    if declared is not None:
        return declared
    return type(default) if isinstance(default, bool | int | float | str) else Any


def _listed(value: Any, part: Any) -> Any:
    """What a command says of a list: ``a,b`` as texts, ``9,10`` or ``9`` as numbers; anything else as it is."""
    if part is str and isinstance(value, str):
        return value.split(",")
    if part in (int, float) and type(value) in (int, float):
        return (value,)
    if part in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            return [part(one) for one in value.split(",") if one]
    return value


def _fitted(value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` has it; ``MISSING`` where it does not fit. What no hint here says is taken as it is."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fitted(value, parts[0])
    if origin is Literal:
        return next((part for part in parts if type(part) is type(value) and part == value), MISSING)
    if origin in (Union, UnionType):
        return next((made for part in parts if (made := _fitted(value, part)) is not MISSING), MISSING)
    if origin is tuple:
        if parts[1:] == (...,):
            value = _listed(value, parts[0])
        if not isinstance(value, list | tuple):
            return MISSING
        wanted = parts[:1] * len(value) if parts[1:] == (...,) else parts
        made = tuple(map(_fitted, value, wanted)) if len(wanted) == len(value) else (MISSING,)
        return MISSING if any(one is MISSING for one in made) else made
    if hint is NoneType:
        return None if value is None else MISSING
    if hint is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        return float(value) if good else MISSING
    if hint is Path:
        return Path(value) if isinstance(value, str | Path) else MISSING
    if isinstance(value, bool) and hint in (int, str):
        return MISSING
    if hint is Any or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return value
    return value if isinstance(value, hint) else MISSING
