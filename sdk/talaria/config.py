"""Reads settings from TOML: every field is asked for by name and type, and whatever nobody asked for is refused."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from talaria.errors import ConfigError
from talaria.foreign import shown

LIMIT = 1 << 20
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_Default = TypeVar("_Default")
_NEEDED: Any = object()


def read_toml(path: Path) -> Section:
    """The tables of a TOML file. Raises :class:`ConfigError` naming the file and the line that is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise ConfigError(f"{path}: is no settings file; one has at most {LIMIT} bytes")
        return Section(tomllib.loads(data.decode("utf-8-sig")), str(path))
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the .toml in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML ({error}); mend that line") from None


def write_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables by their dotted names, with plain values and lists of them; fields that are None are left out.

    >>> print(write_toml({"run": {"rounds": 3, "seed": None}, "run.recipe": {"lr": 0.1}}))
    [run]
    rounds = 3
    <BLANKLINE>
    [run.recipe]
    lr = 0.1
    <BLANKLINE>
    """
    parts = []
    for name, fields in tables.items():
        lines = [f"{_key(key)} = {_value(value)}" for key, value in fields.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    """As JSON, but without its pairs of escapes for one sign (an emoji), and with DEL escaped: so TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class Section:
    """One table. Ask for each field with its type, then call :meth:`done`.

    >>> s = Section({"port": 1883, "prot": 1}, "fleet.toml", "broker")
    >>> s.whole("port", 0, low=0, high=65535)
    1883
    >>> s.done()
    Traceback (most recent call last):
    talaria.errors.ConfigError: fleet.toml: [broker] prot=1 is unknown; did you mean 'port'?
    """

    def __init__(self, values: Mapping[str, Any], file: str, name: str = "", nearly: str = "") -> None:
        self.values, self.file, self.name, self._nearly = dict(values), file, name, nearly
        self._asked: set[str] = set()

    def bad(self, field: str, rule: str) -> ConfigError:
        """The error to raise for a field whose value breaks ``rule``."""
        where = f"[{self.name}] " if self.name else ""
        name = field if len(field) <= 80 else f"{field[:80]}..."
        if field not in self.values:
            near = difflib.get_close_matches(field, [one for one in self.values if one not in self._asked], 1)
            told = (
                f" (is it what {near[0][:80]}={shown(self.values[near[0]])} is meant to be?)" if near else self._nearly
            )
            return ConfigError(f"{self.file}: {where}{name} is missing; it {rule}{told}")
        return ConfigError(f"{self.file}: {where}{name}={shown(self.values[field])} {rule}")

    @overload
    def text(self, field: str, default: str = ..., *, among: Sequence[str] = ...) -> str: ...
    @overload
    def text(self, field: str, default: None, *, among: Sequence[str] = ...) -> str | None: ...
    def text(self, field: str, default: str | None = _NEEDED, *, among: Sequence[str] = ()) -> str | None:
        """A text that is not empty."""
        value = self._get(field, default, "must be text in quotes")
        if field not in self.values:
            return default
        if not isinstance(value, str):
            raise self.bad(field, "must be text in quotes")
        if not value or "\0" in value:
            raise self.bad(field, "is empty; write what it is meant to be" if not value else "holds a zero byte")
        if among and value not in among:
            raise self.bad(field, f"must be one of {', '.join(map(repr, among))}")
        return value

    def whole(self, field: str, default: int = _NEEDED, *, low: int = 0, high: int = 2**53) -> int:
        """A whole number within bounds."""
        rule = f"must be a whole number in {low}..{high}" if high < 2**53 else f"must be a whole number, {low} or more"
        value = self._get(field, default, rule)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(field, rule)
        return value

    def number(self, field: str, default: float = _NEEDED, *, low: float = 0.0, high: float = 1e9) -> float:
        """A number within bounds."""
        rule = f"must be a number in {low:g}..{high:g}"
        value = self._get(field, default, rule)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.bad(field, rule)
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """true or false."""
        value = self._get(field, default, "must be true or false")
        if type(value) is not bool:
            raise self.bad(field, "must be true or false")
        return value

    def names(self, field: str, default: Sequence[str] = _NEEDED) -> tuple[str, ...]:
        """A list of different texts."""
        rule = "must be a list of different texts in quotes"
        value = self._get(field, default, rule)
        good = isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value)
        if not good or len(set(value)) != len(value):
            raise self.bad(field, rule)
        return tuple(value)

    @overload
    def path(self, field: str, default: str = ...) -> Path: ...
    @overload
    def path(self, field: str, default: None) -> Path | None: ...
    def path(self, field: str, default: str | None = _NEEDED) -> Path | None:
        """A path; relative ones are meant from the settings file's folder."""
        text = self.text(field, default)
        return None if text is None else Path(self.file).parent / text

    def table(self, field: str) -> Section:
        """A table below this one; empty where it is not given."""
        value = self._get(field, {}, "must be a table")
        if not isinstance(value, dict):
            raise self.bad(field, "must be a table")
        name, nearly = f"{self.name}.{field}" if self.name else field, ""
        if field not in self.values:
            tables = [one for one, inside in self.values.items() if isinstance(inside, dict) and one not in self._asked]
            near = difflib.get_close_matches(field, tables, 1)
            nearly = f" (is [{name}] what [{near[0][:80]}] is meant to be?)" if near else ""
        return Section(value, self.file, name, nearly)

    def raw(self, field: str, default: _Default) -> Any | _Default:
        """The value as it stands, for whoever checks it."""
        return self._get(field, default, "")

    def done(self) -> None:
        """Raise for the first field that nobody asked for."""
        for field in self.values:
            if field not in self._asked:
                near = difflib.get_close_matches(field, self._asked, 1)
                mend = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(self._asked)) or 'none'}"
                raise self.bad(field, f"is unknown; {mend}")

    def _get(self, field: str, default: Any, rule: str) -> Any:
        self._asked.add(field)
        if field in self.values:
            return self.values[field]
        if default is _NEEDED:
            raise self.bad(field, rule)
        return default
