"""Any user's arrays: what is accepted, what is done to it, and what is refused in which words."""

import contextlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import roundings

import talaria
from talaria import npz
from talaria.data import Client, Federated, load
from talaria.errors import ConfigError, DataError
from talaria.types import Samples


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    good = {
        "x": rng.normal(3, 2, (60, 5)).astype(np.float32),
        "y": np.tile([0, 1, 2], 20),
        "client": np.repeat([0, 1, 2], 20),
    }
    return {k: v for k, v in (good | changes).items() if v is not None}


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **arrays(**changes))
    return path


def loaded(folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Federated:
    return load(f"npz:{saved(folder, **changes)}", **(options or {}))


def test_cut_is_complete_stratified_and_deterministic(tmp_path: Path) -> None:
    data = loaded(tmp_path, {"standardize": False})
    assert list(data.clients) == ["client-0", "client-1", "client-2"]
    assert (data.name, data.input_shape, data.labels) == ("npz:mine.npz", (5,), ("0", "1", "2"))
    for k, client in enumerate(data.clients.values()):
        assert (len(client.train), len(client.val), len(client.test)) == (14, 2, 4)
        every = np.concatenate([client.train.x, client.val.x, client.test.x])
        own = arrays()["x"][20 * k : 20 * k + 20]
        assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, own.tolist()))
        assert np.ptp(np.bincount(client.test.y, minlength=3)) <= 1
    again = loaded(tmp_path, {"standardize": False})
    other = loaded(tmp_path, {"standardize": False, "seed": 1})
    assert all(
        np.array_equal(a.train.x, b.train.x) for a, b in zip(data.clients.values(), again.clients.values(), strict=True)
    )
    assert not np.array_equal(data.clients["client-0"].train.x, other.clients["client-0"].train.x)


def test_given_split_is_kept(tmp_path: Path) -> None:
    split = np.tile([0, 0, 0, 1, 2], 12)
    data = loaded(tmp_path, {"standardize": False}, split=split)
    client = data.clients["client-1"]
    own = arrays()["x"][20:40]
    assert np.array_equal(client.train.x, own[split[20:40] == 0])
    assert np.array_equal(client.val.x, own[split[20:40] == 1])
    assert np.array_equal(client.test.x, own[split[20:40] == 2])
    assert data.meta["split"] == "as given"


def test_a_split_without_validation_gets_it_from_the_training_part(tmp_path: Path) -> None:
    split = np.tile([0, 0, 0, 0, 2], 12)
    client = loaded(tmp_path, split=split).clients["client-0"]
    assert (len(client.train), len(client.val), len(client.test)) == (14, 2, 4)
    client = loaded(tmp_path, {"validation": 0.0}, split=split).clients["client-0"]
    assert (len(client.train), len(client.val), len(client.test)) == (16, 0, 4)


@pytest.mark.parametrize("filler", [-1, 0, np.nan, "", "none"])
def test_what_a_split_marks_as_unlabelled_is_scaled_and_its_label_is_not_read(tmp_path: Path, filler: Any) -> None:
    split = np.tile([0, 0, 0, 1, 2], 12)
    y, without = arrays()["y"], np.arange(60) % 4 == 3
    y = np.array(["rest", "walk", "run"])[y] if isinstance(filler, str) else y.astype(type(filler))
    labelled = loaded(tmp_path, y=y, split=split)
    assert all(one.unlabelled is None for one in labelled.clients.values())
    x, whole = arrays()["x"], labelled.clients["client-1"]
    y[without] = filler
    found = loaded(tmp_path, y=y, split=np.where(without, 3, split))
    assert found.labels == labelled.labels
    one, own = found.clients["client-1"], slice(20, 40)
    assert one.train.y.tolist() == whole.train.y[~without[own][split[own] == 0]].tolist()
    mean, sd = (np.array(found.meta[name], np.float32) for name in ("mean", "sd"))
    assert one.unlabelled is not None
    np.testing.assert_allclose(one.unlabelled, (x[own][without[own]] - mean) / sd, rtol=1e-4, atol=1e-5)
    assert mean.tolist() == pytest.approx(x[(split == 0) & ~without].mean(0).tolist(), rel=1e-4)


