""":class:`FolderSource`: windows that are picked up as they are recorded, and leave when they are old."""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from talaria import durable, inputs, npz, recorded, time, valid
from talaria.errors import ConfigError, DataError, so_that_it_can_be_written, some_of
from talaria.foreign import shown
from talaria.tensors import Array
from talaria.types import Samples
from talaria_edge.data import LIMIT, DeviceData
from talaria_edge.recording import drift
from talaria_edge.recording.labels import Label, LabelQueue, Said

logger = logging.getLogger(__name__)

HELD_OUT = 10
"""One file of so many is for validation."""
SET = 1e9
"""A clock before this (2001) was not set yet, as where a device without one of its own has just begun."""
_LEFT = re.compile(r"\.\d{13}-[0-9a-f]{8}\.npz\.part")
"""What :meth:`FolderSource.record` leaves of a window where the power is cut."""


@dataclass(frozen=True)
class FolderSource:
    """The windows in the ``.npz`` files of the folder ``path``, as they are when a round begins.

    A file holds ``x`` (N, ...), or ``x_NAME`` of each input, one or several windows, and, where labels are known
    already, ``y`` (N,): class numbers, names of ``labels``, or numbers; a whole -1, an empty text and NaN stand for a
    label that is not known yet. It may hold ``split`` (N,), as :mod:`talaria.recorded` says; of what it marks as
    unlabelled a label that comes later makes a training sample. Without it, one file of ten is held out for validation,
    by its name, so that a window never goes from one side to the other. Windows without a label are kept, and not
    learned from.

    When the folder holds more than ``most`` windows or ``megabytes``, or files older than ``days``, the oldest files
    are removed. What was recorded before the device's clock was set counts from its first round after. Files whose
    names begin with a dot, or that are not whole, are never read. A relative ``path`` is of the folder that is current
    now, also where the program goes to another one later.
    """

    path: Path
    labels: tuple[str, ...] = ()
    most: int = 10_000
    days: float | None = None
    megabytes: float = 128.0
    drift: bool = True
    """Tell the operator, with each update, how far the samples have moved since the first day: two numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", valid.path("data", "path", self.path).absolute())
        for name, low, high in (("most", 1, 10_000_000), ("days", 1e-3, 36_525), ("megabytes", 0.001, LIMIT / 2**20)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
            if not number and not (value is None and name == "days"):
                raise ConfigError(f"data: {name}={shown(value)} must be a number from {low:g} to {high:g}")

    @property
    def queue(self) -> LabelQueue:
        """The labels that came after their windows."""
        return LabelQueue(self.path)

    def load(self) -> DeviceData:
        """The labelled windows, and beside them those of the training files that have no label yet.

        Raises :class:`~talaria.errors.DataError` where the folder cannot be used, or a label is none of this device's.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from None
        return self._loaded(*self._kept(remember=True), remember=True)

    def look(self) -> tuple[DeviceData, tuple[str, ...]]:
        """What :meth:`load` would give, and what it would say of files: those that it could not read, and those that it
        would remove. The folder stays as it is: nothing is made, removed or remembered there.

        Raises :class:`~talaria.errors.DataError` as :meth:`load`, and where there is no folder yet.
        """
        windows, over, unread = self._kept(remember=False)
        notes = []
        if over:
            names = some_of([path.name for path in over], 6)
            notes.append(f"{len(over)} files leave {self.path} before the next round, as [data] most, megabytes and "
                         f"days have it: {names}; raise these to keep them")  # fmt: skip
        notes += [f"{path} is not read: {why}" for path, why in list(unread.items())[:6]]
        return self._loaded(windows, (), unread, remember=False), tuple(notes)

    def _loaded(
        self, windows: list[_Window], over: Sequence[Path], unread: Mapping[Path, str], *, remember: bool
    ) -> DeviceData:
        for path in over:
            with suppress(OSError):
                path.unlink()
        for path, why in unread.items():
            logger.info("%s is not read: %s", path.name, why)  # half written, or no window: it leaves with age
        late = self.queue.read()
        given = self._of_one_form(windows, [self._labels(one, late) for one in windows])
        held = _held_out([one.name for one in windows])
        parts: list[tuple[list[Array], list[Any], list[str]]] = [([], [], []) for _ in recorded.PARTS]
        unlabelled: list[Array] = []
        for one, labels in zip(windows, given, strict=True):
            for row, label in enumerate(labels):
                part = (1 if one.name in held else 0) if one.split is None else int(one.split[row])
                part = 0 if part == recorded.UNLABELLED else part
                if label is None and part == 0:
                    unlabelled.append(one.x[row])
                elif label is not None:
                    parts[part][0].append(one.x[row])
                    parts[part][1].append(label)
                    parts[part][2].append(f"{one.name}.npz")
        empty = np.zeros((0, *(windows[0].x.shape[1:] if windows else (1,))), np.float32)
        named = next((one.parts for one in windows if one.parts is not None), None)
        whole = all(isinstance(label, int) for _, labels, _ in parts for label in labels)
        train, val, test = (
            Samples(np.stack(x), _targets(y), parts=named)
            if x
            else Samples(empty, np.zeros(0, np.int64 if whole else np.float32))
            for x, y, _ in parts
        )
        rest = np.stack(unlabelled) if unlabelled else None
        files = {name: held for name, (_, _, held) in zip(recorded.PARTS, parts, strict=True)}
        told = self._drift(windows, given, remember)
        return DeviceData(train, val, test if len(test) else None, told, rest, files)

    def record(self, x: Any, y: Said | None = None) -> str:
        """Keep one window ``x`` (the model's input shape, or a dict of its named inputs), with its label where it is
        known; its name for :meth:`label`. It is on flash, whole, when this returns.

        Raises :class:`~talaria.errors.DataError` for what no round could learn from: no numbers, none at all, or NaN.
        """
        if isinstance(x, Mapping):
            named = {name: _window(one)[None] for name, one in x.items()}
            inputs.joined(named, "record: x")  # what it refuses
            given = {f"x_{name}": one for name, one in named.items()}
        else:
            given = {"x": _window(x)[None]}
        name = f"{int(time.time() * 1000):013d}-{os.urandom(4).hex()}"
        if y is not None:
            self.label(name, y)  # first: a kill between the two leaves a label without window, which is nothing
        out = io.BytesIO()
        np.savez(out, **given)  # type: ignore[arg-type]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            durable.write(self.path / f"{name}.npz", out.getvalue())
        except OSError as error:
            mend = so_that_it_can_be_written(error)
            raise DataError(f"record: {self.path} cannot be written to ({error.strerror}); {mend}") from None
        return name

    def label(self, id: str, y: Said) -> None:
        """Say what the window ``id`` was: a file's name without ``.npz``, of a file with several windows ``name/ROW``
        (or the name alone, for all of its windows). It may be said again; the last word counts."""
        said: Label = y.tolist() if isinstance(y, np.generic | np.ndarray) else y
        if isinstance(said, str) and said not in self.labels:
            raise ConfigError(f"label: y={shown(said)} is none of [device] labels; use one of {list(self.labels)[:20]}")
        if len(self.labels) > 1 and isinstance(said, int | float) and said not in range(-1, len(self.labels)):
            # Of two names or more, one number is a class: numbers to learn come as a list, one for each name.
            raise ConfigError(
                f"label: y={shown(said)} is no class of the {len(self.labels)} in [device] labels; use "
                f"0..{len(self.labels) - 1}, a name, or -1 to take back; name a new class there, in the fleet's order"
            )
        if len(self.labels) > 1 and isinstance(said, float):
            said = int(said)  # -1.0 of an array is -1
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"label: {self.path} cannot be made ({error.strerror}); mend its rights") from None
        self.queue.add(id, said)

    def holds(self, id: str) -> bool:
        """Whether the window that ``id`` names, as in :meth:`label`, is here and whole."""
        name = id.partition("/")[0]
        try:
            rows = len(_read(self.path / f"{name}.npz", 0.0, LIMIT).x)
        except DataError:
            return False
        return id == name or id in (f"{name}/{row}" for row in range(rows))

    def _kept(self, *, remember: bool) -> tuple[list[_Window], list[Path], dict[Path, str]]:
        """The windows of the files that stay, oldest first; the files that are to leave, and those that cannot be read,
        with the reason."""
        now, room, left = time.time(), self.megabytes * 2**20, self.most
        budget, found, over = LIMIT, [], False
        leaving: list[Path] = []
        unread: dict[Path, str] = {}
        for path, size, at in reversed(self._files(now, remember)):
            if size > self.megabytes * 2**20:
                logger.warning("%s is too large: its %d bytes are more than [data] megabytes allows", path, size)
                leaving.append(path)
                continue
            over = over or size > room or left <= 0 or (self.days is not None and now - at > self.days * drift.DAY_S)
            if over:
                leaving.append(path)
                continue
            room -= size
            try:
                one = _read(path, at, budget)
            except DataError as error:
                unread[path] = str(error)
                continue
            budget -= one.x.nbytes
            if len(one.x) > left:
                one = one.last(left)
            left -= len(one.x)
            found.append(one)
        usual = Counter({one.x.shape[1:]: 0 for one in found})
        for one in found:
            usual[one.x.shape[1:]] += len(one.x)
        shape = max(usual, key=lambda each: usual[each], default=())
        odd = [one.name for one in found if one.x.shape[1:] != shape]
        if odd:
            logger.warning("%s: not read, as their windows have another shape than %s: %s", self.path, shape,
                           some_of(odd, 6))  # fmt: skip
        return self._of_one_kind([one for one in reversed(found) if one.x.shape[1:] == shape]), leaving, unread

    def _of_one_kind(self, windows: list[_Window]) -> list[_Window]:
        """Those whose inputs are named as most are, and those that say no names."""
        kinds = [None if one.parts is None else inputs.told(one.parts) for one in windows]
        named = Counter(kind for kind in kinds if kind is not None)
        if len(named) < 2:
            return windows
        ((most, _),) = named.most_common(1)
        odd = [one.name for one, kind in zip(windows, kinds, strict=True) if kind not in (None, most)]
        logger.warning("%s: not read, as they have other inputs than most (%s): %s", self.path, most, some_of(odd, 6))
        return [one for one, kind in zip(windows, kinds, strict=True) if kind in (None, most)]

    def _files(self, now: float, remember: bool) -> list[tuple[Path, int, float]]:
        """Files, their bytes and when they were written, oldest first. What was written before the clock was set is of
        now, and with ``remember`` from now on."""
        try:
            found = []
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if remember and _LEFT.fullmatch(entry.name):
                        with suppress(OSError):
                            if now - entry.stat(follow_symlinks=False).st_mtime > drift.DAY_S:
                                os.unlink(entry.path)
                    if entry.name.endswith(".npz") and not entry.name.startswith("."):
                        with suppress(FileNotFoundError):
                            if entry.is_file(follow_symlinks=False):
                                stat = entry.stat(follow_symlinks=False)
                                early = stat.st_mtime < SET <= now
                                found.append((Path(entry.path), stat.st_size, now if early else stat.st_mtime))
                                if early and remember:
                                    os.utime(entry.path, (now, now))
        except OSError as error:
            raise _unusable(self.path, error) from None
        return sorted(found, key=lambda one: (one[2], one[0].name))

    def _labels(self, one: _Window, late: dict[str, Label]) -> list[Any]:
        """The label of each window of a file; None where it is not known yet."""
        own = [None] * len(one.x) if one.y is None else one.y.tolist()
        if one.split is not None:
            own = [None if part == recorded.UNLABELLED else y for part, y in zip(one.split.tolist(), own, strict=True)]
        said = [late.get(f"{one.name}/{one.begin + row}", late.get(one.name, y)) for row, y in enumerate(own)]
        return [None if _unknown(label) else self._class(one, label) for label in said]

    def _of_one_form(self, windows: list[_Window], given: list[list[Any]]) -> list[list[Any]]:
        """Labels of the form that most have, a number or so many; any other is as if it were not known, and told."""
        forms = [[None if label is None else _form(label) for label in labels] for labels in given]
        usual = Counter(form for each in forms for form in each if form is not None)
        if len(usual) < 2:
            return given
        ((most, _),) = usual.most_common(1)
        odd = [f"{one.name}.npz" for one, each in zip(windows, forms, strict=True) if {*each} - {None, most}]
        logger.warning("%s: not learned from, as their labels have another form than most (%s): %s; correct these "
                       "files, or label their windows again", self.path, most, some_of(odd, 6))  # fmt: skip
        return [
            [label if form == most else None for label, form in zip(labels, each, strict=True)]
            for labels, each in zip(given, forms, strict=True)
        ]

    def _class(self, one: _Window, label: Any) -> Any:
        if isinstance(label, bytes):
            label = label.decode("utf-8", "replace")
        if not isinstance(label, str):
            whole = isinstance(label, float | bool) and abs(label) < 2**53 and label == int(label)
            return int(label) if whole else label
        if label not in self.labels:
            raise DataError(
                f"data: {self.path / one.name}: label {label!r} is none of this device's; list all classes in the "
                "fleet's order as [device] labels, or write class numbers"
            )
        return self.labels.index(label)

    def _drift(self, windows: list[_Window], given: list[list[Any]], remember: bool) -> dict[str, float]:
        if not self.drift or not windows:
            return {}
        begun = min(one.at for one in windows)
        first = drift.read(self.path)
        if first is None:
            first = _shape([one for one in zip(windows, given, strict=True) if one[0].at - begun < drift.DAY_S])
            if remember and time.time() - begun >= drift.DAY_S and first.labels:
                try:
                    drift.remember(self.path, first)
                except OSError as error:
                    logger.warning("the first day is not remembered: %s", error.strerror)
        return drift.between(first, _shape(list(zip(windows, given, strict=True))))


