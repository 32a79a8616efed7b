"""Checks of single fields, for values that must be right from birth: errors name the field, the value, the mend."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from talaria.errors import ConfigError


def shown(value: object) -> str:
    """``value`` as a message can hold it: at most some 80 characters, whatever it is and however deep it nests."""
    try:
        text = repr(value) if not isinstance(value, str) else repr(value[:80])
    except (RecursionError, ValueError):  # an int of more digits than Python prints raises the second
        return f"<{type(value).__name__}>"
    return text if len(text) <= 84 else f"{text[:80]}..."


def whole(what: str, name: str, value: object, low: int, high: int = 2**53, *, none: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a whole number in ``low..high`` (or None, where ``none``)."""
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{what}: {name}={shown(value)} must be a whole number{', or left out' if none else ''}")
    if value < low:
        raise ConfigError(f"{what}: {name}={shown(value)} must be at least {low}{', or left out' if none else ''}")
    if value > high:
        raise ConfigError(f"{what}: {name}={shown(value)} must be at most {high}")


def number(what: str, name: str, value: object, rule: str, *, low: float, high: float = 1e300) -> None:
    """Raise :class:`ConfigError`, saying ``rule``, unless ``value`` is a number in ``low..high`` (so no NaN)."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{what}: {name}={shown(value)} must be {rule}")


def plain(value: object) -> bool:
    """Whether ``value`` is a number that is finite, a text, true, false or None."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 1 << 63)


def flag(what: str, name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what}: {name}={shown(value)} must be true or false")


def among(what: str, name: str, value: object, known: Collection[str]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of the texts ``known``."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{what}: {name}={shown(value)} is unknown; use {' or '.join(map(repr, known))}")


def only(what: str, given: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise :class:`ConfigError` for the first field of ``given`` whose name is not among ``known``."""
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name)[:80], known, 1)
            mend = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{what}: {str(name)[:80]}={shown(value)} is unknown; {mend}")
