"""A user's data: read without executing it, and refused with the reason where it cannot be learned from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError
from talaria.types import Samples
from talaria_edge.data import DeviceData, Given, NamedSource, NpzSource, checked, handed

SHAPE, CLASSES = (6, 32), 3


def arrays(n=12, **changes):
    y = np.arange(n) % CLASSES
    x = np.random.default_rng(0).standard_normal((n, *SHAPE)).astype(np.float32)
    return {"x_train": x, "y_train": y, "x_val": x[:3], "y_val": y[:3]} | changes


def saved(tmp_path, **changes):
    path = tmp_path / "data.npz"
    np.savez(path, **{k: v for k, v in arrays(**changes).items() if v is not None})
    return path


def test_npz_and_folder_give_the_same(tmp_path):
    given = arrays()
    one = NpzSource(saved(tmp_path)).load()
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, value in given.items():
        np.save(folder / f"{name}.npy", value)
    two = NpzSource(folder).load()
    for found in (one, two):
        data = checked(found, SHAPE, CLASSES)
        assert np.array_equal(data.train.x, given["x_train"])
        assert data.train.y.tolist() == given["y_train"].tolist()
        assert len(data.val) == 3
        assert data.test is None


def test_test_samples_are_taken_where_given(tmp_path):
    given = arrays()
    found = NpzSource(saved(tmp_path, x_test=given["x_val"], y_test=given["y_val"])).load()
    assert len(found.test) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, "lacks x_train"),
        ({"y_val": None}, "lacks y_val"),
        ({"x_train": np.array(["a"] * 12)}, "need numbers"),
        ({"y_train": np.zeros(5, dtype=int)}, r"y_train \(5,\); give one label per sample"),
        (
            {"x_val": np.zeros((3, *SHAPE), np.uint8)},
            "x_val is uint8, x_train float32; .* divided by 255, so write all",
        ),
        ({"client": np.repeat([0, 1], 6)}, "holds x_train and client, which goes with x and y of all"),
        ({"y_train": np.zeros((12, 1), dtype=int)}, r"y_val is \(3,\), y_train \(12, 1\); give alike targets"),
    ],
)
def test_bad_arrays(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        NpzSource(saved(tmp_path, **changes)).load()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_in_a_window(tmp_path, value):
    x = arrays()["x_train"]
    x[7, 2, 3] = value
    with pytest.raises(DataError, match=r"data\.npz: x_train\[7\] holds NaN, infinity .*; drop or repair that sample"):
        NpzSource(saved(tmp_path, x_train=x)).load()


def test_a_sample_that_is_not_finite_is_told_by_its_place_in_the_file(tmp_path):
    path, split = tmp_path / "one.npz", np.array([0, 1, 0, 1, 3, 0, 1, 0])
    for row, array in ((6, "x"), (5, "x"), (4, "x"), (6, "y")):
        x, y = np.zeros((8, 4), np.float32), np.arange(8) / 3
        {"x": x, "y": y}[array].reshape(8, -1)[row, 0] = np.nan
        np.savez(path, x=x, y=y, split=split)
        with pytest.raises(DataError, match=rf"one\.npz: {array}\[{row}\] holds NaN"):
            NpzSource(path).load()
    given = arrays()
    x = np.concatenate([given["x_val"]] * 2)
    x[1, 0, 0] = np.inf
    with pytest.raises(DataError, match=r"x_unlabelled\[1\] holds"):
        NpzSource(saved(tmp_path, x_unlabelled=x)).load()


def test_a_device_with_one_sample_is_told_what_it_lacks(tmp_path):
    np.savez(tmp_path / "one.npz", x=np.zeros((1, 4), np.float32), y=[1])
    with pytest.raises(DataError, match=r"one\.npz holds one sample of this device, .* record more, or say by split"):
        NpzSource(tmp_path / "one.npz").load()


def test_another_device_with_one_sample_does_not_keep_a_device_from_its_own(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32), np.arange(21) % 2
    np.savez(tmp_path / "shared.npz", x=x, y=y, client=np.array(["anna"] * 20 + ["bela"]))
    data = NpzSource(tmp_path / "shared.npz", "anna").load()
    assert len(data.train) + len(data.val) + len(data.test) == 20
    with pytest.raises(DataError, match="one sample of this device"):
        NpzSource(tmp_path / "shared.npz", "bela").load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((0, *SHAPE), np.float32), "y_train": np.zeros(0, int)}, "train holds no sample"),
        ({"y_train": np.ones(12, int)}, "only class 1"),
        (
            {"x_train": np.zeros((12, 6, 31), np.float32), "x_val": np.zeros((3, 6, 31), np.float32)},
            r"shape \(6, 31\), but the model takes \(6, 32\)",
        ),
        ({"x_val": np.zeros((3, 5, 32), np.float32)}, r"val samples have shape \(5, 32\)"),
        ({"y_train": np.arange(12) % 4}, r"train labels span 0\.\.3, need 0\.\.2; map them"),
        (
            {"y_train": np.arange(12) / 2, "y_val": np.zeros(3)},
            r"train labels are float32 \(12,\), need int64.*name the task",
        ),
        ({"y_train": np.arange(12) % 3 - 1}, r"span -1..1"),
    ],
)
def test_data_that_does_not_suit_the_model(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        checked(NpzSource(saved(tmp_path, **changes)).load(), SHAPE, CLASSES)


def test_an_empty_validation_part_is_allowed(tmp_path):
    empty = {"x_val": np.zeros((0, *SHAPE), np.float32), "y_val": np.zeros(0, int)}
    assert len(checked(NpzSource(saved(tmp_path, **empty)).load(), SHAPE, CLASSES).val) == 0


def test_no_file_and_no_npz(tmp_path):
    with pytest.raises(DataError, match=r"none\.npz is not there; correct \[data\] path"):
        NpzSource(tmp_path / "none.npz").load()
    (tmp_path / "data.npz").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="not a zip file"):
        NpzSource(tmp_path / "data.npz").load()


def test_pickled_arrays_are_never_opened(tmp_path):
    np.savez(tmp_path / "data.npz", **arrays(y_val=np.array([{"an": "object"}] * 3, dtype=object)))
    with pytest.raises(DataError, match="holds Python objects"):
        NpzSource(tmp_path / "data.npz").load()


def test_a_declared_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_edge.data.LIMIT", 1000)
    with pytest.raises(DataError, match="more than 1000"):
        NpzSource(saved(tmp_path)).load()


def test_named_datasets():
    found = NamedSource("smartwatch", "s01-left").load()
    assert found.train.x.shape[1:] == (6, 100)
    with pytest.raises(ConfigError, match="no client 'nobody'; choose one of s01-left"):
        NamedSource("smartwatch", "nobody").load()
    with pytest.raises(ConfigError, match="'starwatch' is unknown"):
        NamedSource("starwatch", "x").load()


def test_given_samples():
    samples = Samples.of(np.zeros((2, 1)), [0, 1])
    assert Given(lambda: DeviceData(samples, samples)).load().train is samples


@pytest.mark.parametrize("targets", ["numbers", "one number", "labels"])
def test_targets_of_other_tasks_are_taken_as_arrays_and_files(tmp_path, targets):
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    y = {"numbers": x[:, :2] * 9, "one number": x[:, 0], "labels": (x[:, :2] > 0).astype(int)}[targets]
    task, outputs = ("multilabel", 2) if targets == "labels" else ("regression", 1 if y.ndim == 1 else 2)
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    np.savez(tmp_path / "parts.npz", x_train=x[:20], y_train=y[:20], x_val=x[20:], y_val=y[20:])
    given = (x, y), ((x[:20], y[:20]), (x[20:], y[20:])), (torch.from_numpy(x), torch.from_numpy(y))
    for found in (
        *map(handed, given), NpzSource(tmp_path / "whole.npz").load(), NpzSource(tmp_path / "parts.npz").load()
    ):  # fmt: skip
        data = checked(found, (4,), outputs, task)
        assert len(data.train) + len(data.val) + len(data.test or ()) == 30
        assert data.train.y.shape[1:] == y.shape[1:]
    np.savez(tmp_path / "odd.npz", x_train=x[:20], y_train=y[:20], x_val=x[20:], y_val=np.zeros((10, 7)))
    with pytest.raises(DataError, match=r"y_val is \(10, 7\), y_train .*; give alike targets"):
        NpzSource(tmp_path / "odd.npz").load()


def test_named_inputs_of_a_device_stand_side_by_side(tmp_path):
    draw = np.random.default_rng(0)
    xs = {"walk": draw.normal(size=(30, 2, 3)), "mask": draw.normal(size=(30, 3)) > 0}
    y = np.arange(30) % 3
    np.savez(tmp_path / "mine.npz", y=y, **{f"x_{name}": values for name, values in xs.items()})
    for found in (NpzSource(tmp_path / "mine.npz").load(), handed((xs, y))):
        data = checked(found, (9,), 3)
        assert set(np.unique(data.train.x[:, :3])) == {0.0, 1.0}  # mask comes before walk
        assert len(checked(found, (9,), 3, parts={"mask": (3,), "walk": (2, 3)}).train)
        for other in ({"mask": (3,), "walk": (3, 2)}, {"a": (6,), "mask": (3,)}, {}):
            with pytest.raises(DataError, match=r"have the inputs mask \(3,\), walk \(2, 3\), and the model takes"):
                checked(found, (9,), 3, parts=other)


def test_a_device_reads_its_own_unlabelled_windows_of_a_file(tmp_path):
    given = arrays(24)
    x, y, owner = given["x_train"], np.array(["a", "b", "c"])[given["y_train"]], np.repeat(["anna", "bela"], 12)
    split = np.tile([0, 0, 0, 1, 2, 3], 4)
    y[split == 3] = ""
    np.savez(tmp_path / "all.npz", x=x, y=y, client=owner, split=split)
    data = checked(NpzSource(tmp_path / "all.npz", "bela", ("a", "b", "c")).load(), SHAPE, CLASSES)
    assert [len(part) for part in (data.train, data.val, data.test)] == [6, 2, 2]
    assert np.array_equal(data.unlabelled, x[12:][split[12:] == 3])
    apart = NpzSource(saved(tmp_path, x_unlabelled=x[:5])).load()
    assert np.array_equal(apart.unlabelled, x[:5])
    assert NpzSource(saved(tmp_path)).load().unlabelled is None


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 6, 31), np.float32), r"unlabelled is float32 \(2, 6, 31\), but the model takes float32"),
        (np.zeros((2, *SHAPE)), "unlabelled is float64"),
        ([[0.0]], "unlabelled is list"),
        (np.full((2, *SHAPE), np.nan, np.float32), "unlabelled holds NaN or infinity; drop or repair"),
    ],
)
def test_unlabelled_inputs_that_do_not_suit_the_model(tmp_path, x, message):
    data = NpzSource(saved(tmp_path)).load()
    with pytest.raises(DataError, match=message):
        checked(replace(data, unlabelled=x), SHAPE, CLASSES)


def test_unlabelled_inputs_are_bounded(tmp_path, monkeypatch):
    data = replace(NpzSource(saved(tmp_path)).load(), unlabelled=np.zeros((2, *SHAPE), np.float32))
    assert checked(data, SHAPE, CLASSES).unlabelled is data.unlabelled
    monkeypatch.setattr("talaria_edge.data.LIMIT", 1000)
    with pytest.raises(DataError, match="unlabelled holds 1536 bytes, more than 1000; give the latest"):
        checked(data, SHAPE, CLASSES)


def test_pixels_that_a_program_hands_over_are_those_of_a_file_and_of_a_simulation(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 9), np.uint8), np.tile([0, 1], 10)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    simulated = Federated.from_arrays(x, y, split=np.repeat([0, 1, 2], [10, 5, 5])).clients["client-0"]
    assert np.array_equal(handed(((x[:10], y[:10]), (x[10:15], y[10:15]))).train.x, simulated.train.x)
    for found in (NpzSource(tmp_path / "mine.npz").load(), handed((x, y))):
        assert 0.9 < found.train.x.max() <= 1


def test_a_device_without_a_labelled_step_does_not_learn():
    x = np.zeros((6, 3, 12), np.float32)
    with pytest.raises(DataError, match="train holds no labelled step, all are -1; label some before"):
        checked(handed(((x, np.full((6, 12), -1)), (x, np.zeros((6, 12), int)))), (3, 12), 2, "per_step")
