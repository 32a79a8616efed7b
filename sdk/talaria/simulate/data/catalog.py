"""Datasets by name."""

import inspect
from collections.abc import Callable
from typing import Any

from talaria.errors import ConfigError
from talaria.simulate.data import smartwatch
from talaria.simulate.data.federated import Federated

NAMES = ("smartwatch",)
"""What :func:`load` understands; FILE stands for a path."""


def load(name: str, **options: Any) -> Federated:
    """The dataset called ``name``, one of :data:`NAMES`, under that dataset's own options.

    :class:`ConfigError`: the name or an option is unknown. :class:`DataError`: the data is missing or unfit.
    """
    loader = _loader(name)
    known = [p for p in inspect.signature(loader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    valid = [p.name for p in known]
    for option in options:
        if option not in valid:
            raise ConfigError(f"dataset {name!r}: option {option!r} is unknown; use one of {valid}")
    return loader(**options)


def _loader(name: str) -> Callable[..., Federated]:
    plain: dict[str, Callable[..., Federated]] = {"smartwatch": smartwatch.load}
    if name in plain:
        return plain[name]
    kind, _, file = name.partition(":")
    del kind, file
    raise ConfigError(f"dataset {name!r} is unknown; use one of {', '.join(NAMES)}")
