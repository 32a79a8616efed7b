"""Datasets by name."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from talaria.data import arrays, cifar100, fashion_mnist, smartwatch
from talaria.data.federated import Federated
from talaria.errors import ConfigError

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
    hints = get_type_hints(loader.func if isinstance(loader, partial) else loader)
    fitted = {key: _fitted(value, hints[key], f"dataset {name!r}: {key}") for key, value in options.items()}
    if fitted.get("seed", 0) < 0:
        raise ConfigError(f"dataset {name!r}: seed={fitted['seed']} must be at least 0")
    return loader(**fitted)


def options_of(name: str) -> tuple[str, ...]:
    """The options that :func:`load` takes for ``name``."""
    return _find(name)[1]


def _fitted(value: Any, hint: Any, what: str) -> Any:
    """``value`` as the loader declares it; options come from command lines and files, where a path is text."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    if isinstance(value, str | Path) and Path in kinds:
        return Path(value)
    if isinstance(value, list | tuple) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(_fitted(v, int, what) for v in value)
    plain = {kind for kind in kinds if kind in (bool, int, float, str)}
    if isinstance(value, int) and not isinstance(value, bool) and plain & {int, float}:
        return value
    if type(value) in plain and (not isinstance(value, float) or math.isfinite(value)):
        return value
    wanted = " or ".join("none" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ConfigError(f"{what}={value!r} must be {wanted}")


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
