"""Fashion-MNIST and CIFAR-100 from files of the published shapes, filled so that each image tells its own number."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from talaria.data import Federated, load, options_of
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array

PARTS = {"train": 60_000, "t10k": 10_000}


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes() + values.tobytes()


def labels(count: int) -> np.ndarray[Any, Any]:
    return (np.arange(count) * 7 % 10).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files; an image holds its number in its first two pixels."""
    out = tmp_path_factory.mktemp("fashion")
    for part, count in PARTS.items():
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.arange(count) // 256, np.arange(count) % 256
        (out / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images), 1))
        (out / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels(count)))
    return out


def numbers(x: Array) -> list[int]:
    pixels = ((x * 0.5 + 0.5) * 255).round().astype(int)
    return (pixels[:, 0, 0, 0] * 256 + pixels[:, 0, 0, 1]).tolist()


def test_given_partition_is_used_to_the_letter(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train_idx = rng.permutation(60_000)[: 3 * 60].reshape(3, 60)
    test_idx = rng.permutation(10_000)[: 3 * 20].reshape(3, 20)
    path = tmp_path / "cut.npz"
    np.savez(path, train_idx=train_idx, test_idx=test_idx)
    data = load("fashion-mnist", folder=folder, partition=path, columns=30, validation=10)
    assert list(data.clients) == ["client-0", "client-1", "client-2"]
    assert (data.input_shape, data.classes) == ((1, 28, 28), 10)
    for k, client in enumerate(data.clients.values()):
        assert numbers(client.train.x) == train_idx[k, :30].tolist()
        assert numbers(client.val.x) == train_idx[k, 30:40].tolist()
        assert numbers(client.test.x) == test_idx[k].tolist()
        assert client.test.y.tolist() == labels(10_000)[test_idx[k]].tolist()
        assert float(client.train.x.min()) == -1.0
    whole = load("fashion-mnist", folder=folder, partition=path, columns=60, validation=10)
    assert whole.meta["train"] == len(whole.clients["client-0"].train) == 50
    narrow = load("fashion-mnist", folder=folder, partition=path)
    assert [len(narrow.clients["client-0"].train), len(narrow.clients["client-0"].val)] == [50, 10]
    with pytest.raises(
        ConfigError, match=r"columns=300 and validation=10 do not fit the 60 columns .* or leave them out"
    ):
        load("fashion-mnist", folder=folder, partition=path, columns=300)


def test_pixels_are_scaled_to_minus_one_and_one(folder: Path) -> None:
    x = load("fashion-mnist", folder=folder, columns=5, validation=0, clients=2, tests=5).clients["client-0"].train.x
    high = numbers(x)[0] // 256
    assert float(x[0, 0, 0, 0]) == pytest.approx((high / 255 - 0.5) / 0.5, abs=1e-6)


def images_of(data: Federated) -> list[list[int]]:
    return [numbers(np.concatenate([c.train.x, c.val.x])) for c in data.clients.values()]


def test_own_partition_is_skewed_disjoint_and_seeded(folder: Path) -> None:
    options = {"folder": folder, "clients": 5, "columns": 40, "validation": 10, "tests": 20}
    data = load("fashion-mnist", **options)
    used = [number for own in images_of(data) for number in own]
    assert len(used) == len(set(used)) == 250
    assert all(len(c.test) == 20 for c in data.clients.values())
    assert images_of(data) == images_of(load("fashion-mnist", **options))
    assert images_of(data) != images_of(load("fashion-mnist", **options, seed=1))
    for client in data.clients.values():
        train = np.bincount(client.train.y, minlength=10) / 40
        test = np.bincount(client.test.y, minlength=10) / 20
        assert float(train.max()) > 0.3
        assert float(np.abs(train - test).max()) < 0.3


@pytest.mark.parametrize(
    ("train_idx", "test_idx", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3), int), r"train_idx is float64 \(2, 3\), need integers"),
        (np.arange(6), np.arange(6).reshape(2, 3), r"train_idx is int64 \(6,\), need integers"),
        (np.array([[0, 1]]), np.zeros((1, 0), int), r"'test_idx' claims 1 rows but holds no value"),
        (np.array([[0, 1]]), np.zeros((0, 1), int), r"test_idx is int64 \(0, 1\), need .*at least one of each"),
        (np.array([[0, 60_000]]), np.array([[0]]), r"train_idx spans 0..60000, need 0..59999"),
        (np.array([[0, 1]]), np.array([[-1, 2]]), r"test_idx spans -1..2, need 0..9999"),
        (np.array([[0, 1], [1, 2]]), np.array([[0]]), "train_idx holds an image twice"),
        (np.array([[0, 1], [3, 2]]), np.array([[0, 1]]), "train_idx has 2 clients, test_idx 1"),
    ],
)
def test_bad_partition_files(
    folder: Path, tmp_path: Path, train_idx: np.ndarray[Any, Any], test_idx: np.ndarray[Any, Any], message: str
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, train_idx=train_idx, test_idx=test_idx)
    with pytest.raises(DataError, match=message):
        load("fashion-mnist", folder=folder, partition=path, columns=1, validation=1)


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train-images-idx3-ubyte.* install Debian's package dataset-fashion-mnist"):
        load("fashion-mnist", folder=tmp_path)
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    test_labels = tmp_path / "t10k-labels-idx1-ubyte"

    def broken(data: bytes, name: str = "t10k-labels-idx1-ubyte") -> str:
        test_labels.unlink(missing_ok=True)
        (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink(missing_ok=True)
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError) as caught:
            load("fashion-mnist", folder=tmp_path)
        return str(caught.value)

    whole = idx(labels(10_000))
    assert "holds 9999 bytes after its header, need 10000" in broken(whole[:-1])
    assert "holds more bytes after its header, need 10000" in broken(whole + b"x")
    assert "begins with 00000801" in broken(idx(labels(9_999)))
    assert "cannot be read" in broken(gzip.compress(whole)[:-20], "t10k-labels-idx1-ubyte.gz")
    assert "cannot be read (Not a gzipped file" in broken(whole, "t10k-labels-idx1-ubyte.gz")
    test_labels.with_suffix(".gz").unlink()
    with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte\(.gz\)"):
        load("fashion-mnist", folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": 0}, "columns=0 must be at least 1"),
        ({"tests": 0}, "tests=0 must be at least 1"),
        ({"validation": -1}, "validation=-1 must be at least 0"),
        ({"clients": 0}, "clients=0 must be at least 1"),
        ({"alpha": 0.0}, "alpha=0.0 above 0"),
        ({"clients": 1000}, "1000 clients x 350 samples exceed the 60000"),
    ],
    ids=str,
)
def test_bad_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("fashion-mnist", folder=folder, **options)