def test_unlabelled_windows_may_stand_by_themselves(tmp_path: Path) -> None:
    parts = {f"x_{part}": np.full((6, 5), k, np.float32) for k, part in enumerate(("train", "val", "test"))}
    labels = {f"y_{part}": np.tile(["rest", "walk"], 3) for part in ("train", "val", "test")}
    rest = np.full((4, 5), 7, np.float32)
    np.savez(tmp_path / "parts.npz", **parts, **labels, x_unlabelled=rest)
    found = load(f"npz:{tmp_path / 'parts.npz'}", standardize=False)
    assert found.labels == ("rest", "walk")
    assert np.array_equal(found.clients["client-0"].unlabelled, rest)
    np.savez(tmp_path / "parts.npz", **parts, **labels, x_unlabelled=rest[:, :4])
    with pytest.raises(DataError, match=r"unlabelled samples have shape \(4,\), train \(5,\); cut alike"):
        load(f"npz:{tmp_path / 'parts.npz'}")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (
            np.zeros((2, 4), np.float32),
            r"mine: anna unlabelled is float32 \(2, 4\), but the model takes float32 \(N, 5\)",
        ),
        (np.zeros((2, 5)), "anna unlabelled is float64"),
        ([[0.0] * 5], "anna unlabelled is list"),
        (np.full((2, 5), np.nan, np.float32), "anna unlabelled holds NaN or infinity; drop or repair those windows"),
    ],
    ids=["shape", "dtype", "list", "NaN"],
)
def test_a_clients_unlabelled_inputs_are_as_its_others(rest: Any, message: str) -> None:
    own = Samples.of(np.zeros((2, 5)), [0, 1])
    with pytest.raises(DataError, match=message):
        Federated("mine", {"anna": Client(own, own, own, unlabelled=rest)}, ("a", "b"), (5,))


def test_standardized_by_the_training_samples(tmp_path: Path) -> None:
    data = loaded(tmp_path)
    train = np.concatenate([c.train.x for c in data.clients.values()])
    assert roundings(train.mean(0), np.zeros(5, np.float32), scale=1.0) <= 100
    assert roundings(train.std(0), np.ones(5, np.float32)) <= 100
    assert data.meta["scaled"] == "z-scored"


def test_a_constant_feature_stays_finite(tmp_path: Path) -> None:
    x = arrays()["x"]
    x[:, 2] = 7
    assert not loaded(tmp_path, x=x).clients["client-0"].test.x[:, 2].any()


@pytest.mark.parametrize("unit", [1e-20, 1e-36])
def test_small_numbers_are_scaled_and_constant_ones_are_not(tmp_path: Path, unit: float) -> None:
    """Metres of a tremor, tesla of a brain: below a fixed 1e-12 they counted as constant, and nothing was learned."""
    x = arrays()["x"] * np.float32(unit)
    x[:, 2] = 7 * unit
    data = loaded(tmp_path, x=x)
    train = np.concatenate([c.train.x for c in data.clients.values()])
    assert np.allclose(np.delete(train, 2, 1).std(0), 1, atol=1e-3)
    assert not train[:, 2].any()


def test_a_federated_of_ones_own_says_what_its_clients_must_be() -> None:
    own = Samples.of(np.zeros((4, 5)), [0, 1, 0, 1])
    client = Client(own, own, own)
    for clients, said in (
        ([client], "clients is a list; give a Client each by its name"),
        ({"anna": (own, own, own)}, r"clients\['anna'\] is a tuple; give a Client by its name, a text"),
        ({7: client}, r"clients\[7\] is a Client; give a Client by its name, a text"),
    ):
        with pytest.raises(DataError, match=f"mine: {said}"):
            Federated("mine", clients, ("a", "b"), (5,))  # type: ignore[arg-type]
    told = Federated("mine", {"anna": client}, ["a", "b"], np.array([5]))  # type: ignore[arg-type]
    assert (told.labels, told.input_shape, type(told.input_shape[0])) == (("a", "b"), (5,), int)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": None}, "data: name=None must be text"),
        ({"labels": None}, "mine: labels=None must be the name of each output, a text"),
        ({"labels": (b"a", b"b")}, "mine: labels=.*must be the name of each output, a text"),
        ({"input_shape": 5}, r"mine: input_shape=5 must be the sizes of one sample without N, such as \(6, 100\)"),
        ({"input_shape": (5.5,)}, r"mine: input_shape=\(5.5,\) must be the sizes of one sample"),
        ({"meta": None}, "mine: meta=None must be plain values by name; leave it out"),
    ],
)
def test_what_a_federated_says_beside_its_clients_is_plain(wrong: dict[str, Any], said: str) -> None:
    """They ended in TypeErrors, here, when the run was saved, or when a module was to learn."""
    own = Samples.of(np.zeros((4, 5)), [0, 1, 0, 1])
    good = {"name": "mine", "clients": {"anna": Client(own, own, own)}, "labels": ("a", "b"), "input_shape": (5,)}
    with pytest.raises(DataError, match=said):
        Federated(**(good | wrong))