@dataclass(frozen=True)
class _Window:
    """One file. ``begin`` is the number in the file of its first window here."""

    name: str
    at: float
    x: Array = field(repr=False)
    y: Array | None = field(repr=False)
    split: Array | None = field(repr=False)
    begin: int = 0
    parts: inputs.Parts | None = None

    def last(self, count: int) -> _Window:
        """The newest of its windows."""
        y, split = (None if one is None else one[-count:] for one in (self.y, self.split))
        return _Window(self.name, self.at, self.x[-count:], y, split, self.begin + len(self.x) - count, self.parts)


def _unusable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"data: there is no folder {path} yet; record some, or correct [data] path")
    return DataError(f"data: {path} cannot be read ({error.strerror}); give a folder of windows")


def _window(x: Any) -> Array:
    """One recorded window, or an input of it, as it is written."""
    values = inputs.array_of(x, "record: x")
    if not values.size or not values.ndim:
        raise DataError(f"record: x has shape {values.shape}; give one window, an array of numbers")
    with inputs.narrowing():
        if not np.isfinite(values.astype(np.float32)).all():
            raise DataError("record: x holds NaN, infinity or a value beyond float32; drop or repair that window")
    return values


def _read(path: Path, at: float, limit: int) -> _Window:
    several = sorted(name for name in npz.names(path) if name.startswith("x_"))
    raw = npz.read(path, several or ("x",), ("y", "split"), limit)
    named = {name.removeprefix("x_"): raw[name] for name in several}
    x, parts = inputs.joined(named) if several else (raw["x"], None)
    if x.dtype.kind not in "bfiu" or x.ndim < 2 or not len(x):
        raise DataError(f"x is {x.dtype} {x.shape}; it needs numbers, (N, ...)")
    rest = {name: raw.get(name) for name in ("y", "split")}
    for name, values in rest.items():
        if values is not None and (not values.ndim or len(values) != len(x)):
            raise DataError(f"x has {len(x)} rows, {name} has shape {values.shape}; give one for each")
    made = recorded.of(np.zeros(len(x)), np.zeros(len(x), np.int64), split=rest["split"])
    values, y = recorded.scaled(x), rest["y"]
    if not np.isfinite(values).all():
        raise DataError("x holds NaN or infinity; drop or repair that window")
    if y is not None and y.dtype.kind == "u":
        y = recorded.whole(y, "y")
    if y is not None and y.dtype.kind == "f":
        said = y if made.split is None else y[made.split != recorded.UNLABELLED]
        if (np.isinf(said) if y.ndim == 1 else ~np.isfinite(said)).any():
            raise DataError("y holds infinity, or NaN in a row of numbers; correct that label")
    return _Window(path.stem, at, values, y, made.split, parts=parts)