def cifar(path: Path, **changes: Any) -> str:
    rng = np.random.default_rng(0)
    good = {
        "train_x": rng.integers(0, 256, (2000, 32, 32, 3), dtype=np.uint8),
        "train_y": np.tile(np.arange(100), 20).astype(np.uint8),
        "test_x": rng.integers(0, 256, (500, 32, 32, 3), dtype=np.uint8),
        "test_y": np.tile(np.arange(100), 5).astype(np.uint8),
        "classes": np.array([f"c{i}" for i in range(100)]),
    }
    np.savez(path, **{k: v for k, v in (good | changes).items() if v is not None})
    return f"cifar100:{path}"


def test_cifar100(tmp_path: Path) -> None:
    name = cifar(tmp_path / "c.npz")
    data = load(name, clients=4, tests=50, alpha=0.1)
    assert data.labels[7] == "c7"
    assert data.input_shape == (3, 32, 32)
    assert sum(len(c.train) + len(c.val) for c in data.clients.values()) == 2000
    for client in data.clients.values():
        assert len(client.test) == 50
        assert len(client.val) == round(0.1 * (len(client.train) + len(client.val)))
        held = np.bincount(np.concatenate([client.train.y, client.val.y]), minlength=100) > 0
        assert held[client.test.y].mean() > 0.9
    few = load(name, clients=4, tests=50, samples_per_client=100)
    assert [len(c.train) + len(c.val) for c in few.clients.values()] == [100] * 4
    unnamed = load(cifar(tmp_path / "d.npz", classes=None), clients=4, tests=50)
    assert unnamed.labels[7] == "7"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": np.zeros((5, 3, 32, 32), np.uint8)}, r"train_x is uint8 \(5, 3, 32, 32\), need uint8"),
        ({"test_y": np.zeros(3, int)}, r"test_y is int64 \(3,\), need integers \(500,\)"),
        ({"test_y": np.full(500, 100)}, r"test_y must hold labels in 0..99"),
        ({"classes": np.arange(100)}, "classes is int64"),
        ({"test_x": None}, "array 'test_x' is missing"),
    ],
)
def test_bad_cifar100_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(cifar(tmp_path / "c.npz", **changes), clients=4, tests=50)


def test_bad_cifar100_options(tmp_path: Path) -> None:
    name = cifar(tmp_path / "c.npz")
    with pytest.raises(ConfigError, match=r"validation=1\.0 must be in"):
        load(name, validation=1.0)
    with pytest.raises(ConfigError, match="samples_per_client=1 must be at least 2"):
        load(name, samples_per_client=1)
    with pytest.raises(ConfigError, match="20 clients x 500 samples exceed the 500"):
        load(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mnist",
            r"'mnist' is unknown; use smartwatch, vowels, glucose, fashion-mnist, npz, cifar100, or module:Name",
        ),
        ("", "is unknown; use smartwatch, vowels, glucose, fashion-mnist"),
        ("smartwatch:x", "'smartwatch' is built in and takes NAME=VALUE"),
        ("npy:x", r"there is no module 'npy' \(did you mean 'npz'\?\)"),
        ("npz", "names no file; write npz:PATH.npz"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(name)


def test_a_file_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"names no file; write npz:PATH.npz"):
        load("npz:")


def test_options_are_told() -> None:
    assert options_of("npz:x") == (
        "validation",
        "test",
        "layout",
        "standardize",
        "seed",
        "task",
        "clients",
        "alpha",
        "newcomers",
    )
    assert "partition" in options_of("fashion-mnist")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "many"}, "dataset 'fashion-mnist': columns='many' must be a whole number"),
        ({"columns": 2.5}, r"columns=2\.5 must be a whole number"),
        ({"columns": True}, "columns=True must be a whole number"),
        ({"alpha": float("nan")}, "alpha=nan must be a number"),
        ({"partition": 3}, "partition=3 must be a path or text or left out"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("fashion-mnist", **options)


def test_options_from_files_may_be_text_and_lists(folder: Path) -> None:
    data = load(
        "fashion-mnist", folder=str(folder), columns=5, validation=0, clients=2, tests=5, alpha=1, partition=None
    )
    assert len(data.clients) == 2
    with pytest.raises(ConfigError, match=r"newcomers=\['9'\] must be a list"):
        load("smartwatch", newcomers=["9"])
    assert list(load("smartwatch", newcomers=[2]).newcomers) == ["s02-left", "s02-right"]