def test_labels_may_be_what_numpy_counts() -> None:
    """``labels=numpy.unique(y)`` ended in a TypeError of json when it was simulated."""
    own = Samples.of(np.eye(4, 5), [0, 1, 0, 1])
    made = [
        Federated("mine", {"anna": Client(own, own, own)}, labels, (5,))  # type: ignore[arg-type]
        for labels in (np.unique(own.y), (0, 1))
    ]
    assert made[0].labels == made[1].labels == (0, 1)
    first, second = (talaria.simulate("fedavg", one, rounds=1).asked["fingerprint"] for one in made)
    assert first == second


def test_labels_are_remapped_and_keep_their_names(tmp_path: Path) -> None:
    data = loaded(tmp_path, {"standardize": False}, y=np.tile([-5, 40, 1000], 20).astype(np.int16))
    assert data.labels == ("-5", "40", "1000")
    assert np.unique(data.clients["client-0"].train.y).tolist() == [0, 1, 2]


def test_names_in_any_script_are_names() -> None:
    names = ["Jürgen B.", "سارا\u200cنژاد", "\U0001f469\u200d\U0001f4bb", "李\u3000小龙", "a\u00a0b"]
    y = np.tile([0, 1], 25)
    found = Federated.from_arrays(np.arange(100.0).reshape(50, 2), y, np.repeat(names, 10))
    assert {*found.clients} == {*names}


def test_bytes_of_another_encoding_do_not_become_one_client(tmp_path: Path) -> None:
    names = np.repeat([name.encode("latin-1") for name in ("anna", "Jörg", "Jürg")], 20)
    for array in ("client", "y"):
        with pytest.raises(DataError, match=rf"{array} holds b'J\\xf6rg', which is no UTF-8; write numpy.char.decode"):
            loaded(tmp_path, **{array: names})
    assert [*loaded(tmp_path, client=np.char.encode(np.char.decode(names, "latin-1"))).clients] == [
        "Jörg",
        "Jürg",
        "anna",
    ]
    split, y = np.tile([0, 1, 2, 3], 15), np.tile([b"a", b"b", b"\xff"], 20)
    assert loaded(tmp_path, split=split, y=np.where(split == 3, b"\xff", np.where(y == b"\xff", b"c", y))).labels == (
        "a",
        "b",
        "c",
    )


def test_client_names_sort_as_their_numbers(tmp_path: Path) -> None:
    data = loaded(tmp_path, client=np.repeat([2, 10, 100], 20))
    assert list(data.clients) == ["client-002", "client-010", "client-100"]


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [
        ("float64", "z-scored"),
        ("float16", "z-scored"),
        ("int16", "z-scored"),
        ("bool", "z-scored"),
        ("uint8", "divided by 255"),
    ],
)
def test_other_dtypes_are_converted(tmp_path: Path, dtype: str, scaled: str) -> None:
    data = loaded(tmp_path, x=(np.abs(arrays()["x"]) * 10).astype(dtype))
    assert data.meta["scaled"] == scaled
    assert data.clients["client-0"].train.x.dtype == np.float32


