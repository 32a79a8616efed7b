"""Sources of a device's samples, and checks that a model can learn from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from talaria import inputs, recorded, tasks, valid
from talaria.data import arrays
from talaria.data.federated import require_inputs
from talaria.data.partition import stratified
from talaria.errors import ConfigError, DataError, TalariaError, some_of
from talaria.foreign import shown
from talaria.inputs import Parts
from talaria.tensors import Array
from talaria.types import Samples

logger = logging.getLogger(__name__)

LIMIT = 4 << 30
"""Bytes of arrays that one device may hold."""


@dataclass(frozen=True)
class DeviceData:
    """One device's samples. ``test`` is for reports only: nothing is learned or chosen on it."""

    train: Samples = field(repr=False)
    val: Samples = field(repr=False)
    test: Samples | None = field(default=None, repr=False)
    told: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the samples that the operator is told with each update, such as how far they have drifted."""
    unlabelled: Array | None = field(default=None, repr=False)
    """Inputs float32 (N, ...) that nobody has labelled: BatchNorm is calibrated on them beside those of ``train``."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    """By part (``train``, ``val``, ``test``) the file that each sample is from, where a folder of files is the source:
    one whose label the run has no place for is set aside, and the others are learned from."""
    aside: tuple[str, ...] = ()
    """The files from which :func:`checked` set samples aside."""

    def __post_init__(self) -> None:
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if not isinstance(part, Samples) and not (part is None and name == "test"):
                raise DataError(f"data: {name} is a {type(part).__name__}; give Samples, as of Samples.of(x, y)")


@runtime_checkable
class DataSource(Protocol):
    """Gives the samples that the device has now; asked again before each round."""

    def load(self) -> DeviceData:
        """The samples. Raises :class:`~talaria.errors.DataError` where there are none to learn from."""
        ...


@dataclass(frozen=True)
class NpzSource:
    """This device's samples from a ``.npz`` file or a folder of ``.npy`` files, in the form of
    :mod:`talaria.recorded`: ``x``, ``y`` and, best, ``split``; nothing in it is executed.

    Values are taken as they are, in the shape that the model takes; uint8 is divided by 255, as in simulation. Without
    ``split`` samples of classes are cut as a simulation cuts them; of another task other ones may fall into each part.
    Of a file with more than one client, ``client`` says which; text labels count by their place in ``labels``.
    """

    path: Path
    client: str | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", valid.path("data", "path", self.path).absolute())

    def load(self) -> DeviceData:
        if not self.path.exists():
            raise DataError(
                f"data: {self.path} is not there; correct [data] path: a .npz file, or a folder of .npy files"
            )
        found = recorded.read(self.path, LIMIT)
        if not len(found.y):
            raise DataError(f"data: {self.path} holds no sample; record some before this device takes part")
        y = self._classes(recorded.targets(found))
        if found.client is None:
            rows = np.arange(len(y))
        else:
            names, _, owners = recorded.clients(found.client)
            if self.client not in names:
                raise ConfigError(
                    f"data: {self.path} has no client {self.client!r}; set [data] client to one of {some_of(names, 20)}"
                )
            rows = np.flatnonzero(owners == names.index(self.client))
        if found.split is None:
            if len(rows) < 2:
                raise DataError(
                    f"data: {self.path} holds one sample of this device, of which none is left to be tested on; record "
                    "more, or say by split what each is for (0 train, 1 validation, 2 test)"
                )
            (one,) = arrays.cut(found, _strata(y), only=None if found.client is None else self.client).values()
            *cut, rest = one
        else:
            *cut, rest = (rows[found.split[rows] == part] for part in (0, 1, 2, recorded.UNLABELLED))
        parts = [self._samples(found, part, y, at) for part, at in zip(recorded.PARTS, cut, strict=True)]
        unlabelled = self._inputs(found.x[rest]) if len(rest) else None
        if unlabelled is not None:
            self._require_finite(found, "x", unlabelled, rest)
        return DeviceData(parts[0], parts[1], parts[2] if len(parts[2]) else None, unlabelled=unlabelled)

    def _classes(self, y: Array) -> Array:
        """Labels as class numbers, int64 (N,); targets of another task as they are."""
        if y.dtype.kind == "f" and (y.ndim > 1 or not (y == np.rint(y)).all()):
            return y.astype(np.float32)
        if y.dtype.kind != "U":
            return recorded.whole(y, "y")
        names, at = np.unique(y, return_inverse=True)
        unknown = [name for name in names.tolist() if name not in self.labels]
        if unknown:
            raise recorded.QuotesSamplesError(
                f"data: {self.path}: label {unknown[0]!r} is none of this device's; list all classes in the fleet's "
                "order as [device] labels, or write class numbers"
            )
        return np.array([self.labels.index(name) for name in names.tolist()], np.int64)[at]

    def _inputs(self, x: Array) -> Array:
        return recorded.scaled(inputs.array_of(x, f"data: {self.path}: x"))

    def _samples(self, found: recorded.Recorded, part: str, y: Array, rows: Array) -> Samples:
        """Those of the file's ``rows``; a refusal names a sample by its place in the file."""
        values, targets = self._inputs(found.x[rows]), np.ascontiguousarray(y[rows])
        try:
            return Samples(values, targets, parts=found.parts)
        except DataError as error:
            self._require_finite(found, "x", values, rows)
            self._require_finite(found, "y", targets, rows)
            raise DataError(f"data: {self.path}, part {part!r}: {error}") from None

    def _require_finite(self, found: recorded.Recorded, array: str, values: Array, rows: Array) -> None:
        if not np.isfinite(values).all():
            odd = rows[np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1))]
            raise DataError(
                f"data: {self.path}: {found.place(array, odd)} holds NaN, infinity or a value beyond float32; drop or "
                "repair that sample"
            )


