"""CIFAR-100 from one ``.npz``: ``train_x`` and ``test_x`` uint8 (N, 32, 32, 3), ``train_y`` and ``test_y`` (N,)."""

from pathlib import Path

import numpy as np

from talaria import npz
from talaria.data.client import Client, samples
from talaria.data.federated import Federated
from talaria.data.partition import dirichlet, mixed, mixes_of, stratified
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria.types import Samples

MEAN, SD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
"""Of the 50,000 training images, per colour, in 0..1."""
_CLASSES = 100


def load(
    *,
    path: Path,
    clients: int = 20,
    alpha: float = 0.1,
    validation: float = 0.1,
    tests: int = 500,
    samples_per_client: int | None = None,
    seed: int = 0,
) -> Federated:
    """Clients cut label by label from Dirichlet(alpha), float32 (3, 32, 32), normalized by :data:`MEAN` and :data:`SD`.

    ``tests`` test images per client follow the label mix of its training part, without replacement as far as a
    label lasts. ``validation`` is the share cut off each client's training part, alike for each label.
    ``samples_per_client`` limits the training part (None: all).
    """
    if not 0 <= validation < 1 or tests < 1:
        raise ConfigError(f"cifar100: validation={validation} must be in [0, 1) and tests={tests} at least 1")
    if samples_per_client is not None and samples_per_client < 2:
        raise ConfigError(f"cifar100: samples_per_client={samples_per_client} must be at least 2, or None for all")
    raw = npz.read(path, ("train_x", "train_y", "test_x", "test_y"), ("classes",))
    for part in ("train", "test"):
        _check(raw[f"{part}_x"], raw[f"{part}_y"], part)
    own = dirichlet(raw["train_y"], clients, alpha, seed, min_samples=10)
    if samples_per_client is not None:
        rng = np.random.default_rng([seed, 1])
        own = [np.sort(rng.permutation(index)[:samples_per_client]) for index in own]
    tested = mixed(raw["test_y"], mixes_of(raw["train_y"], own, _CLASSES), tests, seed)
    digits = len(str(clients - 1))
    return Federated(
        name="cifar100",
        clients={
            f"client-{k:0{digits}d}": _client(raw, own[k], tested[k], validation, np.random.default_rng([seed, 2, k]))
            for k in range(clients)
        },
        labels=_labels(raw.get("classes")),
        input_shape=(3, 32, 32),
        meta={"mean": MEAN, "sd": SD, "partition": f"drawn from seed {seed}, alpha {alpha}"},
    )


def _client(raw: dict[str, Array], own: Array, tested: Array, validation: float, rng: np.random.Generator) -> Client:
    train, val, _ = stratified(raw["train_y"][own], validation, 0.0, rng)
    return Client(
        train=_samples(raw["train_x"], raw["train_y"], own[train]),
        val=_samples(raw["train_x"], raw["train_y"], own[val]),
        test=_samples(raw["test_x"], raw["test_y"], tested),
    )


def _check(x: Array, y: Array, part: str) -> None:
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (32, 32, 3):
        raise DataError(f"cifar100: {part}_x is {x.dtype} {x.shape}, need uint8 (N, 32, 32, 3)")
    if y.dtype.kind not in "ui" or y.shape != x.shape[:1]:
        raise DataError(f"cifar100: {part}_y is {y.dtype} {y.shape}, need integers {x.shape[:1]}")
    if len(y) == 0 or int(y.min()) < 0 or int(y.max()) >= _CLASSES:
        raise DataError(f"cifar100: {part}_y must hold labels in 0..{_CLASSES - 1}, and at least one")


def _labels(names: Array | None) -> tuple[str, ...]:
    if names is None:
        return tuple(str(label) for label in range(_CLASSES))
    if names.dtype.kind != "U" or names.shape != (_CLASSES,):
        raise DataError(f"cifar100: classes is {names.dtype} {names.shape}, need text ({_CLASSES},)")
    return tuple(str(name) for name in names)


def _samples(x: Array, y: Array, index: Array) -> Samples:
    pixels = x[index].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    mean, sd = (np.array(v, dtype=np.float32)[:, None, None] for v in (MEAN, SD))
    return samples((pixels - mean) / sd, y[index])