def test_uint8_becomes_0_to_1(tmp_path: Path) -> None:
    x = np.tile(np.array([0, 51, 255], dtype=np.uint8), (60, 1))
    assert loaded(tmp_path, x=x).clients["client-0"].train.x[0].tolist() == pytest.approx([0, 0.2, 1])


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_whole_floats_are_labels(tmp_path: Path, dtype: str) -> None:
    assert loaded(tmp_path, y=arrays()["y"].astype(dtype)).labels == ("0", "1", "2")


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "result", "words"),
    [
        ((32, 24, 3), "uint8", "auto", (3, 32, 24), "images, turned from channels-last"),
        ((32, 24, 1), "float32", "auto", (1, 32, 24), "images, turned from channels-last"),
        ((3, 32, 24), "uint8", "auto", (3, 32, 24), "images, channels first"),
        ((3, 32, 3), "float32", "auto", (3, 32, 3), "images, channels first"),
        ((32, 24, 3), "uint8", "channels_first", (32, 24, 3), "images, channels first"),
        ((28, 28), "float32", "auto", (1, 28, 28), "images of one channel"),
        ((20, 30), "uint8", "auto", (1, 20, 30), "images of one channel"),
        ((6, 100), "float32", "auto", (6, 100), "series, (channels, time)"),
        ((100, 6), "float32", "auto", (6, 100), "series, turned from (time, channels)"),
        ((100, 6), "float32", "channels_first", (100, 6), "series, (channels, time)"),
        ((28, 28), "float32", "channels_first", (28, 28), "series, (channels, time)"),
        ((5,), "float32", "auto", (5,), "table"),
    ],
)
def test_layouts(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, layout: str, result: tuple[int, ...], words: str
) -> None:
    x = np.random.default_rng(0).integers(0, 200, (60, *shape)).astype(dtype)
    data = loaded(tmp_path, {"layout": layout, "standardize": False}, x=x, split=np.tile([0, 0, 2], 20))
    assert data.input_shape == result
    assert data.meta["layout"] == words


