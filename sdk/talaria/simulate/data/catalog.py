"""Datasets by name."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from talaria.errors import ConfigError
from talaria.simulate.data import arrays, cifar100, fashion_mnist, smartwatch
from talaria.simulate.data.federated import Federated

NAMES = ("smartwatch", "fashion-mnist", "npz:FILE", "cifar100:FILE.npz")
"""What :func:`load` understands; FILE stands for a path."""

_PLAIN: dict[str, Callable[..., Federated]] = {"smartwatch": smartwatch.load, "fashion-mnist": fashion_mnist.load}
_FROM_FILE: dict[str, Callable[..., Federated]] = {"npz": arrays.load, "cifar100": cifar100.load}


def load(name: str, **options: Any) -> Federated:
    """The dataset called ``name``, one of :data:`NAMES`, under that dataset's own options.

    :class:`ConfigError`: the name or an option is unknown. :class:`DataError`: the data is missing or unfit.
    """
    loader, valid = _find(name)
    for option in options:
        if option not in valid:
            raise ConfigError(f"dataset {name!r}: option {option!r} is unknown; use one of {', '.join(valid)}")
    if options.get("seed", 0) < 0:
        raise ConfigError(f"dataset {name!r}: seed={options['seed']} must be at least 0")
    return loader(**options)


def options_of(name: str) -> tuple[str, ...]:
    """The options that :func:`load` takes for ``name``."""
    return _find(name)[1]


def _find(name: str) -> tuple[Callable[..., Federated], tuple[str, ...]]:
    if name in _PLAIN:
        loader = _PLAIN[name]
        return loader, tuple(inspect.signature(loader).parameters)
    kind, _, file = name.partition(":")
    if kind in _FROM_FILE:
        if not file:
            raise ConfigError(f"dataset {name!r} names no file; write {kind}:PATH.npz")
        loader = _FROM_FILE[kind]
        taken = tuple(p for p in inspect.signature(loader).parameters if p != "path")
        return partial(loader, path=Path(file)), taken
    raise ConfigError(f"dataset {name!r} is unknown; use one of {', '.join(NAMES)}")
