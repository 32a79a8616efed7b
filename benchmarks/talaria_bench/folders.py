"""The folders that benches are told to keep things in: made first, and so said before minutes are measured."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from talaria.errors import ConfigError


def kept_in(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """``path``, which is there then, of an ``option`` of a command line."""
    return path if path is None else made(f"{option.opts[0]} {path}", path)


def made(told: str, path: Path) -> Path:
    """``path``, which is there then. Raises :class:`ConfigError`, which begins with ``told``."""
    why = f"{told}: no folder can be made or written to there; name one of yours"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(why) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(why)
    return path
