"""Names that load when they are first used, so that importing the package that has them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``(__getattr__, __dir__)`` of a package whose public names live in the modules ``homes[name]``; a name that is
    one of the package's own modules has itself for home."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        return home if homes[name] == f"{package}.{name}" else getattr(home, name)

    return load, lambda: sorted(homes)


class Table(Mapping[str, Any]):
    """Names and what they stand for: ``homes[name]`` is ``module:attribute``."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> Any:
        return _loaded(self._homes[name])

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


@cache
def _loaded(home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)
