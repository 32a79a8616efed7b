"""Where a device's samples come from, and whether they can be learned from."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from talaria.errors import ConfigError, DataError
from talaria.types import Samples

LIMIT = 4 << 30
"""Bytes of arrays that one device may hold."""
ARRAYS = ("x_train", "y_train", "x_val", "y_val")


@dataclass(frozen=True)
class DeviceData:
    """One device's samples. ``test`` is for reports only: nothing is learned or chosen on it."""

    train: Samples = field(repr=False)
    val: Samples = field(repr=False)
    test: Samples | None = field(default=None, repr=False)


class DataSource(Protocol):
    """Gives the samples that the device has now; asked again before each round."""

    def load(self) -> DeviceData:
        """The samples. Raises :class:`~talaria.errors.DataError` where there are none to learn from."""
        ...


@dataclass(frozen=True)
class NpzSource:
    """Arrays ``x_train y_train x_val y_val`` (and ``x_test y_test``) in one ``.npz``, or as ``.npy`` in a folder.

    ``x`` is float (N, ...), ``y`` integer (N,). Nothing in the files is executed (no pickled arrays).
    """

    path: Path

    def load(self) -> DeviceData:
        arrays = self._arrays()
        missing = [name for name in ARRAYS if name not in arrays]
        if missing:
            raise DataError(f"data: {self.path} lacks {', '.join(missing)}; it needs {', '.join(ARRAYS)}")
        test = None
        if "x_test" in arrays and "y_test" in arrays:
            test = _samples(self.path, "test", arrays)
        return DeviceData(_samples(self.path, "train", arrays), _samples(self.path, "val", arrays), test)

    def _arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        try:
            if self.path.is_dir():
                found = {p.stem: p for p in sorted(self.path.glob("*.npy"))}
                _bounded(self.path, sum(p.stat().st_size for p in found.values()))
                return {name: np.load(p, allow_pickle=False) for name, p in found.items()}
            with zipfile.ZipFile(self.path) as archive:
                _bounded(self.path, sum(info.file_size for info in archive.infolist()))
            with np.load(self.path, allow_pickle=False) as loaded:
                return {name: loaded[name] for name in loaded.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"data: {self.path} cannot be read ({error}); write it with numpy.savez") from None


@dataclass(frozen=True)
class NamedSource:
    """One client of a dataset that Talaria knows by name (``smartwatch``), members and newcomers alike."""

    dataset: str
    client: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> DeviceData:
        from talaria.simulate import data

        found = data.load(self.dataset, **self.options)
        everyone = {**found.clients, **found.newcomers}
        if self.client not in everyone:
            raise ConfigError(
                f"data: {self.dataset} has no client {self.client!r}; choose one of {', '.join(sorted(everyone))}"
            )
        mine = everyone[self.client]
        return DeviceData(mine.train, mine.val, mine.test)


@dataclass(frozen=True)
class Given:
    """Samples that the program itself hands over."""

    make: Callable[[], DeviceData]

    def load(self) -> DeviceData:
        return self.make()


def checked(data: DeviceData, input_shape: tuple[int, ...], classes: int) -> DeviceData:
    """``data`` itself where a model of this shape can learn from it.

    Raises :class:`~talaria.errors.DataError` for an empty part, a single class, another shape, or labels out of
    range; NaN and infinity are refused by :class:`~talaria.types.Samples` already.
    """
    if len(data.train) == 0:
        raise DataError("data: train holds no sample; record some before this device takes part")
    for name, part in (("train", data.train), ("val", data.val), ("test", data.test)):
        if part is None or len(part) == 0:
            continue
        shape = tuple(part.x.shape[1:])
        if shape != tuple(input_shape):
            raise DataError(
                f"data: {name} samples have shape {shape}, but the model takes {tuple(input_shape)}; "
                "cut and order the windows as the model expects"
            )
        low, high = int(part.y.min()), int(part.y.max())
        if low < 0 or high >= classes:
            raise DataError(f"data: {name} labels span {low}..{high}, but the model knows 0..{classes - 1}; map them")
    seen = torch.unique(data.train.y).tolist()
    if len(seen) < 2:
        raise DataError(
            f"data: train holds only class {seen[0]}; a model cannot learn to tell classes apart from one, "
            "record at least two"
        )
    return data


def _samples(path: Path, part: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Samples:
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu":
        raise DataError(
            f"data: {path}: x_{part} is {x.dtype} and y_{part} is {y.dtype}; need numbers and whole-number labels"
        )
    try:
        return Samples(
            torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)),
            torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64)),
        )
    except DataError as error:
        raise DataError(f"data: {path}, part {part!r}: {error}") from None


def _bounded(path: Path, size: int) -> None:
    if size > LIMIT:
        raise DataError(f"data: {path} holds {size} bytes, more than {LIMIT}; give this device fewer samples")