def _unknown(label: Any) -> bool:
    if isinstance(label, list):
        return False
    return (
        label is None
        or label in ("", b"")
        or (type(label) is int and label == -1)
        or (isinstance(label, float) and math.isnan(label))
    )


def _form(label: Any) -> str:
    """What a label is, in words."""
    if not isinstance(label, list):
        return "one number"
    try:
        made = np.asarray(label)
    except ValueError:
        return "numbers of several lengths"
    return f"{' x '.join(map(str, made.shape))} {'numbers' if made.dtype.kind in 'biuf' else 'text'}"


def _held_out(names: list[str]) -> set[str]:
    """Which files are for validation: by their names alone, and of few the one that comes first by that."""
    order = sorted((hashlib.sha256(name.encode("utf-8", "replace")).digest(), name) for name in names)
    chosen = {name for digest, name in order if digest[0] * HELD_OUT < 256}
    return chosen or {name for _, name in order[:1] if len(order) > 1}


def _targets(labels: list[Any]) -> Array:
    try:
        made = np.array(labels)
    except ValueError:
        made = np.array([], dtype=object)
    if made.dtype.kind not in "bfiu" or len(made) != len(labels):
        raise DataError("data: labels are of several kinds; give each window one of the same form")
    return made.astype(np.int64 if made.dtype.kind in "biu" else np.float32)


def _shape(windows: list[tuple[_Window, list[Any]]]) -> drift.Shape:
    labels = [label for _, given in windows for label in given if isinstance(label, int)]
    return drift.shape_of((one.x for one, _ in windows), np.array(labels, np.int64))
