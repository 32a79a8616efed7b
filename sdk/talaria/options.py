"""``NAME=VALUE`` texts of the command line."""

from typing import Any

from talaria.errors import ConfigError
from talaria.foreign import shown


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
    """``NAME:OPTION=VALUE,OPTION=VALUE`` as the name and its options; NAME may read ``module:Name``.

    >>> taken_apart("trimmed_mean:f=2", "aggregator"), taken_apart("mypkg.mine:First:f=1", "aggregator")
    (('trimmed_mean', {'f': 2}), ('mypkg.mine:First', {'f': 1}))
    """
    name, _, rest = text.partition(":")
    second, _, options = rest.partition(":")
    if second and "=" not in second:
        return f"{name}:{second}", assignments(options.split(",") if options else None, flag)
    return name, assignments(rest.split(",") if rest else None, flag)


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
