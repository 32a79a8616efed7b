"""Labels that come after their windows: a queue on flash, one line of JSON each, which survives a kill at any write."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from talaria import durable
from talaria.errors import ConfigError, DataError
from talaria.foreign import shown
from talaria.tensors import Array

FILE = "labels.jsonl"
LARGEST = 16 << 20
"""Bytes of the queue at which the older half of it is dropped."""
LINE = 64 << 10
"""Bytes of one label, at most."""

Label = int | float | str | list[Any]
"""A class by its number or name, a number, or a list of numbers (several labels, a class for each step)."""
Said = Label | np.generic | Array
"""A label as a program says it: also one of numpy's numbers, or an array of them."""


@dataclass(frozen=True)
class LabelQueue:
    """The labels in ``folder``; the last word about a window counts. Any process of this user may add to it."""

    folder: Path

    def add(self, id: str, label: Label) -> None:
        """Keep ``label`` of the window ``id``; on flash when this returns.

        Raises :class:`~talaria.errors.ConfigError` for what is no label, and :class:`~talaria.errors.DataError` where
        the folder cannot be written to.
        """
        if not isinstance(id, str) or not 0 < len(id) <= 300 or not id.isprintable():
            raise ConfigError(f"label: id={shown(id)} must be a window's name, such as 'monday' or 'monday/3'")
        if not _is_label(label):
            raise ConfigError(
                f"label: y={shown(label)} must be a class's number or name, a finite number, or a list of them"
            )
        line = json.dumps([id, label]).encode() + b"\n"
        if len(line) > LINE:
            raise ConfigError(
                f"label: y of {id!r} takes {len(line)} bytes, at most {LINE} are taken; give a shorter one"
            )
        path = self.folder / FILE
        try:
            with durable.lock(self.folder / f".{FILE}.lock"):
                new = not path.exists()
                if not new and path.stat().st_size + len(line) > LARGEST:
                    durable.write(path, _newer(path.read_bytes()))
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(handle, "r+b", buffering=0) as file:
                    size = file.seek(0, os.SEEK_END)
                    if size and _last(file.fileno(), size) != b"\n":
                        line = b"\n" + line  # a kill cut the label before this one short: it ends here
                    while line:  # where the disk fills up a write takes a part, and the next one says why
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                if new:
                    durable.flush(self.folder)
        except OSError as error:
            raise DataError(
                f"label: {path} cannot be written to ({error.strerror}); free some space, or mend its rights"
            ) from None

    def read(self) -> dict[str, Label]:
        """The labels by window; what was said of single windows of a file ends where the file is named later.

        Lines that a kill cut short, or that are none, are passed over.
        """
        try:
            with (self.folder / FILE).open("rb") as file:
                data = file.read(LARGEST)
        except OSError:
            return {}
        found: dict[str, Label] = {}
        rows: dict[str, list[str]] = {}
        for line in data.split(b"\n"):
            try:
                id, label = json.loads(line) if len(line) <= LINE else (None, None)
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(id, str) and label is not None and _is_label(label):
                name, _, row = id.partition("/")
                if row:
                    rows.setdefault(name, []).append(id)
                else:
                    for earlier in rows.pop(name, ()):
                        found.pop(earlier, None)
                found[id] = label
        return found


def _is_label(value: Any, deep: int = 0) -> bool:
    if isinstance(value, str):
        return not deep and 0 < len(value) <= 200
    if isinstance(value, list):
        return deep < 2 and bool(value) and all(_is_label(one, deep + 1) for one in value)
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**53


def _last(file: int, size: int) -> bytes:
    return os.pread(file, 1, size - 1)


def _newer(data: bytes) -> bytes:
    """The newer half of the lines, by their bytes."""
    return data[data.find(b"\n", len(data) // 2) + 1 :]
