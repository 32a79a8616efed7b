"""``NAME=VALUE`` texts of the command line."""

from typing import Any

from talaria.errors import ConfigError
from talaria.valid import shown


def assignments(texts: list[str] | None, flag: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dict; values become bool, int or float where they read as one."""
    out: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {shown(text)} must read NAME=VALUE")
        out[name.strip()] = _value(value.strip())
    return out


def taken_apart(text: str, flag: str) -> tuple[str, dict[str, Any]]:
    """``NAME:OPTION=VALUE,OPTION=VALUE`` as the name and its options."""
    name, _, options = text.partition(":")
    return name, assignments(options.split(",") if options else None, flag)


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
