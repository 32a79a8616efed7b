"""Finds what others wrote by its name: what is built in, then an entry point's name, then ``module:Name``.

A name is text that travels, so three doors are kept apart. What is built in is always found. Code of other packages is
imported only for the name of an entry point or for text of the form ``module:Name``; where the text came over a network
or out of a file, :meth:`Group.require_allowed` stands before that. What has no name that another process could import
(a class of a notebook, a network made in a function) is kept in this process alone, under a name that says so.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from talaria.errors import ConfigError, TalariaError, some_of
from talaria.foreign import shown
from talaria.valid import nearest

LONGEST = 200
"""Characters of a name, at most."""
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*")
_PACKAGE = re.compile(_WORD)
_KEPT = re.compile(r"#[0-9]+$")
"""How a name ends that :meth:`Group.keep` gave."""
PROCESS = secrets.token_hex(8)
"""This process, in which :meth:`Group.keep` numbers: the same number is another thing elsewhere."""
_beside: list[str] = []


class NotAllowedError(ConfigError):
    """A name needs the code of a package that its owner has given no leave for."""


def look_in(folder: Path) -> None:
    """Let ``module:Name`` find modules in ``folder`` too, where no installed one has that name. The command line does
    so with the current folder, as ``python -m`` does; nothing is looked for there before such a name is used."""
    if str(folder) not in _beside:
        _beside.append(str(folder))


def beside() -> tuple[str, ...]:
    """The folders of :func:`look_in`, for a process that this one starts."""
    return tuple(_beside)


def require_packages(what: str, names: Collection[str]) -> None:
    """Raise :class:`ConfigError` unless all of ``names`` are those of top-level packages."""
    for name in names:
        if not _PACKAGE.fullmatch(name):
            raise ConfigError(f"{what}={shown(name)} must be the name of a package, such as 'mypkg', without dots")


def has_torch() -> bool:
    """True where torch can be imported; it is not."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # the second where somebody has shut it out
        return False


def make(what: str, kind: Callable[..., Any], /, *given: Any, **options: Any) -> Any:
    """``kind(*given, **options)``; what somebody else's code raises there is a :class:`ConfigError` that says so."""
    try:
        return kind(*given, **options)
    except TalariaError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: cannot be made ({_told(error)}); correct its options, or its code") from error


@dataclass(frozen=True)
class Group:
    """One kind of thing that is found by name. ``built_in`` are Talaria's own, ``entries`` is the entry-point group."""

    kind: str
    entries: str
    built_in: Mapping[str, Any] = field(repr=False)
    _here: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def find(self, name: str) -> Any:
        """What ``name`` stands for. Raises :class:`ConfigError` where there is no such thing, with the nearest name,
        and where its module cannot be imported."""
        if name in self.built_in:
            return self.built_in[name]
        if name in self._here:
            return self._here[name]
        what = f"{self.kind} {shown(name)}"
        module, _, attribute = self._reference(what, name).partition(":")
        return _attribute(what, _module(what, module, self.built_in), attribute)

    def require_installed(self, name: str) -> None:
        """Raise :class:`ConfigError` where ``name`` is known to be nothing, as :meth:`find` does. Nothing is imported:
        of ``module:Name`` it is looked whether the package is there."""
        if name in self.built_in or name in self._here:
            return
        what = f"{self.kind} {shown(name)}"
        top = self._reference(what, name).partition(":")[0].partition(".")[0]
        if not _is_there(top):
            raise _no_module(what, top, self.built_in)

    def _reference(self, what: str, name: str) -> str:
        """``module:Name`` as it stands, or of the entry point ``name``."""
        if self._is_reference(name):
            return name
        entry = self._entry(name)
        if entry is None:
            raise ConfigError(f"{what} is unknown{nearest(name, self.names())}; use {self._choice()}")
        found = entry.value.partition("[")[0].strip().replace(" ", "")
        if not self._is_reference(found):
            raise ConfigError(f"{what}: its entry point {shown(entry.value)} must read module:Name; mend its package")
        return found

    def names(self) -> list[str]:
        """What is found without an import path: built-in names, then those of entry points."""
        return [*self.built_in, *sorted({entry.name for entry in entry_points(group=self.entries)} - {*self.built_in})]

    def is_foreign(self, name: str) -> bool:
        """Whether ``name`` is none of Talaria's own."""
        return name not in self.built_in

    def package(self, name: str) -> str | None:
        """The top-level package that ``name`` is imported from; None where nothing would be. Imports nothing."""
        if not self.is_foreign(name) or name in self._here:
            return None
        if self._is_reference(name):
            return name.partition(":")[0].partition(".")[0]
        entry = self._entry(name)
        return None if entry is None else entry.module.partition(".")[0]

    def require_allowed(self, name: object, allow: Collection[str], mend: str) -> None:
        """Raise :class:`ConfigError` where ``name`` needs code of a package that is not among ``allow``; ``mend`` says
        how its owner allows ``{package}``. Nothing is imported of a package that is not allowed. What is no name at all
        passes, and is refused where it is used."""
        if not isinstance(name, str) or not self.is_foreign(name):
            return
        if name in self._here:
            raise ConfigError(f"{self.kind} {shown(name)} is known in one process only; name what can be imported")
        package = self.package(name)
        if package is None:
            return
        if package not in allow:
            raise _not_allowed(self.kind, name, package, mend)
        home = str(getattr(self.find(name), "__module__", "")).partition(".")[0]
        if home not in allow:  # a module's own imports are not what its owner's leave is for
            raise _not_allowed(self.kind, name, home or "?", mend)

    def name_of(self, thing: Any) -> str:
        """The name by which :meth:`find` gives ``thing`` again: elsewhere too where it is built in or can be imported,
        else in this process only (and until it ends)."""
        for name, known in (*self.built_in.items(), *self._here.items()):
            if known is thing:
                return name
        name = f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', type(thing).__name__)}"
        return name if self._can_be_imported(name, thing) else self.keep(name, thing)

    def keep(self, name: str, thing: Any) -> str:
        """Keep ``thing`` in this process, under ``name`` with a number behind it; returns that."""
        number = len(self._here) + 1
        self._here[f"{name}#{number}"] = thing
        return f"{name}#{number}"

    def is_kept(self, name: str) -> bool:
        """Whether ``name`` is known in this process only."""
        return name in self._here

    def require_travels(self, name: str) -> None:
        """Raise :class:`ConfigError` where ``name`` is known in this process only."""
        if name in self._here:
            raise ConfigError(
                f"{self.kind} {shown(name)} is known in this process only; write it into a module of a package that "
                "the other programs of the fleet can import"
            )

    def _can_be_imported(self, name: str, thing: Any) -> bool:
        module = sys.modules.get(name.partition(":")[0])
        found: Any = module
        if not _REFERENCE.fullmatch(name) or module is None or module.__name__ == "__main__" or not module.__spec__:
            return False
        for part in name.partition(":")[2].split("."):
            found = getattr(found, part, None)
        return found is thing

    def _is_reference(self, name: str) -> bool:
        """Whether ``name`` reads ``module:Name``; what has a colon and reads otherwise is refused."""
        if ":" not in name and len(name) <= LONGEST:
            return False
        head = name.partition(":")[0]
        if head in self.built_in:
            raise ConfigError(f"{self.kind} {shown(name)}: {head!r} is built in and takes NAME=VALUE after the colon")
        if _KEPT.search(name):
            raise ConfigError(
                f"{self.kind} {shown(name)} was known in one process only, that began with an object of its own; write "
                "it into a module, and name that, such as 'mypkg.mine:Name'"
            )
        if len(name) > LONGEST or not _REFERENCE.fullmatch(name):
            raise ConfigError(
                f"{self.kind} {shown(name)} is unknown: neither a name nor module:Name, such as 'mypkg.mine:Name'; "
                f"use {self._choice()}"
            )
        return True

    def _entry(self, name: str) -> EntryPoint | None:
        try:
            return _entry(self.entries, name, tuple(sys.path))
        except LookupError:
            return None

    def _choice(self) -> str:
        return f"{some_of(self.names(), 30)}, or module:Name"