def test_turning_moves_axes_and_not_values(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 100, 6)).astype(np.float32)
    options = {"standardize": False, "validation": 0.0}
    data = loaded(tmp_path, options, x=x, split=np.tile([0, 0, 2], 20))
    assert np.array_equal(data.clients["client-0"].train.x[0], x[0].T)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"y": None}, r"array 'y' is missing, it holds \['client', 'x'\]; write it with numpy.savez"),
    ({"x": None}, "array 'x' is missing"),
    ({"x": np.array([[1.0, None]] * 60, dtype=object)}, "array 'x' holds Python objects; write numbers"),
    ({"x": np.array([["a"]] * 60)}, "x: holds <U1, need numbers"),
    ({"x": np.array(["a"] * 60)}, "x: holds <U1, need numbers"),
    ({"x": np.zeros(60, np.float32)}, r"x has shape \(60,\), need \(N, ...\); .* give x\[:, None\]"),
    ({"x": np.zeros((60, 0), np.float32)}, "holds no value"),
    ({"x": np.zeros((59, 5), np.float32)}, r"x has 59 rows, y has shape \(60,\)"),
    ({"y": np.zeros(59, int)}, r"x has 60 rows, y has shape \(59,\)"),
    (
        {"y": np.zeros((60, 4, 4), int)},
        r"y has shape \(60, 4, 4\); give one for each, \(N,\), or a row for each, \(N, K\)",
    ),
    ({"x": np.where(np.arange(300).reshape(60, 5) == 101, np.nan, 1.0)}, r"x\[20\] holds NaN"),
    ({"x": np.full((60, 5), np.inf, np.float32)}, r"x\[0\] holds NaN, infinity"),
    ({"x": np.full((60, 5), 1e300)}, r"x\[0\] holds .* beyond float32"),
    ({"x": np.full((60, 5), 1 << 40)}, "too large to stay exact as float32"),
    ({"y": np.zeros(60, int)}, "y holds one class only, 0"),
    ({"y": np.linspace(0, 1, 60)}, r"y has dtype float64, need whole numbers; a classifier .*: learn numbers"),
    (
        {"y": np.zeros((60, 3), int)},
        r"y has shape \(60, 3\), and classification takes one class for each, \(N,\); name",
    ),
    ({"y": np.full(60, np.nan)}, "y has dtype float64, need whole numbers"),
    ({"y": np.full(60, 2**63, np.uint64)}, "y has dtype uint64 and holds 9223372036854775808, beyond int64; write sm"),
    (
        {"client": np.full(60, np.nan)},
        "client has dtype float64, need whole numbers; number the clients from 0, or name",
    ),
    ({"y": np.r_[np.tile([0.0, 1.0], 29), np.nan, np.nan]}, r"y\[58\] is NaN, .* as 2 are; give them split=3, or drop"),
    ({"y": np.tile([0, 1, -1], 20)}, r"y\[2\] is -1, .* as 20 are; .*; where -1 is a class, write y \+ 1"),
    ({"y": np.tile(["", "b", "c"], 20)}, r"y\[0\] is empty, a sample without a label"),
    ({"y": np.eye(3)[np.tile([0, 1, 2], 20)]}, r"or write y\.argmax\(1\) where each row marks one class"),
    ({"y": np.zeros((60, 1), int)}, r"or write y\[:, 0\]"),
    ({"client": np.r_[np.zeros(57, int), 7, 8, 9]}, r"3 clients have 1 sample, .*; drop them: client-7, client-8, "),
    ({"split": np.r_[np.tile([0, 2], 10), np.zeros(40, int)]}, r"2 clients have no test sample .*: client-1, client-2"),
    ({"client": np.full(60, -1)}, "client=-1 is negative"),
    ({"client": np.array([""] * 60)}, "client holds an empty text; name every client"),
    ({"client": np.r_[np.zeros(59, int), 9]}, "client-9 has 1 sample, need at least 2"),
    ({"split": np.full(60, 4)}, "split=4 is unknown; use 0 train, 1 validation, 2 test, 3 unlabelled"),
    ({"split": np.full(60, 3)}, "split=3 marks every sample as unlabelled; mark some 0 train, 1 validation, 2 test"),
    ({"split": np.r_[np.tile([0, 2], 20), np.full(20, 3)]}, r"client-2 has no training sample \(split=0\)"),
    (
        {"x_unlabelled": np.zeros((3, 5))},
        "holds x and x_unlabelled; put the windows without label into x, with split=3",
    ),
    ({"split": np.zeros(6, int)}, r"x has 60 rows, split has shape \(6,\)"),
    (
        {"split": np.full(60, 2)},
        r"3 clients have no training sample \(split=0\); give each one, or drop them: client-0",
    ),
    ({"split": np.r_[np.tile([0, 2], 20), np.zeros(20, int)]}, r"client-2 has no test sample \(split=2\)"),
]


def test_two_classes_may_be_minus_one_and_one_and_those_about_zero_any(tmp_path: Path) -> None:
    assert loaded(tmp_path, y=np.tile([-1, 1], 30)).labels == ("-1", "1")
    assert loaded(tmp_path, y=np.tile([-2, -1, 0, 1, 2], 12)).labels == ("-2", "-1", "0", "1", "2")


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_arrays_name_field_value_and_mend(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, **changes)


def test_targets_whose_spread_would_count_as_none_are_refused() -> None:
    """Metres where nanometres are meant: each client learned nothing, and scored 0 or 1."""
    x, y = np.zeros((20, 3)), np.stack([np.arange(20.0), np.arange(20) * 1e-9], 1)
    with pytest.raises(DataError, match=r"of at most 1\.9e-08.*write them in a smaller unit"):
        Federated.from_arrays(x, y, clients=2, task="regression")
    for fine in (np.zeros(20), np.full(20, 3.5), 1 + np.arange(20) * 1e-9, y * 1e3):
        Federated.from_arrays(x, fine, clients=2, task="regression")


def test_a_file_or_folder_by_its_name_alone_is_told_how_to_be_named(tmp_path: Path) -> None:
    for name in ("mine.npz", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"does not say its form; write npz:"):
            load(name)


