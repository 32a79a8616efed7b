"""Any user's arrays, in the form of :mod:`talaria.recorded`, as what a federated dataset is made of."""

from dataclasses import replace
from typing import Any

import numpy as np

from talaria import inputs, recorded, tasks, valid
from talaria.data.client import Client
from talaria.data.partition import dirichlet, even, stratified
from talaria.errors import ConfigError, DataError, some_of
from talaria.foreign import shown
from talaria.recorded import Recorded
from talaria.tasks.regression import LEAST_SPREAD
from talaria.tensors import Array
from talaria.types import Samples

LAYOUTS = ("auto", "channels_first", "channels_last")
_EXACT = 1 << 24
_SMALLEST_IMAGE = 8
_FEWEST = 10
"""Samples that each client of a skewed cut has at least, where there are so many."""


@np.errstate(under="ignore")
def fields_of(
    raw: Recorded,
    *,
    validation: float,
    test: float,
    layout: str,
    standardize: bool,
    seed: int,
    task: str = tasks.CLASSIFICATION,
    clients: int | None = None,
    alpha: float | None = None,
    newcomers: int | tuple[str, ...] = 0,
) -> dict[str, Any]:
    """The fields of a :class:`~talaria.data.federated.Federated` but its name, of arrays that are there already; what
    is made of them is at :func:`talaria.data.npz_file.load`."""
    if layout not in LAYOUTS:
        raise ConfigError(f"data: layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if validation < 0 or test <= 0 or validation + test >= 1:
        raise ConfigError(
            f"data: validation={validation} must be at least 0, test={test} above 0, and their sum below 1"
        )
    if seed < 0:
        raise ConfigError(f"data: seed={seed} must be at least 0")
    steps = raw.y.shape[1] if tasks.of(task).name == "per_step" and raw.y.ndim == 2 else 0
    x, done = (_numbers(raw), "named inputs") if raw.parts else _oriented(_numbers(raw), layout, steps)
    labels, y = _targets(raw, task)
    strata = tasks.of(task).strata(y)
    raw = _dealt(raw, strata, clients, alpha, seed)
    cuts = cut(raw, strata, validation=validation, test=test, seed=seed)
    for part, at, value in (("training", 0, 0), ("test", 2, 2)):
        _require_none(
            [who for who, rows in cuts.items() if not len(rows[at])],
            f"no {part} sample (split={value})",
            "give {} one, or ",
        )
    late = _late(list(cuts), newcomers, seed)
    learned = np.concatenate([train for who, (train, *_) in cuts.items() if who not in late])
    scaling: dict[str, Any] = {"scaled": "divided by 255" if raw.x.dtype == np.uint8 else "as given"}
    if raw.x.dtype == np.uint8:
        x = recorded.scaled(x)
    elif standardize and raw.parts:
        given = inputs.apart(x, raw.parts)
        for part in set(given) - set(raw.plain):
            mean, sd = _scale(given[part], learned)
            given[part] = (given[part] - mean) / sd
        x = inputs.joined(given)[0]
        scaling = {"scaled": "z-scored, each input by its channels, but tokens and masks"}
    elif standardize:
        mean, sd = _scale(x, learned)
        x = (x - mean) / sd
        scaling = {"scaled": "z-scored", "mean": mean.ravel().tolist(), "sd": sd.ravel().tolist()}
    found: dict[str, Any] = {
        "layout": done,
        "split": "as given" if raw.split is not None else "cut at random",
        **scaling,
    }
    if clients is not None:
        found["clients"] = "dealt evenly" if alpha is None else f"dealt by Dirichlet({alpha:g})"
    if raw.parts:
        found["parts"] = raw.parts
    return {
        "clients": {who: _client(x, y, rows) for who, rows in cuts.items() if who not in late},
        "newcomers": {who: _client(x, y, rows) for who, rows in cuts.items() if who in late},
        "labels": labels,
        "task": task,
        "input_shape": x.shape[1:],
        "meta": found,
    }


def _dealt(raw: Recorded, strata: Array, clients: int | None, alpha: float | None, seed: int) -> Recorded:
    """``raw`` with a client for each sample, where one pool is to be dealt over several."""
    if clients is None:
        if alpha is not None:
            raise ConfigError(f"data: alpha={alpha} says how skewed a pool is dealt; say over how many clients, too")
        return raw
    valid.whole("data", "clients", clients, 1, max(1, len(strata) // 2))
    if raw.client is not None:
        raise ConfigError(f"data: clients={clients} deals one pool, but client says whose each sample is; leave it out")
    if alpha is None:
        parts = even(len(strata), clients, seed)
    else:
        alike = strata if raw.split is None else np.where(raw.split == recorded.UNLABELLED, -1, strata)
        parts = dirichlet(alike, clients, alpha, seed, min_samples=min(_FEWEST, len(strata) // clients))
    client = np.zeros(len(strata), np.int64)
    for number, part in enumerate(parts):
        client[part] = number
    return replace(raw, client=client)


def _late(names: list[str], newcomers: int | tuple[str, ...], seed: int) -> set[str]:
    """The clients that come when the training is over."""
    if not isinstance(newcomers, int):
        late = set(newcomers)
    else:
        valid.whole("data", "newcomers", newcomers, 0, len(names) - 1)
        late = {names[at] for at in np.random.default_rng([seed, len(names)]).permutation(len(names))[:newcomers]}
    if not late < set(names):
        raise ConfigError(
            f"data: newcomers={shown(sorted(late))} must be some of the clients, and not all: {some_of(names, 20)}"
        )
    return late


def _targets(raw: Recorded, task: str) -> tuple[tuple[str, ...], Array]:
    """The names of the outputs that a model needs, and what it learns."""
    y, name = recorded.targets(raw), tasks.of(task).name
    if name == tasks.CLASSIFICATION:
        if y.ndim != 1:
            mend = ", or write y.argmax(1) where each row marks one class" if y.shape[1] > 1 else ", or write y[:, 0]"
            raise DataError(
                f"data: y has shape {y.shape}, and classification takes one class for each, (N,); name the task of "
                f"these targets (task='regression', 'multilabel' or 'per_step'){mend}"
            )
        _require_known(raw, y)
        labels, classes = np.unique(y if y.dtype.kind == "U" else recorded.whole(y, "y"), return_inverse=True)
        if len(labels) < 2:
            raise DataError(f"data: y holds one class only, {labels[0]}; a classifier needs at least two")
        return tuple(str(label) for label in labels.tolist()), classes
    if y.dtype.kind not in "bfiu" or y.ndim not in (1, 2) or 0 in y.shape:
        raise DataError(
            f"data: y is {y.dtype} {y.shape}, and task={task!r} takes numbers (N, ...); give one row for each sample"
        )
    if name == "regression":
        odd = np.flatnonzero(~(np.abs(y.reshape(len(y), -1)) <= np.finfo(np.float32).max).all(1))
        if len(odd):
            raise DataError(
                f"data: {raw.place('y', odd[0])} holds NaN, infinity or a value beyond float32; drop that sample"
            )
        largest = np.abs(y.reshape(len(y), -1)).max(0)
        if ((largest > 0) & (largest < LEAST_SPREAD)).any():  # whose spread would count as none
            raise DataError(
                f"data: y holds targets of at most {largest[largest > 0].min():g}, and what differs by less "
                f"than {LEAST_SPREAD:g} counts as the same; write them in a smaller unit"
            )
        return tuple(f"target-{k}" for k in range(len(largest))), y.astype(np.float32)
    whole = recorded.whole(y, "y")
    if y.ndim != 2:
        raise DataError(
            f"data: y has shape {y.shape}, and task={task!r} takes (N, labels or steps); give a row for each"
        )
    if name == "per_step" and whole.max() < 1:
        found = "no step has a class" if whole.max() < 0 else "all steps have one class"
        raise DataError(f"data: y spans {whole.min()}..{whole.max()}, so {found}; label steps from 0 up to 1 at least, "
                        "with -1 for padding")  # fmt: skip
    count = y.shape[1] if name == "multilabel" else int(whole.max()) + 1
    return tuple(f"label-{k}" for k in range(count)), whole


def _require_known(raw: Recorded, y: Array) -> None:
    """Raise :class:`DataError` where a sample has no label: an empty text, NaN, or -1 beside classes from 0 up. It
    would be learned as a class of its own."""
    mend = ""
    if y.dtype.kind == "U":
        said, missing = "empty", y == ""
    elif y.dtype.kind == "f" and np.isnan(y).any() and not np.isnan(y).all():
        said, missing = "NaN", np.isnan(y)
    elif y.dtype.kind in "if" and (y == 0).any() and y.min() == -1:
        said, missing, mend = "-1", y == -1, "; where -1 is a class, write y + 1, or names"
    else:
        return
    if missing.any():
        place = raw.place("y", missing.argmax())
        raise DataError(
            f"data: {place} is {said}, a sample without a label, as {missing.sum()} are; give "
            f"them split={recorded.UNLABELLED}, or drop them{mend}"
        )


def _client(x: Array, y: Array, rows: tuple[Array, Array, Array, Array]) -> Client:
    *parts, rest = rows
    unlabelled = x[rest].astype(np.float32) if len(rest) else None
    return Client(*(_part(x[index], y[index]) for index in parts), unlabelled=unlabelled)


def _part(x: Array, y: Array) -> Samples:
    return Samples(x.astype(np.float32), y.astype(np.float32 if y.dtype.kind == "f" else np.int64))


def _numbers(raw: Recorded) -> Array:
    """``x`` as uint8 or finite float32."""
    x = inputs.array_of(raw.x, "data: x")
    if x.ndim < 2:
        raise DataError(f"data: x has shape {x.shape}, need (N, ...); for one feature a sample give x[:, None]")
    if 0 in x.shape:
        raise DataError(f"data: x has shape {x.shape} and so holds no value; give at least one sample")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind in "ui" and max(abs(int(x.min())), abs(int(x.max()))) > _EXACT:
        raise DataError(
            f"data: x spans {x.min()}..{x.max()}, too large to stay exact as float32; scale it before writing it"
        )
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x) if x.dtype.itemsize <= 4 else ~(np.abs(x) <= np.finfo(np.float32).max)
        if bad.any():
            first = int(np.flatnonzero(bad.reshape(len(x), -1).any(1))[0])
            raise DataError(
                f"data: {raw.place('x', first)} holds NaN, infinity or a value beyond float32; "
                "drop or repair that sample"
            )
    return x.astype(np.float32)


def _oriented(x: Array, layout: str, steps: int = 0) -> tuple[Array, str]:
    """``x`` with its channels after N, and what was done in words; where each of so many ``steps`` has a class, the
    side of a series that is as long is its time."""
    if layout == "auto" and x.ndim == 3 and (x.shape[1] == steps) != (x.shape[2] == steps):
        layout = "channels_last" if x.shape[1] == steps else "channels_first"
    if x.ndim == 4:
        last = x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
        if layout == "channels_last" or (layout == "auto" and last):
            return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), "images, turned from channels-last"
        return x, "images, channels first"
    if x.ndim == 3:
        square = x.shape[1] == x.shape[2] >= _SMALLEST_IMAGE
        if layout == "auto" and (square or x.dtype == np.uint8):
            return x[:, None], "images of one channel"
        if layout == "channels_last" or (layout == "auto" and x.shape[1] > x.shape[2]):
            return np.ascontiguousarray(x.transpose(0, 2, 1)), "series, turned from (time, channels)"
        return x, "series, (channels, time)"
    return x, "table" if x.ndim == 2 else "as given"


def cut(
    raw: Recorded, y: Array, *, validation: float = 0.1, test: float = 0.2, seed: int = 0, only: str | None = None
) -> dict[str, tuple[Array, Array, Array, Array]]:
    """Each client's training, validation, test and unlabelled samples as positions in the file, or those of ``only``
    one; ``y`` int64 (N,)."""
    if raw.client is None:
        names: tuple[str, ...] = ("client-0",)
        numbers, rows = np.zeros(1, np.int64), np.zeros(len(y), np.int64)
    else:
        names, numbers, rows = recorded.clients(raw.client)
    out, rest = {}, np.zeros(0, np.int64)
    if raw.split is None:
        counts = np.bincount(rows, minlength=len(names))
        _require_none(
            [name for name, count in zip(names, counts, strict=True) if count < 2 and only in (None, name)],
            "1 sample, need at least 2 (one to train, one to test)",
        )  # fmt: skip
    for place, name in enumerate(names):
        if only not in (None, name):
            continue
        own = np.flatnonzero(rows == place)
        rng = np.random.default_rng([seed, int(numbers[place])])
        if raw.split is None:
            train, val, tests = (own[i] for i in stratified(y[own], validation, test, rng))
        else:
            train, val, tests, rest = (own[raw.split[own] == part] for part in (0, 1, 2, recorded.UNLABELLED))
            if not len(val) and validation and len(train):
                kept, held, _ = stratified(y[train], validation / (1 - test), 0.0, rng)
                train, val = train[kept], train[held]
        out[name] = (train, val, tests, rest)
    return out


def _require_none(clients: list[str], has: str, mend: str = "") -> None:
    """Raise :class:`DataError` where there are any such clients, with all their names."""
    if len(clients) == 1:
        raise DataError(f"data: {clients[0]} has {has}; {mend.format('it')}drop the client")
    if clients:
        raise DataError(
            f"data: {len(clients)} clients have {has}; {mend.format('each')}drop them: {some_of(clients, 20)}"
        )


def _scale(x: Array, train: Array) -> tuple[Array, Array]:
    axes = (0, *range(2, x.ndim))
    fitted = x[train].astype(np.float64)
    mean, sd = fitted.mean(axes, keepdims=True), fitted.std(axes, keepdims=True)
    # What never changes has a deviation of rounding alone; what is written in a large unit is small, and changes.
    varies = sd > np.maximum(1e-12 * np.abs(mean), np.finfo(np.float32).tiny)
    return mean.astype(np.float32), np.where(varies, sd, 1.0).astype(np.float32)