def _not_allowed(kind: str, name: str, package: str, mend: str) -> NotAllowedError:
    return NotAllowedError(
        f"{kind} {shown(name)} is of package {package!r}, which is not allowed; {mend.format(package=package)}"
    )


def installed(group: str, why: str, lacking: str, mend: str) -> Any:
    """What the first of the entry points in ``group`` names. Raises :class:`ConfigError`, with ``mend``, that it is
    ``lacking`` where there is none, and ``why`` it is needed where it cannot be imported."""
    for entry in sorted(entry_points(group=group), key=lambda one: one.name):
        try:
            return entry.load()
        except ImportError as error:
            raise ConfigError(f"{why}: {error}; {mend}") from error
    raise ConfigError(f"{lacking}; {mend}")


@lru_cache(maxsize=256)
def _entry(group: str, name: str, path: tuple[str, ...]) -> EntryPoint:
    """The entry point of this name, found once for each ``path`` that modules are looked for on. Raises LookupError."""
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if len(found) > 1:
        raise ConfigError(f"{group}: {shown(name)} is claimed by {some_of(sorted(found), 4)}; name one, as module:Name")
    for entry in found.values():
        return entry
    raise LookupError(name)


def _module(what: str, name: str, built_in: Collection[str]) -> ModuleType:
    try:
        _is_there(name.partition(".")[0])
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(what, name, error) from error
        raise _no_module(what, error.name, built_in) from None
    except TalariaError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(what, name, error) from error


def _is_there(top: str) -> bool:
    """Whether the package ``top`` can be imported: one of the folders of :func:`look_in` may have it."""
    if top in sys.modules or find_spec(top) is not None:
        return True
    sys.path += [folder for folder in _beside if folder not in sys.path]
    invalidate_caches()
    return find_spec(top) is not None


def _no_module(what: str, name: str, built_in: Collection[str]) -> ConfigError:
    return ConfigError(
        f"{what}: there is no module {name!r}{nearest(name, built_in)}; install its package where this runs, or start "
        "in the folder that holds it"
    )


def _failed(what: str, module: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{what}: importing {module} failed ({_told(error)}); mend that module")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _attribute(what: str, module: ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except Exception as error:
            raise ConfigError(
                f"{what}: {module.__name__} has no {part!r}{nearest(part, vars(module))}; correct the name"
            ) from error
        if isinstance(found, ModuleType):
            raise ConfigError(f"{what}: {part!r} in {module.__name__} is a module; name what is in it, as module:Name")
    return found