@dataclass(frozen=True)
class NamedSource:
    """One client of a dataset that Talaria knows by name (``smartwatch``), members and newcomers alike; or what a
    function of another package gives, ``module:function`` or an entry point's name, where ``allow`` names the package.

    Such a function is called before each round, with ``options`` by their names, and gives what
    :class:`talaria_edge.Device` takes as ``data``, or a :class:`~talaria.data.Federated` with this client.
    """

    dataset: str
    client: str
    options: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()

    def load(self) -> DeviceData:
        from talaria import data
        from talaria.data import registry

        if registry.GROUP.is_foreign(self.dataset.partition(":")[0]):
            made = self._called()
            if not isinstance(made, data.Federated):
                return handed(made)
            found = made
        else:
            found = data.load(self.dataset, **self.options)
        everyone = found.everyone
        if self.client not in everyone:
            raise ConfigError(
                f"data: {self.dataset} has no client {self.client!r}; choose one of {', '.join(sorted(everyone))}"
            )
        mine = everyone[self.client]
        return DeviceData(mine.train, mine.val, mine.test, unlabelled=mine.unlabelled)

    def _called(self) -> Any:
        """What the function of another package gives."""
        from talaria.data import registry

        registry.GROUP.require_allowed(self.dataset, self.allow, 'set [code] allow = ["{package}"] in device.toml')
        function, what = registry.GROUP.find(self.dataset), f"data: source={shown(self.dataset)}"
        if not callable(function):
            raise ConfigError(f"{what} is a {type(function).__name__}; name a function that gives samples")
        try:
            return function(**self.options)
        except TalariaError:
            raise
        except (Exception, SystemExit) as error:
            raise recorded.QuotesSamplesError(
                f"{what} failed ({type(error).__name__}: {' '.join(str(error).split())[:200]}); mend it, or its options"
            ) from error


@dataclass(frozen=True)
class Given:
    """Samples that the program itself hands over."""

    make: Callable[[], DeviceData]

    def load(self) -> DeviceData:
        return self.make()


Handed = DeviceData | Samples | Sequence[Any]
"""One device's samples as a program hands them over."""
Data = str | Path | DataSource | Handed | Callable[[], Handed]
"""All that :func:`source_of` takes."""


def source_of(data: Data, client: str, labels: tuple[str, ...] = ()) -> DataSource:
    """The source that ``data`` stands for, as :class:`talaria_edge.Device` takes it; ``client`` says whose samples of
    a file or dataset of several."""
    if isinstance(data, Path):
        return NpzSource(data, client, labels)
    if isinstance(data, str):
        kind, _, path = data.partition(":")
        return NpzSource(Path(path), client, labels) if kind == "npz" and path else NamedSource(data, client)
    if isinstance(data, DataSource):
        return data
    if callable(data):
        make: Callable[[], Handed] = data
        return Given(lambda: handed(make()))
    fixed = handed(data)
    return Given(lambda: fixed)


def handed(given: Handed) -> DeviceData:
    """One device's samples, as they were handed over. Raises :class:`~talaria.errors.DataError` for anything else."""
    if isinstance(given, DeviceData):
        return given
    if isinstance(given, Samples):
        return _cut(given)
    if isinstance(given, tuple | list) and len(given) in (2, 3) and all(_is_part(one) for one in given):
        parts = [one if isinstance(one, Samples) else _samples(*one) for one in given]
        return DeviceData(parts[0], parts[1], parts[2] if len(parts) == 3 else None)
    if isinstance(given, tuple | list) and len(given) == 2:
        return _cut(_samples(*given))
    raise DataError(
        f"data: a {type(given).__name__} is no device's samples; give Samples, arrays (x, y), or (train, val), "
        "or a function that returns them"
    )


def _is_part(given: Any) -> bool:
    return isinstance(given, Samples) or (isinstance(given, tuple) and len(given) == 2)


def _samples(x: Any, y: Any) -> Samples:
    """Samples of arrays; uint8 are pixels, as in a file and in a simulation of these arrays, and targets that are no
    whole numbers are a regression's."""
    targets = inputs.array_of(y, "y")
    numbers = targets.dtype.kind == "f" and bool((targets != np.rint(targets)).any())
    values = x if isinstance(x, Mapping) else recorded.scaled(inputs.array_of(x, "x"))
    return Samples.of(values, y, task="regression" if numbers else tasks.CLASSIFICATION)


