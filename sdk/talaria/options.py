"""``NAME=VALUE`` texts of the command line."""

from collections.abc import Mapping
from typing import Any

from talaria.errors import ConfigError
from talaria.foreign import shown


def assignments(texts: list[str] | None, flag: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dict, each name once; values become bool, int or float where they read as one, and
    what stands in double quotes is text.

    >>> assignments(["subject=003", 'code="003"'], "--data-option")
    {'subject': 3, 'code': '003'}
    """
    out: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {shown(text)} must read NAME=VALUE")
        if name.strip() in out:
            raise ConfigError(f"{flag} {shown(text)}: {shown(name.strip())} is given twice; leave one out")
        out[name.strip()] = _value(value.strip())
    return out


def together(texts: list[str] | None, flag: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`assignments`, and ``own`` beside them: what options of their own say. A name stands in one of both."""
    out = assignments(texts, flag)
    said = {name: value for name, value in own.items() if value is not None}
    if both := sorted(out.keys() & said.keys()):
        raise ConfigError(f"{flag} {both[0]}={shown(out[both[0]])} and --{both[0]} say two things; leave one out")
    return out | said


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
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
