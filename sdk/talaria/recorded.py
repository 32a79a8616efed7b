"""The one form of a file of samples, for simulation, agents, ``talaria plan``, ``export`` and ``verify`` alike.

``x`` (N, ...) holds the samples and ``y`` (N,) their labels, whole numbers or text, or the targets of another task
(:mod:`talaria.tasks`), numbers (N,) or (N, K). ``client`` (N,), numbers or text, says whose each sample is, where there
is more than one; ``split`` (N,) says 0 train, 1 validation, 2 test and 3 unlabelled: inputs for BatchNorm alone, whose
``y`` nobody reads, so that it may be whatever its array can hold (-1, an empty text, NaN). The same parts may stand by
themselves instead, as ``x_train``, ``y_train``, ``x_val``, ``y_val``, ``x_test``, ``y_test`` and ``x_unlabelled``.
A model of several inputs takes ``x_NAME`` (N, ...) of each instead of ``x``: float32, whole numbers (tokens) or bool
(masks), which :mod:`talaria.inputs` puts side by side.
The file is a ``.npz``, or a folder of ``.npy`` files. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from talaria import inputs, npz
from talaria.errors import DataError
from talaria.inputs import Parts
from talaria.npz import Array

PARTS = ("train", "val", "test")
"""The labelled parts, by their number in ``split``."""
UNLABELLED = 3
"""The number in ``split`` of samples without a label."""


class QuotesSamplesError(DataError):
    """Its words may quote samples, and are for whoever has them: a device tells them its own journal alone."""


@dataclass(frozen=True)
class Recorded:
    """The arrays as they are in the file; ``client`` and ``split`` are None where it does not say them."""

    x: Array = field(repr=False)
    y: Array = field(repr=False)
    client: Array | None = field(default=None, repr=False)
    split: Array | None = field(default=None, repr=False)
    parts: Parts | None = None
    """Of several named inputs their shapes; ``x`` (N, numbers) then has them side by side."""
    plain: tuple[str, ...] = ()
    """Those of them that are tokens or masks, which are not scaled."""
    apart: bool = False
    """Whether the file has the parts by themselves, one behind the other here."""

    def place(self, array: str, row: int) -> str:
        """Where a row of ``x`` or ``y`` stands in the file: ``x[7]``, or ``x_val[0]`` of a file of parts."""
        if not self.apart or self.split is None:
            return f"{array}[{row}]"
        part = self.split[row]
        return f"{array}_{(*PARTS, 'unlabelled')[part]}[{row - np.argmax(self.split == part)}]"


def read(path: Path, limit: int = npz.LIMIT) -> Recorded:
    """The samples in ``path``, of at most ``limit`` bytes. :class:`DataError` names the array, the value, the mend."""
    found = npz.names(path)
    apart = sorted(name for name in found if name in _APART)
    several = sorted(name for name in found if name.startswith("x_") and name not in _APART)
    if several:
        odd = [name for name in (*apart, "x") if name in found]
        if odd:
            there = ", ".join([*several[:6], *odd[:6]])
            raise DataError(f"data: {path} holds {there}; write x_NAME of each input, y and split, or one x")
        raw = npz.read(path, (*several, "y"), ("client", "split"), limit)
        xs = {name.removeprefix("x_"): raw[name] for name in several}
        made = _several(xs, raw["y"], raw.get("client"), _split(raw.get("split"), path), f"data: {path}")
    elif "x" in found or not apart:
        if _WITHOUT in found:
            raise DataError(f"data: {path} holds x and {_WITHOUT}; put the windows without label into x, with split=3")
        raw = npz.read(path, ("x", "y"), ("client", "split"), limit)
        made = Recorded(raw["x"], raw["y"], raw.get("client"), _split(raw.get("split"), path))
    else:
        made = _joined(path, found, limit)
    return _fitting(made)


def of(x: Any, y: Any, client: Any = None, split: Any = None) -> Recorded:
    """The same of arrays, lists or tensors in Python. :class:`DataError` names the array, the value and the mend."""
    several = isinstance(x, Mapping)
    given = {"x": np.zeros(0) if several else x, "y": y, "client": client, "split": split}
    arrays: dict[str, Array] = {}
    for name, values in given.items():
        if values is None and name in ("client", "split"):
            continue
        inputs.require_none_hidden(values, f"data: {name}")
        try:
            arrays[name] = np.asarray(inputs.out_of_torch(values))
        except Exception as error:
            raise DataError(f"data: {name} cannot be an array ({type(error).__name__}: {str(error)[:200]})") from error
        objects = arrays[name].dtype.hasobject
        if objects and name in ("y", "client") and all(isinstance(one, str) for one in arrays[name].flat):
            arrays[name] = np.array(arrays[name].tolist(), str)  # as pandas holds a column of text, and numpy 2 its own
        elif objects:
            raise DataError(f"data: {name} holds Python objects; give numbers, or text for y and client")
    client, split = arrays.get("client"), _split(arrays.get("split"), "data")
    if several:
        return _fitting(_several(x, arrays["y"], client, split, "data: x"))
    return _fitting(Recorded(arrays["x"], arrays["y"], client, split))


def _several(xs: Mapping[str, Any], y: Array, client: Array | None, split: Array | None, where: str) -> Recorded:
    x, parts = inputs.joined(xs, where)
    plain = tuple(name for name in parts if inputs.array_of(xs[name], where).dtype.kind in "bi")
    return Recorded(x, y, client, split, parts, plain)


def _fitting(made: Recorded) -> Recorded:
    for name in ("y", "client", "split"):
        values = getattr(made, name)
        rank = (1, 2) if name == "y" and values is not None and values.dtype.kind not in "US" else (1,)
        if values is not None and (values.ndim not in rank or not made.x.ndim or len(values) != len(made.x)):
            rows = made.x.shape[0] if made.x.ndim else 0
            form = "(N,)" if rank == (1,) else "(N,), or a row for each, (N, K)"
            if name == "y" and rank == (1,) and values.ndim > 1:
                form += "; number the classes or labels of a row, which text cannot name"
            raise DataError(f"data: x has {rows} rows, {name} has shape {values.shape}; give one for each, {form}")
    return replace(
        made, y=_text(_read(made), "y"), client=None if made.client is None else _text(made.client, "client")
    )


def _read(made: Recorded) -> Array:
    """``y``, without the bytes that nobody reads."""
    if made.split is None or made.y.dtype.kind != "S":
        return made.y
    return np.where(made.split == UNLABELLED, b"", made.y)


def _text(values: Array, name: str) -> Array:
    """Bytes as text. What is no UTF-8 is refused: with a sign in its place, two names would become one."""
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise QuotesSamplesError(
            f"data: {name} holds {error.object[:80]!r}, which is no UTF-8; write numpy.char.decode({name}, 'latin-1'), "
            "or the encoding that it has"
        ) from None


def whole(values: Array, name: str) -> Array:
    """Labels and the like as int64; floats that are whole are taken."""
    if values.dtype.kind == "f" and (np.abs(values) < np.float64(2**53)).all() and (values == np.rint(values)).all():
        return values.astype(np.int64)
    if values.dtype == np.uint64 and values.size and values.max() >= 2**63:
        raise DataError(
            f"data: {name} has dtype uint64 and holds {values.max()}, beyond int64; write smaller numbers, or text"
        )
    if values.dtype.kind not in "bui":
        mend = f"write {name}.round().astype('int64')" if values.dtype.kind == "f" else "write numbers of classes"
        if name == "y" and values.dtype.kind == "f":
            mend = (
                "a classifier needs classes: learn numbers (task='regression'), or cut them into some (numpy.digitize)"
            )
        if name == "client":
            mend = "number the clients from 0, or name each by text"
        if name == "split":
            mend = "write 0 for train, 1 for validation, 2 for test, 3 for unlabelled"
        raise DataError(f"data: {name} has dtype {values.dtype}, need whole numbers; {mend}")
    return values.astype(np.int64)


def scaled(x: Array) -> Array:
    """Samples as a model sees them, contiguous float32: uint8 are pixels and divided by 255, other numbers as they
    are."""
    with inputs.narrowing():
        values = np.ascontiguousarray(x, dtype=np.float32)
    return values / np.float32(255) if x.dtype == np.uint8 else values


def targets(raw: Recorded) -> Array:
    """``y`` as it is, but that of some labelled sample wherever ``split`` says unlabelled, where the file has no label.
    :class:`DataError` where no sample is labelled."""
    if raw.split is None or not (without := raw.split == UNLABELLED).any():
        return raw.y
    if without.all():
        raise DataError(
            f"data: split={UNLABELLED} marks every sample as unlabelled; mark some 0 train, 1 validation, 2 test"
        )
    y = raw.y.copy()
    y[without] = y[np.argmin(without)]
    return y


def clients(values: Array) -> tuple[tuple[str, ...], Array, Array]:
    """``(names, numbers, rows)``: the clients in order, the number that each client's draws derive from, and for each
    sample its client's place. Text is taken as it is; number 7 of up to 12 is called ``client-07``."""
    if values.dtype.kind == "U":
        named, rows = np.unique(values, return_inverse=True)
        if any(not name for name in named):
            raise DataError("data: client holds an empty text; name every client")
        return tuple(named.tolist()), np.arange(len(named)), rows
    numbers, rows = np.unique(whole(values, "client"), return_inverse=True)
    if len(numbers) and numbers[0] < 0:
        raise DataError(f"data: client={numbers[0]} is negative; number the clients from 0")
    width = len(str(numbers[-1])) if len(numbers) else 1
    return tuple(f"client-{number:0{width}d}" for number in numbers.tolist()), numbers, rows