def test_a_pool_is_dealt_over_clients_and_no_sample_is_lost() -> None:
    labels = np.repeat(["a", "b", "c"], 60)
    x = np.arange(180.0)[:, None]
    shares = {}
    for alpha in (None, 0.1):
        found = Federated.from_arrays(x, labels, clients=9, alpha=alpha, standardize=False, seed=1)
        assert list(found.clients) == [f"client-{k}" for k in range(9)]
        parts = [part for one in found.clients.values() for part in (one.train, one.val, one.test)]
        assert sorted(np.concatenate([part.x[:, 0] for part in parts])) == list(range(180))
        sizes = [sum(map(len, (one.train, one.val, one.test))) for one in found.clients.values()]
        assert min(sizes) >= 10
        counts = [np.bincount(one.train.y, minlength=3) for one in found.clients.values()]
        shares[alpha] = np.mean([count.max() / count.sum() for count in counts])
        again = Federated.from_arrays(x, labels, clients=9, alpha=alpha, standardize=False, seed=1)
        assert all(np.array_equal(again.clients[name].train.x, one.train.x) for name, one in found.clients.items())
    assert shares[0.1] > shares[None] + 0.2
    assert found.meta["clients"] == "dealt by Dirichlet(0.1)"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"validation": float("nan")}, "validation=nan must be a number"),
        ({"validation": "0.1"}, "validation='0.1' must be a number"),
        ({"seed": "1"}, "seed='1' must be a whole number"),
        ({"standardize": "no"}, "standardize='no' must be true or false"),
        ({"newcomers": 1.0}, "newcomers=1.0 must be a whole number or a list"),
        ({"alpha": "x", "clients": 2}, "alpha='x' must be a number or left out"),
    ],
)
def test_options_in_python_are_checked_as_those_of_a_file(asked: dict[str, Any], says: str) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.tile([0, 1], 10)
    client = None if "clients" in asked else np.repeat(["anna", "bela"], 10)
    with pytest.raises(ConfigError, match=f"data: {says}"):
        Federated.from_arrays(x, y, client, **asked)


def test_numpys_numbers_and_a_name_alone_are_options() -> None:
    x, y, client = np.arange(40.0).reshape(20, 2), np.tile([0, 1], 10), np.repeat(["anna", "bela"], 10)
    for late in ("anna", ["anna"], np.array(["anna"])):
        found = Federated.from_arrays(x, y, client, seed=np.int64(3), newcomers=late)  # type: ignore[arg-type]
        assert (list(found.clients), list(found.newcomers)) == (["bela"], ["anna"])


def test_newcomers_are_drawn_or_named_and_scale_nobody(tmp_path: Path) -> None:
    client = np.repeat(["anna", "bela", "carl", "dora"], 20)
    x = np.where(client == "dora", 1000.0, np.arange(80.0))[:, None]
    y = np.arange(80) % 2
    named = Federated.from_arrays(x, y, client, newcomers=("dora",))
    assert (list(named.clients), list(named.newcomers)) == (["anna", "bela", "carl"], ["dora"])
    scaled = np.concatenate([one.train.x for one in named.clients.values()])
    assert (roundings(scaled.mean() + 1, 1.0), roundings(scaled.std(), 1.0)) < (64, 64)
    drawn = [Federated.from_arrays(x, y, client, newcomers=2, seed=seed) for seed in range(8)]
    assert {len(one.newcomers) for one in drawn} == {2}
    assert len({tuple(one.newcomers) for one in drawn}) > 1
    path = tmp_path / "mine.npz"
    np.savez(path, x=x, y=y, client=client)
    assert list(load(f"npz:{path}", newcomers="carl,dora").newcomers) == ["carl", "dora"]  # as a command has it


