"""Datasets by name: Talaria's own, an entry point's in ``talaria.datasets``, or ``module:function``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from talaria import plugins, valid
from talaria.data import cifar100, fashion_mnist, glucose, npz_file, smartwatch, vowels
from talaria.data.federated import Federated
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.valid import Options

NAMES = ("smartwatch", "vowels", "glucose", "fashion-mnist", "npz:FILE", "cifar100:FILE.npz")
"""Talaria's own; FILE stands for a path."""

_FROM_FILE: dict[str, Callable[..., Federated]] = {"npz": npz_file.load, "cifar100": cifar100.load}
GROUP = plugins.Group(
    "dataset",
    "talaria.datasets",
    {
        "smartwatch": smartwatch.load,
        "vowels": vowels.load,
        "glucose": glucose.load,
        "fashion-mnist": fashion_mnist.load,
        **_FROM_FILE,
    },
)
"""How datasets are found by name: Talaria's own, entry points, ``module:function``."""


def load(name: str, /, **options: Any) -> Federated:
    """The dataset called ``name``, under that dataset's own options: one of :data:`NAMES`, the name of an entry point,
    or ``module:function``, which returns a :class:`Federated`.

    :class:`ConfigError`: the name or an option is unknown. :class:`DataError`: the data is missing or unfit.
    """
    loader, taken = _find(name)
    what = f"dataset {shown(name)}"
    fitted = taken.read(what, options)
    if not GROUP.is_foreign(name.partition(":")[0]):
        if (fitted.get("seed") or 0) < 0:
            raise ConfigError(f"{what}: seed={fitted['seed']} must be at least 0")
        return loader(**fitted)
    found = plugins.make(what, loader, **fitted)
    if not isinstance(found, Federated):
        raise ConfigError(f"{what}: gave a {type(found).__name__}; it must return a talaria.data.Federated")
    return found


def options_of(name: str) -> tuple[str, ...]:
    """The options that :func:`load` takes for ``name``."""
    return tuple(_find(name)[1].known)


def _find(name: str) -> tuple[Callable[..., Federated], Options]:
    if not isinstance(name, str):
        raise ConfigError(f"dataset {shown(name)} must be text: a dataset's name, or npz:FILE")
    kind, colon, file = name.partition(":")
    if kind not in _FROM_FILE:
        if name.endswith(".npz") or (name and Path(name).is_dir() and name not in GROUP.names()):
            raise ConfigError(
                f"dataset {shown(name)}: a file's or folder's name alone does not say its form; write npz:{name}"
            )
        loader = GROUP.find(name)
        if not callable(loader):
            raise ConfigError(
                f"dataset {shown(name)}: is a {type(loader).__name__}; name a function that returns a Federated"
            )
        return loader, valid.options_of(loader)
    if not colon or not file:
        raise ConfigError(f"dataset {shown(name)} names no file; write {kind}:PATH.npz")
    return partial(_FROM_FILE[kind], path=Path(file)), valid.options_of(_FROM_FILE[kind]).but(["path"])
