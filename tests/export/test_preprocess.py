"""Raw numbers and whole recordings in, the same answers out: normalization and windows inside the graph."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import roundings

from talaria.errors import BundleError, ConfigError, DataError
from talaria_export import Predictor, export_onnx, make_bundle, open_bundle, verify_bundle
from talaria_export.bundle.bundle import array_bytes, read_bundle, seal
from talaria_export.bundle.preprocess import Preprocessing, inputs_of, preprocessing
from talaria_export.runtime.parity_inputs import drawn
from talaria_export.runtime.session import Session

MEAN, STD = np.arange(6.0), np.arange(1.0, 7.0)


def recording_of(length: int) -> np.ndarray:
    """Raw numbers (time, 6) that are standard normal once they are normalized."""
    return (np.random.default_rng(length).normal(size=(length, 6)) * STD + MEAN).astype(np.float32)


def windows_of(model: torch.nn.Module, recording: np.ndarray, stride: int) -> np.ndarray:
    """What torch answers for the windows of a recording, cut and normalized by hand."""
    normal = torch.from_numpy(((recording - MEAN) / STD).astype(np.float32))
    with torch.no_grad():
        return model(normal.T.unfold(1, 100, stride).permute(1, 0, 2)).numpy()


@pytest.mark.parametrize("length", [100, 149, 150, 517])
@pytest.mark.parametrize("variant", ["fp32", None])
def test_recording_of_any_length_is_normalized_and_cut_inside_the_graph(imu, raw, length, variant):
    recording = recording_of(length)
    answer = Predictor(raw[0], variant=variant)(recording)
    expected = windows_of(imu.model, recording, 50)
    assert answer.logits.shape == ((length - 100) // 50 + 1, 7)
    if variant == "fp32":
        assert roundings(answer.logits, expected) <= 1000
    assert (answer.index == expected.argmax(1)).mean() >= 0.8


def test_every_variant_was_measured_and_proven_with_the_steps_inside(imu, raw):
    path, report = raw
    assert report.figures["max_abs_diff"] <= 1e-4
    assert [row["bytes"] for row in report.figures["variants"] if row["bytes"]]
    opened = open_bundle(path)
    assert opened.manifest["input"]["windows"] == {"size": 100, "stride": 50}
    assert opened.manifest["input"]["normalized"] == {"mean": list(MEAN), "std": list(STD)}
    for row in opened.manifest["variants"]:
        assert row["file"] is None or len(opened.members[row["file"]]) == row["bytes"]
    windows = imu.x.numpy() * STD[:, None] + MEAN[:, None]
    checked = verify_bundle(path, samples=(windows, imu.y.numpy()), seconds=0.02)
    assert checked.ok, checked.failed
    assert checked.figures["accuracy"] >= 0.95
    assert checked.figures["latency_ratio"] > 0


def test_normalization_alone_takes_raw_batches(imu, tmp_path):
    path = tmp_path / "raw.talaria"
    make_bundle(
        path, imu.model, example=imu.x, samples=(imu.x, imu.y), normalize=(2.0, 3.0), variants=("fp32",), seconds=0,
        keep_samples=True, probes=4,
    )  # fmt: skip
    with torch.no_grad():
        expected = imu.model(imu.x).numpy()
    assert roundings(Predictor(path)(imu.x * 3 + 2).logits, expected) <= 1000
    assert roundings(open_bundle(path).array("parity/inputs.npy"), imu.x[:4] * 3 + 2) <= 16
    assert verify_bundle(path, samples=(imu.x * 3 + 2, imu.y.numpy()), seconds=0).ok


@pytest.mark.parametrize("stride", [None, 50])
def test_parity_is_proven_on_inputs_in_the_unit_of_each_channel(imu, tmp_path, stride):
    path, units = tmp_path / "units.talaria", ([0.0] * 6, [1e-30, 1e-6, 1.0, 3.0, 1e6, 1e20])
    make_bundle(
        path, imu.model, example=imu.x, samples=(imu.x, imu.y), normalize=units, stride=stride, variants=("fp32",),
        seconds=0,
    )  # fmt: skip
    opened = open_bundle(path)
    assert np.abs(opened.array("parity/outputs.npy")).max() < 100, "its inputs are near those that it learned from"
    assert opened.manifest["parity"]["tolerance"] <= 1e-3
    assert verify_bundle(path, seconds=0).ok


def test_bundle_whose_parity_inputs_were_drawn_raw_verifies(raw, tmp_path):
    opened, path = open_bundle(raw[0]), tmp_path / "older.talaria"
    source = {"seed": 0, "count": 4, "shift": 0.0, "scale": 4.0}
    outputs = Session(bytes(opened.members["models/fp32.onnx"]))(drawn(0, 250, (6,), 0.0, 4.0))
    manifest = opened.manifest | {"parity": opened.manifest["parity"] | {"inputs": source, "tolerance": 1e-3}}
    members = {name: bytes(content) for name, content in opened.members.items()}
    path.write_bytes(seal(manifest, members | {"parity/outputs.npy": array_bytes(outputs)}))
    report = verify_bundle(path, seconds=0)
    assert report.ok, report.failed
    assert report.figures["max_abs_diff"]["fp32"] <= 1e-3


def test_kept_samples_travel_as_one_recording(imu, tmp_path):
    path = tmp_path / "cut.talaria"
    make_bundle(
        path, imu.model, example=imu.x, samples=(imu.x, imu.y), stride=30, variants=("fp32",), seconds=0,
        keep_samples=True, probes=3,
    )  # fmt: skip
    kept = open_bundle(path).array("parity/inputs.npy")
    assert np.array_equal(kept, np.concatenate([window.numpy().T for window in imu.x[:3]]))
    assert verify_bundle(path, seconds=0).ok


def test_single_file_takes_the_steps_too(imu):
    data = export_onnx(imu.model, imu.x, steps=preprocessing((6, 100), (MEAN, STD), 25))
    recording = recording_of(225)
    assert roundings(Session(data)(recording), windows_of(imu.model, recording, 25)) <= 1000
    with pytest.raises(ConfigError, match="steps"):
        export_onnx(imu.model, imu.x, steps=preprocessing((6, 99)))


@given(size=st.integers(1, 9), stride=st.integers(1, 9), count=st.integers(1, 6), rest=st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_cutting_by_hand_gives_the_same_windows(size, stride, count, rest):
    steps = Preprocessing((2, size), (1.0, 2.0), (3.0, 4.0), stride)
    length, channels = steps.inputs(count)
    recording = np.random.default_rng(size).normal(size=(length + min(rest, stride - 1), channels)).astype(np.float32)
    found = steps.apply(recording)
    assert found.shape == (count, 2, size)
    for number in range(count):
        window = recording[number * stride : number * stride + size].T
        assert roundings(found[number], (window - [[1], [2]]) / [[3], [4]]) <= 16


def test_windows_are_raised_and_joined_without_a_change():
    steps = Preprocessing((2, 5), (1.0,), (2.0,), 5)
    x = np.random.default_rng(1).normal(size=(3, 2, 5)).astype(np.float32)
    assert roundings(steps.apply(steps.joined(steps.raw(x))), x) <= 16
    assert Preprocessing.from_json({"shape": [2, 5], **steps.to_json()}) == steps
    assert Preprocessing.from_json({"shape": [2, 5]}).empty


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (0.0, 0.0), (float("nan"), 1.0), (0.0, [1.0, -1.0]), (0.0, float("inf")), ([0.0] * 5, [1.0] * 5),
        ([0.0, 0.0], 1.0), ("x", 1.0), ([], []), (0.0, 1e-50),
    ],
)  # fmt: skip
def test_normalization_without_a_meaning_is_refused(mean, std):
    with pytest.raises(ConfigError, match="normalize"):
        preprocessing((6, 100), (mean, std))


@pytest.mark.parametrize(("shape", "stride"), [((6, 100), 0), ((6, 100), -1), ((6, 100), 1 << 24), ((3, 8, 8), 4)])
def test_windows_without_a_meaning_are_refused(shape, stride):
    with pytest.raises(ConfigError, match="stride"):
        preprocessing(shape, None, stride)


@pytest.mark.parametrize("x", [np.zeros((99, 6)), np.zeros((300, 5)), np.zeros(6), np.zeros((2, 100, 6)), "words"])
def test_recording_that_does_not_fit_is_refused(x):
    with pytest.raises(DataError, match="x:"):
        inputs_of(preprocessing((6, 100), None, 50), x)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"windows": {"size": 99, "stride": 50}}, "input"),
        ({"windows": {"size": 100, "stride": 0}}, "input"),
        ({"windows": {"size": 100, "stride": 1 << 23}}, "numbers"),
        ({"shape": [1 << 24, 1 << 24]}, "input"),
        ({"shape": []}, "input"),
        ({"normalized": {"mean": [0.0], "std": [0.0]}}, "normalize"),
        ({"normalized": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}}, "normalize"),
        ({"normalized": {"mean": [10**400], "std": [1.0]}}, "input"),
        ({"normalized": None}, "input"),
    ],
)
def test_manifest_whose_steps_have_no_meaning_is_refused(raw, change, word):
    opened = read_bundle(raw[0].read_bytes())
    manifest = {k: v for k, v in opened.manifest.items() if k != "files"}
    manifest["input"] = opened.manifest["input"] | change
    with pytest.raises(BundleError, match=word):
        seal(manifest, {k: bytes(v) for k, v in opened.members.items()})


def test_bundle_that_cuts_otherwise_is_not_swapped_in(raw, bundle):
    predictor = Predictor(raw[0])
    assert predictor.steps.windows == (100, 50)
    with pytest.raises(ConfigError, match="recordings"):
        predictor.swap(bundle)
