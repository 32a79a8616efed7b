"""Fashion-MNIST over clients with few, skewed labels. Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from talaria import npz
from talaria.data import idx
from talaria.data.client import Client, samples
from talaria.data.federated import Federated
from talaria.data.partition import mixed, mixes_of
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria.types import Samples

LABELS = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_TRAIN, _TEST, _SIDE = 60_000, 10_000, 28
FOLDERS = (
    Path("/usr/share/datasets/fashion-mnist"),
    Path("data/FashionMNIST/raw"),
    Path(os.path.expanduser("~/.cache/torchvision/FashionMNIST/raw")),  # Path.home raises where there is none
)
"""Where the four files are looked for: Debian's package, then torchvision's folder under ``data``."""


@dataclass(frozen=True)
class Images:
    """``x`` uint8 (N, 28, 28) and ``y`` uint8 (N,), as published."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array


def read(folder: Path | None = None) -> Images:
    """The images in ``folder``, else in the first of :data:`FOLDERS` that has them (plain or ``.gz``)."""
    tried = FOLDERS if folder is None else (folder,)
    for place in tried:
        if _file(place, "train-images-idx3-ubyte") is not None:
            return Images(
                _part(place, "train-images-idx3-ubyte", (_TRAIN, _SIDE, _SIDE)),
                _part(place, "train-labels-idx1-ubyte", (_TRAIN,)),
                _part(place, "t10k-images-idx3-ubyte", (_TEST, _SIDE, _SIDE)),
                _part(place, "t10k-labels-idx1-ubyte", (_TEST,)),
            )
    raise DataError(
        f"fashion-mnist: no train-images-idx3-ubyte(.gz) in {', '.join(map(str, tried))}; install Debian's package "
        f"dataset-fashion-mnist, or run torchvision.datasets.FashionMNIST('data', download=True), or give folder=..."
    )


def load(
    *,
    partition: Path | str | None = None,
    columns: int | None = None,
    validation: int | None = None,
    clients: int = 20,
    alpha: float = 0.1,
    tests: int = 200,
    seed: int = 0,
    folder: Path | str | None = None,
) -> Federated:
    """Clients with ``columns`` training images each, float32 (1, 28, 28), pixels as (x/255 - 0.5)/0.5.

    ``partition``: a ``.npz`` with ``train_idx`` int (clients, width) into the 60,000 training images and
    ``test_idx`` int (clients, k) into the 10,000 test images, no image twice. The first ``columns`` columns train (300,
    or all of a narrower file). The ``validation`` images (50, or a sixth of a file's columns) come from the columns
    behind them, so that they cost the training nothing; where the file has too few, they come off the end of the
    training columns (``meta["train"]`` says how many are left).

    Without a file, one is drawn from ``seed``: for each of ``clients`` a label mix from Dirichlet(alpha), images
    without replacement, ``tests`` test images by the same mix.
    """
    for name, value, low in (("columns", columns, 1), ("validation", validation, 0), ("tests", tests, 1)):
        if value is not None and value < low:
            raise ConfigError(f"fashion-mnist: {name}={value} must be at least {low}")
    given = None if partition is None else _from_file(Path(partition))
    images = read(None if folder is None else Path(folder))
    if columns is None:
        columns = 300 if given is None else min(300, given[0].shape[1])
    if validation is None:
        validation = 50 if given is None else min(50, given[0].shape[1] // 6)
    if given is None:
        given = _draw(images, columns + validation, tests, clients=clients, alpha=alpha, seed=seed)
    train_idx, test_idx = given
    width = train_idx.shape[1]
    if columns > width or validation >= width:
        raise ConfigError(
            f"fashion-mnist: columns={columns} and validation={validation} do not fit the {width} columns of "
            f"{partition}; lower them, or leave them out"
        )
    stop = min(columns, width - validation)
    digits = len(str(len(train_idx) - 1))
    return Federated(
        name="fashion-mnist",
        clients={
            f"client-{k:0{digits}d}": Client(
                train=_samples(images.train_x, images.train_y, own[:stop]),
                val=_samples(images.train_x, images.train_y, own[stop : stop + validation]),
                test=_samples(images.test_x, images.test_y, test),
            )
            for k, (own, test) in enumerate(zip(train_idx, test_idx, strict=True))
        },
        labels=LABELS,
        input_shape=(1, _SIDE, _SIDE),
        meta={
            "mean": (0.5,),
            "sd": (0.5,),
            "train": stop,
            "validation": validation,
            "partition": f"drawn from seed {seed}, alpha {alpha}" if partition is None else Path(partition).name,
        },
    )


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _part(folder: Path, name: str, shape: tuple[int, ...]) -> Array:
    path = _file(folder, name)
    if path is None:
        raise DataError(f"fashion-mnist: {folder} lacks {name}(.gz); install the data set again")
    return idx.read(path, shape)


def _from_file(path: Path) -> tuple[Array, Array]:
    raw = npz.read(path, ("train_idx", "test_idx"))
    for key, most in (("train_idx", _TRAIN), ("test_idx", _TEST)):
        index = raw[key]
        if index.dtype.kind not in "ui" or index.ndim != 2 or 0 in index.shape:
            raise DataError(
                f"{path}: {key} is {index.dtype} {index.shape}, need integers (clients, images), at least one of each"
            )
        if int(index.min()) < 0 or int(index.max()) >= most:
            raise DataError(f"{path}: {key} spans {index.min()}..{index.max()}, need 0..{most - 1}; cut it again")
        if len(np.unique(index)) != index.size:
            raise DataError(f"{path}: {key} holds an image twice; draw without replacement")
    train, test = raw["train_idx"].astype(np.int64), raw["test_idx"].astype(np.int64)
    if len(train) != len(test):
        raise DataError(f"{path}: train_idx has {len(train)} clients, test_idx {len(test)}; give both for each client")
    return train, test


def _draw(images: Images, width: int, tests: int, *, clients: int, alpha: float, seed: int) -> tuple[Array, Array]:
    if clients < 1 or not 0 < alpha < float("inf"):
        raise ConfigError(f"fashion-mnist: clients={clients} must be at least 1 and alpha={alpha} above 0")
    classes = len(LABELS)
    mixes = np.random.default_rng([seed, 0]).dirichlet(np.full(classes, alpha), size=clients)
    train = mixed(images.train_y, mixes, width, seed)
    test = mixed(images.test_y, mixes_of(images.train_y, train, classes), tests, seed)
    return np.stack(train), np.stack(test)


def _samples(x: Array, y: Array, index: Array) -> Samples:
    pixels = x[index, None].astype(np.float32)
    return samples((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5), y[index])