def test_a_pool_with_a_split_keeps_it_when_it_is_dealt(tmp_path: Path) -> None:
    split = np.tile([0, 0, 0, 1, 2, 3], 40)
    path = tmp_path / "pool.npz"
    np.savez(path, x=np.arange(240.0)[:, None], y=np.where(split == 3, -1, np.arange(240) // 6 % 2), split=split)
    found = load(f"npz:{path}", clients=3, alpha=5.0, standardize=False)
    for part, number in (("train", 0), ("val", 1), ("test", 2)):
        places = np.concatenate([getattr(one, part).x[:, 0] for one in found.clients.values()])
        assert sorted(places) == np.flatnonzero(split == number).tolist()
    assert sum(len(one.unlabelled) for one in found.clients.values() if one.unlabelled is not None) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients=0 must be at least 1"),
        ({"newcomers": "eve"}, r"newcomers=\['eve'\] must be some of the clients, and not all: "),
        ({"newcomers": 99}, r"newcomers=99 must be at most \d"),
        ({"newcomers": 1.5}, "newcomers=1.5 must be a whole number or a list"),
        ({"clients": 3}, "clients=3 deals one pool, but client says whose each sample is; leave it out"),
        ({"alpha": 0.3}, "alpha=0.3 says how skewed a pool is dealt; say over how many clients, too"),
        ({"layout": "NHWC"}, "layout='NHWC' is unknown; use one of auto, channels_first, channels_last"),
        ({"test": 0.0}, r"test=0.0 above 0"),
        ({"validation": 0.6, "test": 0.5}, "sum below 1"),
        ({"validation": -0.1}, "validation=-0.1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"split": 3}, "option 'split' is unknown; it takes validation, test, layout, standardize, seed"),
    ],
    ids=str,
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, options)


def test_files_that_are_not_npz(tmp_path: Path) -> None:
    path = tmp_path / "no.npz"
    with pytest.raises(DataError, match="no such file"):
        load(f"npz:{path}")
    path.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"not a .npz file"):
        load(f"npz:{path}")
    with pytest.raises(DataError, match="array 'x' is missing, it holds "):
        load(f"npz:{tmp_path}")


def header(shape: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros(3, np.float32))
    return stream.getvalue()[:128].replace(b"(3,), }" + b" " * (len(shape) - 4), shape.encode() + b", }")


def test_a_claimed_size_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    bomb = header("(99999999999999,)")
    assert len(bomb) == 128
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", bomb + bytes(12))
    with pytest.raises(DataError, match=r"array 'x' claims shape \(99999999999999,\) but has 12 bytes"):
        npz.read(path, ("x",))


@pytest.mark.parametrize(
    ("y", "shape"), [("|S0", "(99999999999,)"), ("<U0", "(99999999999,)"), ("<i8", "(99999999999, 0)")]
)
def test_rows_in_no_bytes_are_not_made(tmp_path: Path, y: str, shape: str) -> None:
    """numpy makes a text of no letters one of one letter, and labels and the like are made for each row."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header("(99999999999, 0)"))
        archive.writestr("y.npy", header(shape).replace(b"'<f4'", b"'%s'" % y.encode()))
    for name in ("x", "y"):
        with pytest.raises(DataError, match=rf"array '{name}' claims 99999999999 rows but holds no value"):
            npz.read(path, (name,))
    with pytest.raises(DataError, match="array 'x' claims 99999999999 rows but holds no value"):
        load(f"npz:{path}")


def test_a_limit_on_all_arrays_together(tmp_path: Path) -> None:
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, a=np.zeros(1000), b=np.zeros(1000), c=np.zeros(10**6))
    assert npz.read(path, ("a", "b"), limit=20_000)["b"].shape == (1000,)
    with pytest.raises(DataError, match="fill 16256 bytes, more than 16000"):
        npz.read(path, ("a", "b"), limit=16_000)


@given(st.data())
def test_any_flipped_byte_is_read_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = folder / "x.npz"
    value = np.arange(40, dtype=np.int64)
    np.savez_compressed(path, x=value)
    blob = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(blob)
    with contextlib.suppress(DataError):
        assert np.array_equal(npz.read(path, ("x",))["x"], value)


def test_samples_are_equal_to_themselves_alone() -> None:
    """What arrays hold is not compared: numpy would answer with an array."""
    x, y = np.ones((3, 2), np.float32), np.zeros(3, np.int64)
    some = Samples(x, y)
    assert some == some  # noqa: PLR0124
    assert some != Samples(x, y)
    assert len({some, Samples(x, y)}) == 2


def test_a_client_is_shown_without_its_recordings() -> None:
    part = Samples.of(np.zeros((5, 6, 32)), np.zeros(5))
    assert repr(part) == "Samples(5 of (6, 32))"
    assert repr(Client(part, part, part)).count("Samples(5 of (6, 32))") == 3
