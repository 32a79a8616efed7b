"""Aggregators by name, and from the tables of a configuration file: built in, by entry point, or ``module:Name``."""

import types
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from talaria import plugins, valid
from talaria.aggregate.base import Aggregator
from talaria.aggregate.fedbuff import FedBuff
from talaria.aggregate.fedopt import ServerAdam, ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed
from talaria.aggregate.robust.centered_clipping import CenteredClip
from talaria.aggregate.robust.geometric_median import RFA
from talaria.aggregate.robust.krum import Krum, MultiKrum
from talaria.aggregate.robust.median import Median, TrimmedMean
from talaria.aggregate.wrappers import Clipped
from talaria.errors import ConfigError
from talaria.foreign import shown

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

GROUP = plugins.Group("aggregator", "talaria.aggregators", AGGREGATORS)
"""How aggregators are found by name: :data:`AGGREGATORS`, entry points, ``module:Name``."""


def load(spec: str | Mapping[str, Any]) -> Aggregator:
    """The aggregator that ``spec`` names: ``"median"``, or ``{"name": "fedbuff", "inner": {"name": "krum", "f": 2}}``.

    Raises :class:`~talaria.errors.ConfigError` on an unknown name or option, a missing one, a wrong value, and on what
    is no aggregator.

    >>> load({"name": "median", "f": 2})
    Median(f=2, min_holders=None, keep='holders', weighting='uniform')
    """
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(_table(spec))
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"aggregator: name={shown(name)} must be one of {', '.join(AGGREGATORS)}, or module:Name")
    kind, what = GROUP.find(name), f"aggregator {shown(name)}"
    if "inner" in options:
        options["inner"] = load(options["inner"])
    if isinstance(kind, type) or not isinstance(kind, Aggregator):
        return _made(what, kind, options)
    valid.Options({}).read(what, options)  # a rule that is made already
    return kind


def _made(what: str, kind: Any, options: Mapping[str, Any]) -> Aggregator:
    if not callable(kind):
        raise ConfigError(f"{what}: is a {type(kind).__name__}; name a class, or a function that makes an aggregator")
    known = valid.options_of(kind)
    if "inner" not in options and (one := known.known.get("inner")) and one.default is MISSING:
        raise ConfigError(f"{what}: option 'inner' is missing; name the rule that it stands around, such as inner=mean")
    return required(what, plugins.make(what, kind, **known.read(what, options)))


def required(what: str, made: Any) -> Aggregator:
    """``made``, which must be an aggregator. Raises :class:`~talaria.errors.ConfigError`, beginning with ``what``."""
    if isinstance(made, type):
        raise ConfigError(f"{what}: {made.__name__} is a class; make one, such as {made.__name__}()")
    for method in ("init", "apply"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"{what}: a {type(made).__name__} has no {method}; see talaria.aggregate.base.Aggregator")
    rule: Aggregator = made
    return rule


def _table(spec: object) -> Mapping[str, Any]:
    if not isinstance(spec, Mapping):
        raise ConfigError(f"aggregator: {shown(spec)} must be a name, or a table with a name and options")
    return spec
