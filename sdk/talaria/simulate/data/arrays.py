"""Any user's arrays as a federated dataset: ``npz:FILE``.

``x`` (N, ...) holds the samples, ``y`` (N,) the labels, ``client`` (N,) whose each sample is; ``split`` (N,), where it
is given, says 0 train, 1 validation, 2 test.
"""

from pathlib import Path
from typing import Any

import numpy as np

from talaria.errors import ConfigError, DataError
from talaria.simulate.data import npz
from talaria.simulate.data.federated import Client, Federated, samples
from talaria.simulate.data.partition import stratified

Array = np.ndarray[Any, np.dtype[Any]]

LAYOUTS = ("auto", "channels_first", "channels_last")
_EXACT = 1 << 24
_SMALLEST_IMAGE = 8


def load(
    *,
    path: Path,
    validation: float = 0.1,
    test: float = 0.2,
    layout: str = "auto",
    standardize: bool = True,
    seed: int = 0,
) -> Federated:
    """The dataset in ``path``.

    **Values.** uint8 is taken for pixels and divided by 255. Other numbers become float32 and, with
    ``standardize``, are z-scored by the mean and standard deviation of all clients' training samples: per channel
    for series and images, per feature for tables.

    **Layout.** What a model sees is (features), (channels, time) or (channels, height, width). With ``"auto"``: 4
    dimensions with 1, 3 or 4 at the end and not after N are channels-last and are turned; 3 dimensions are one-channel
    images where they are uint8 or square from 8 x 8, else series, of which the shorter side is the channels. ``meta``
    says what was done; ``layout`` says otherwise.

    **Labels** may be any integers: they become 0..C-1 in their order and keep their numbers as names.

    **Split.** Without one, each client's samples are cut at random, alike for each label: ``test`` of them test,
    ``validation`` of them validate, the rest train (0.2, 0.1, 0.7). With one, only a client that has no validation
    sample gets its share from its training part. Where neighbouring samples overlap (sliding windows), give a
    split: a random cut would put halves of the same second into train and test.

    :class:`DataError` names the array, the value and the mend.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"npz: layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if validation < 0 or test <= 0 or validation + test >= 1:
        raise ConfigError(
            f"npz: validation={validation} must be at least 0, test={test} above 0, and their sum below 1"
        )
    raw = npz.read(path, ("x", "y", "client"), ("split",))
    y, owners = _integers(raw["y"], "y"), _integers(raw["client"], "client")
    x, done = _oriented(_numbers(raw["x"]), layout)
    _lengths(x, y, owners)
    if int(owners.min()) < 0:
        raise DataError(f"npz: client={owners.min()} is negative; number the clients from 0")
    names, y = np.unique(y, return_inverse=True)
    if len(names) < 2:
        raise DataError(f"npz: y holds one class only, {names[0]}; a classifier needs at least two")
    given = _split(raw["split"], len(y)) if "split" in raw else None
    parts = _parts(y, owners, given, validation=validation, test=test, seed=seed)
    scaling: dict[str, Any] = {"scaled": "divided by 255" if raw["x"].dtype == np.uint8 else "as given"}
    if raw["x"].dtype == np.uint8:
        x = x.astype(np.float32) / np.float32(255)
    elif standardize:
        mean, sd = _scale(x, np.concatenate([train for train, _, _ in parts.values()]))
        x = (x - mean) / sd
        scaling = {"scaled": "z-scored", "mean": mean.ravel().tolist(), "sd": sd.ravel().tolist()}
    width = len(str(max(parts)))
    return Federated(
        name=f"npz:{path.name}",
        clients={
            f"client-{owner:0{width}d}": Client(*(samples(x[index], y[index]) for index in cut))
            for owner, cut in parts.items()
        },
        labels=tuple(str(name) for name in names),
        input_shape=x.shape[1:],
        meta={"layout": done, "split": "as given" if given is not None else "cut at random", **scaling},
    )


def _numbers(x: Array) -> Array:
    """``x`` as uint8 or finite float32."""
    if x.ndim < 2:
        raise DataError(f"npz: x has shape {x.shape}, need (N, ...); for one feature a sample give x[:, None]")
    if 0 in x.shape:
        raise DataError(f"npz: x has shape {x.shape} and so holds no value; give at least one sample")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "buif":
        raise DataError(f"npz: x has dtype {x.dtype}, need numbers; write x.astype('float32')")
    if x.dtype.kind in "ui" and max(abs(int(x.min())), abs(int(x.max()))) > _EXACT:
        raise DataError(
            f"npz: x spans {x.min()}..{x.max()}, too large to stay exact as float32; scale it before writing it"
        )
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x) if x.dtype.itemsize <= 4 else ~(np.abs(x) <= np.finfo(np.float32).max)
        if bad.any():
            first = int(np.flatnonzero(bad.reshape(len(x), -1).any(1))[0])
            raise DataError(
                f"npz: x[{first}] holds NaN, infinity or a value beyond float32; drop or repair that sample"
            )
    return x.astype(np.float32)


def _integers(values: Array, name: str) -> Array:
    if values.ndim != 1:
        raise DataError(f"npz: {name} has shape {values.shape}, need (N,); write {name}.reshape(-1)")
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.rint(values)).all():
        whole = np.abs(values) < 2**53
        if whole.all():
            return values.astype(np.int64)
    if values.dtype.kind not in "bui" or (values.dtype == np.uint64 and len(values) and values.max() >= 2**63):
        raise DataError(f"npz: {name} has dtype {values.dtype}, need whole numbers; write {name}.astype('int64')")
    return values.astype(np.int64)


def _lengths(x: Array, y: Array, owners: Array) -> None:
    if not len(x) == len(y) == len(owners):
        raise DataError(f"npz: x has {len(x)} rows, y {len(y)}, client {len(owners)}; give one of each per sample")


def _split(values: Array, count: int) -> Array:
    split = _integers(values, "split")
    if len(split) != count:
        raise DataError(f"npz: split has {len(split)} rows, y {count}; give one per sample")
    odd = split[(split < 0) | (split > 2)]
    if len(odd):
        raise DataError(f"npz: split={odd[0]} is unknown; use 0 train, 1 validation, 2 test")
    return split


def _oriented(x: Array, layout: str) -> tuple[Array, str]:
    """``x`` with its channels after N, and what was done in words."""
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


def _parts(
    y: Array, owners: Array, split: Array | None, *, validation: float, test: float, seed: int
) -> dict[int, tuple[Array, Array, Array]]:
    out = {}
    for owner in np.unique(owners).tolist():
        own = np.flatnonzero(owners == owner)
        rng = np.random.default_rng([seed, owner])
        if split is None:
            if len(own) < 2:
                raise DataError(
                    f"npz: client {owner} has 1 sample, need at least 2 (one to train, one to test); drop it"
                )
            train, val, tests = (own[i] for i in stratified(y[own], validation, test, rng))
        else:
            train, val, tests = (own[split[own] == part] for part in (0, 1, 2))
            for name, part, value in (("training", train, 0), ("test", tests, 2)):
                if not len(part):
                    raise DataError(
                        f"npz: client {owner} has no {name} sample (split={value}); give it one, or drop the client"
                    )
            if not len(val) and validation:
                kept, held, _ = stratified(y[train], validation / (1 - test), 0.0, rng)
                train, val = train[kept], train[held]
        out[owner] = (train, val, tests)
    return out


def _scale(x: Array, train: Array) -> tuple[Array, Array]:
    axes = (0, *range(2, x.ndim))
    fitted = x[train].astype(np.float64)
    mean, sd = fitted.mean(axes, keepdims=True), fitted.std(axes, keepdims=True)
    return mean.astype(np.float32), np.where(sd > 1e-12, sd, 1.0).astype(np.float32)
