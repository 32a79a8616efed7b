"""Aggregators by name, and from the tables of a configuration file."""

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from talaria.aggregate.base import Aggregator
from talaria.aggregate.bucketing import Bucketed
from talaria.aggregate.buffered import FedBuff
from talaria.aggregate.clipping import CenteredClip
from talaria.aggregate.coordinatewise import Median, TrimmedMean
from talaria.aggregate.krum import Krum, MultiKrum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.rfa import RFA
from talaria.aggregate.serveropt import ServerAdam, ServerMomentum
from talaria.aggregate.wrap import Clipped
from talaria.errors import ConfigError
from talaria.valid import shown

AGGREGATORS: Mapping[str, type[Any]] = types.MappingProxyType(
    {
        "mean": MaskedMean,
        "masked_mean": MaskedMean,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "krum": Krum,
        "multi_krum": MultiKrum,
        "rfa": RFA,
        "centered_clip": CenteredClip,
        "bucketed": Bucketed,
        "clipped": Clipped,
        "server_momentum": ServerMomentum,
        "server_adam": ServerAdam,
        "fedbuff": FedBuff,
    }
)
"""Every aggregator by the name that configurations use."""


def load(spec: str | Mapping[str, Any]) -> Aggregator:
    """The aggregator that ``spec`` names: ``"median"``, or ``{"name": "fedbuff", "inner": {"name": "krum", "f": 2}}``.

    Raises :class:`~talaria.errors.ConfigError` on an unknown name or option, a missing one, or a wrong value.

    >>> load({"name": "median", "f": 2})
    Median(f=2, weighting='uniform', min_holders=None, keep='holders')
    """
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(_table(spec))
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"aggregator: name={shown(name)} must be one of {', '.join(AGGREGATORS)}")
    if name not in AGGREGATORS:
        raise ConfigError(
            f"aggregator {shown(name)} is unknown{_nearest(name, AGGREGATORS)}; use {', '.join(AGGREGATORS)}"
        )
    kind = AGGREGATORS[name]
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    for option in options:
        if option not in known:
            raise ConfigError(
                f"aggregator {shown(name)}: option {shown(option)} is unknown{_nearest(option, known)}; "
                f"use {', '.join(known)}"
            )
    for option, field in known.items():
        if option not in options and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"aggregator {shown(name)}: option {shown(option)} is missing; give it beside the name")
    values = {
        option: load(value) if option == "inner" else _typed(name, option, value, hints[option])
        for option, value in options.items()
    }
    made: Aggregator = kind(**values)
    return made


def _table(spec: object) -> Mapping[str, Any]:
    if not isinstance(spec, Mapping):
        raise ConfigError(f"aggregator: {shown(spec)} must be a name, or a table with a name and options")
    return spec


def _typed(owner: str, option: str, value: Any, hint: Any) -> Any:
    if not _fits(value, hint):
        raise ConfigError(f"aggregator {owner!r}: {option}={shown(value)} must be {_spoken(hint)}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint)


def _spoken(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_spoken(part) for part in get_args(hint))
    return {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "left out"}.get(
        hint, str(hint)
    )


def _nearest(word: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