def _strata(y: Array) -> Array:
    """A class (N,) for each sample, by which samples are cut into alike parts; other targets are all alike."""
    return y if y.ndim == 1 and y.dtype.kind == "i" else np.zeros(len(y), np.int64)


def _cut(samples: Samples) -> DeviceData:
    """As a simulation cuts a file of one client: 70 % to train, 10 % to validate, 20 % to test."""
    if len(samples) < 2:
        raise DataError(f"data: {len(samples)} samples cannot be cut into training and test; record more")
    parts = stratified(_strata(samples.y), 0.1, 0.2, np.random.default_rng([0, 0]))
    train, val, test = (samples.take(rows) for rows in parts)
    return DeviceData(train, val, test)


def checked(
    data: DeviceData,
    input_shape: tuple[int, ...],
    classes: int,
    task: str = tasks.CLASSIFICATION,
    parts: Parts | None = None,
) -> DeviceData:
    """``data`` where a model of this shape can learn ``task`` from it; targets of a regression become float32.
    ``parts`` are the named inputs that the model reads; None where they are not known.

    Where it is known which file each sample is from, those whose labels are out of range are set aside, and the log
    names the files. Raises :class:`~talaria.errors.DataError` for an empty part, a single class, another shape, or
    labels out of range; NaN and infinity are refused by :class:`~talaria.types.Samples` already.
    """
    goal = tasks.of(task)
    data = _as_numbers(data) if goal.name == "regression" else data
    data = _set_aside(data, lambda y: goal.require("data:", y, classes))
    require_learnable(data, task)
    for name, part in (("train", data.train), ("val", data.val), ("test", data.test)):
        if part is None or len(part) == 0:
            continue
        if parts is not None:
            inputs.require_alike(f"data: {name} samples", part.parts, parts, input_shape)
        shape = tuple(part.x.shape[1:])
        if shape != tuple(input_shape):
            raise DataError(
                f"data: {name} samples have shape {shape}, but the model takes {tuple(input_shape)}; "
                "cut and order the windows as the model expects"
            )
        goal.require(f"data: {name}", part.y, classes)
    if data.unlabelled is not None:
        require_inputs("data: unlabelled", data.unlabelled, tuple(input_shape))
        size = data.unlabelled.nbytes
        if size > LIMIT:
            raise DataError(f"data: unlabelled holds {size} bytes, more than {LIMIT}; give the latest windows alone")
    return data


def _set_aside(data: DeviceData, require: Callable[[Array], None]) -> DeviceData:
    """``data`` without the samples whose label alone is refused, unless that is each of them."""
    parts = {name: part for name in data.files if (part := getattr(data, name)) is not None}
    odd = {name: _refused(part.y, require) for name, part in parts.items()}
    found = {data.files[name][row] for name, rows in odd.items() for row in np.flatnonzero(rows).tolist()}
    if not found or all(rows.all() for rows in odd.values()):
        return data
    aside = tuple(sorted(found))
    logger.warning(
        "data: the run has no class for the label of some samples in %s, and they are not learned from; correct these "
        "files, or take the labels back", some_of(aside, 6),
    )  # fmt: skip
    stay = {name: np.flatnonzero(~rows) for name, rows in odd.items()}
    files = {name: [data.files[name][row] for row in rows.tolist()] for name, rows in stay.items()}
    kept = {name: part.take(stay[name]) for name, part in parts.items()}
    return replace(data, **kept, files=files, aside=aside)


def _refused(y: Array, require: Callable[[Array], None]) -> Array:
    """Which rows of ``y`` are refused one by one, bool (N,)."""
    odd = np.zeros(len(y), bool)
    try:
        require(y)
    except DataError:
        for row in range(len(y)):
            try:
                require(y[row : row + 1])
            except DataError:
                odd[row] = True
    return odd


def _as_numbers(data: DeviceData) -> DeviceData:
    """Targets that happen to be whole numbers are read as classes; of a regression they are numbers."""
    train, val, test = (
        None if part is None else replace(part, y=part.y.astype(np.float32))
        for part in (data.train, data.val, data.test)
    )
    return data if train is None or val is None else replace(data, train=train, val=val, test=test)


def require_learnable(data: DeviceData, task: str | None = None) -> None:
    """Raise :class:`~talaria.errors.DataError` where no model can learn from the training samples: there are none, or
    all are of one class. Where the ``task`` is not known yet (None), targets that cannot be classes pass."""
    if len(data.train) == 0:
        raise DataError("data: train holds no sample; record some before this device takes part")
    if task is not None and not tasks.of(task).count(data.train.y):
        raise DataError("data: train holds no labelled step, all are -1; label some before this device takes part")
    if (task is None and (data.train.y.dtype.kind == "f" or data.train.y.ndim > 1)) or (
        task is not None and tasks.of(task).name != tasks.CLASSIFICATION
    ):
        return
    seen = np.unique(data.train.y).tolist()
    if len(seen) < 2:
        raise DataError(
            f"data: train holds only class {seen[0]}; a model cannot learn to tell classes apart from one, "
            "record at least two"
        )