_WITHOUT = "x_unlabelled"
_APART = frozenset({_WITHOUT, *(f"{array}_{part}" for part in PARTS for array in "xy")})


def _joined(path: Path, found: tuple[str, ...], limit: int) -> Recorded:
    parts = [part for part in PARTS if part != "test" or {"x_test", "y_test"} <= set(found)]
    missing = [f"{array}_{part}" for part in parts for array in "xy" if f"{array}_{part}" not in found]
    if missing:
        mend = "it needs x and y, and best client and split"
        if _APART & set(found):
            mend = "write x and y of each part, train and val (test may be left out), or x and y of all with split"
        raise DataError(f"data: {path} lacks {', '.join(missing)}; {mend}")
    beside = [name for name in ("client", "split") if name in found]
    if beside:
        raise DataError(
            f"data: {path} holds x_train and {beside[0]}, which goes with x and y of all; put the parts into one x and "
            "one y with split, or leave it out"
        )
    raw = npz.read(path, [f"{array}_{part}" for part in parts for array in "xy"], (_WITHOUT,), limit)
    first, labels = raw["x_train"], raw["y_train"]
    numbers = [PARTS.index(part) for part in parts]
    if (rest := raw.get(_WITHOUT)) is not None:
        raw["y_unlabelled"] = np.zeros((len(rest) if rest.ndim else 0, *labels.shape[1:]), labels.dtype)
        parts, numbers = [*parts, "unlabelled"], [*numbers, UNLABELLED]
    for part in parts:
        x, y = raw[f"x_{part}"], raw[f"y_{part}"]
        flat = y.ndim == 1 or (y.ndim == 2 and y.dtype.kind not in "US")
        if not flat or x.ndim < 1 or len(x) != len(y):
            raise DataError(f"data: {path}: x_{part} {x.shape} and y_{part} {y.shape}; give one label per sample, (N,)")
        if x.shape[1:] != first.shape[1:]:
            raise DataError(
                f"data: {path}: {part} samples have shape {x.shape[1:]}, train {first.shape[1:]}; cut alike"
            )
        if x.dtype.kind not in "bfiu":
            raise DataError(f"data: {path}: x_{part} is {x.dtype}; need numbers")
        if (x.dtype == np.uint8) != (first.dtype == np.uint8):
            raise DataError(
                f"data: {path}: x_{part} is {x.dtype}, x_train {first.dtype}; uint8 is taken for pixels and divided by "
                "255, so write all parts alike"
            )
        if y.shape[1:] != labels.shape[1:]:
            raise DataError(f"data: {path}: y_{part} is {y.shape}, y_train {labels.shape}; give alike targets")
        if (y.dtype.kind in "US") != (labels.dtype.kind in "US"):
            raise DataError(f"data: {path}: y_{part} is {y.dtype}, y_train {labels.dtype}; label all alike")
    sizes = [len(raw[f"y_{part}"]) for part in parts]
    return Recorded(
        np.concatenate([raw[f"x_{part}"] for part in parts]),
        np.concatenate([raw[f"y_{part}"] for part in parts]),
        split=np.repeat(numbers, sizes),
        apart=True,
    )


def _split(values: Array | None, path: Path | str) -> Array | None:
    if values is None:
        return None
    split = whole(values, "split")
    odd = split[(split < 0) | (split > UNLABELLED)]
    if len(odd):
        raise DataError(f"{path}: split={odd[0]} is unknown; use 0 train, 1 validation, 2 test, 3 unlabelled")
    return split
