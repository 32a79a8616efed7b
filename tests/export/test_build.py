import copy
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from talaria.errors import BundleError, ConfigError, DataError, ModelError
from talaria_export import make_bundle, open_bundle, verify_bundle


def test_fp32_agrees_with_torch_and_every_variant_has_a_row(made, imu):
    path, report = made
    assert report.ok
    assert report.figures["max_abs_diff"] <= 1e-5
    rows = open_bundle(path).manifest["variants"]
    assert [row["name"] for row in rows] == ["fp32", "fp16"]
    assert all(row["passed"] for row in rows)
    assert rows[1]["bytes"] < 0.55 * rows[0]["bytes"]


def test_without_a_clock_the_smallest_that_passes_is_chosen(made):
    assert made[1].figures["default"] == "fp16"


def test_card_labels_and_shape_are_in_the_manifest(bundle):
    opened = open_bundle(bundle)
    assert opened.manifest["card"] == {"algorithm": "hermes", "round": 3}
    assert opened.labels == tuple("abcdefg")
    assert opened.shape == (6, 100)


def test_no_sample_of_the_user_is_in_the_file_unless_asked_for(imu, bundle, tmp_path):
    windows = [window.numpy().tobytes()[:64] for window in imu.x]
    assert not any(window in bundle.read_bytes() for window in windows)
    asked = tmp_path / "open.talaria"
    make_bundle(
        asked,
        imu.model,
        example=imu.x,
        samples=(imu.x, imu.y),
        variants=("fp32",),
        seconds=0,
        keep_samples=True,
        probes=4,
    )
    assert windows[3] in asked.read_bytes()
    assert verify_bundle(asked, seconds=0).ok
    assert open_bundle(asked).array("parity/inputs.npy").shape == (4, 6, 100)


def test_dense_model_travels_without_its_weights(imu, bundle):
    opened = open_bundle(bundle)
    assert len(opened.members["reference/dense.onnx"]) < 10_000
    assert opened.manifest["reference"]["bytes"] > 100_000
    weight = next(imu.model.parameters()).detach().numpy().tobytes()[:64]
    assert weight not in bytes(opened.members["reference/dense.onnx"])


class Drifting(nn.Module):
    """Answers differently each time, so no file can agree with it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :7] + torch.rand_like(x.flatten(1)[:, :7])


def test_model_that_its_file_cannot_equal_is_refused_and_nothing_is_written(imu, tmp_path):
    with pytest.raises(ModelError, match="differs from torch"):
        make_bundle(tmp_path / "x.talaria", Drifting(), example=imu.x, variants=("fp32",), seconds=0)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_training_diverged_is_refused(imu, tmp_path):
    astray = copy.deepcopy(imu.model)
    next(astray.parameters()).data.fill_(float("nan"))
    with pytest.raises(ModelError, match="gives NaN or infinity, as after a training that diverged"):
        make_bundle(
            tmp_path / "x.talaria", astray, example=imu.x, calibration=imu.x, variants=("fp32", "int8"), seconds=0
        )
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_bundle(imu, bundle, tmp_path, monkeypatch):
    import os

    target = tmp_path / "me.talaria"
    target.write_bytes(bundle.read_bytes())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BundleError, match="No space left"):
        make_bundle(target, imu.model, example=imu.x, variants=("fp32",), seconds=0)
    monkeypatch.undo()
    assert target.read_bytes() == bundle.read_bytes()
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"labels": ["one"]}, "labels"),
        ({"variants": ("fp32", "int3")}, "int3"),
        ({"keep_samples": True}, "samples"),
        ({"probes": 0}, "probes"),
        ({"meta": {"x": float("nan")}}, "meta"),
        ({"signing_key": b"short"}, "signing_key: is 5 bytes"),
        ({"signing_key": "x" * 32}, "signing_key: is a str; an Ed25519 private key is 32 bytes"),
        ({"probes": 1.5}, "probes=1.5 must be a whole number"),
        ({"variants": None}, "variants=None must be a list of names"),
        ({"variants": "int8"}, "variants='int8' must be a list of names"),
        ({"created": 5}, "created=5 must be a text"),
        ({"normalize": {"mean": 0, "std": 1}}, r"normalize=.* must be \(mean, std\)"),
        ({"normalize": (0, 1, 2)}, r"normalize=\(0, 1, 2\) must be \(mean, std\)"),
        ({"labels": ["a" * 2000, *"bcdefg"]}, "labels: 'aaa.* has 2000 characters; use at most 1000"),
        ({"labels": [*"abcdef", ""]}, "labels: 6 has no name; give one per class"),
        ({"meta": {"x": "x" * (1 << 20)}}, "meta: makes manifest.json .* bytes, and 1048576 are read; shorten it"),
    ],
)
def test_bad_options_are_named(imu, tmp_path, options, word):
    arguments = {"variants": ("fp32",)} | options
    with pytest.raises(ConfigError, match=word):
        make_bundle(tmp_path / "x.talaria", imu.model, example=imu.x, seconds=0, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_member_that_is_not_there_is_told_with_those_that_are(bundle):
    with pytest.raises(ConfigError, match=r"member='inputs' is not in .*; it holds parity/outputs\.npy, "):
        open_bundle(bundle).array("inputs")


def test_report_is_plain_data(made):
    assert json.loads(json.dumps(made[1].to_json()))["ok"] is True


def test_parity_inputs_come_back_from_their_seed(bundle):
    from talaria_export.runtime.parity_inputs import drawn

    source = open_bundle(bundle).manifest["parity"]["inputs"]
    first = drawn(source["seed"], 4, (6, 100), source["shift"], source["scale"])
    assert np.array_equal(first, drawn(source["seed"], 4, (6, 100), source["shift"], source["scale"]))
    assert abs(float(first.std()) - source["scale"]) < 0.05


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"example": None}, "example: holds object, need numbers"),
        ({"example": np.zeros((1, 6, 100))}, r"example: need a float32 batch \(N, ...\), got float64 .*numpy.float32"),
        ({"samples": (1, 2, 3)}, r"samples: need Samples, or a pair \(x, y\) of arrays, got tuple"),
        ({"samples": (np.zeros((2, 6, 100)), [7, 8])}, r"samples: labels span 7\.\.8, need 0\.\.6"),
        (
            {"calibration": np.zeros((4, 3, 100), np.float32)},
            r"calibration is float32 \(4, 3, 100\), but the model takes",
        ),
        ({"calibration": np.full((4, 6, 100), np.nan, np.float32)}, "calibration holds NaN or infinity"),
        ({"meta": ["a"]}, r"meta=\['a'\] must be a table by names"),
        ({"gate": 0.9}, r"gate=0.9 must be a Gate, such as Gate\(agreement=0.98\)"),
        ({"seconds": "long"}, "seconds='long' must be at least 0"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"stride": 2.5}, "stride=2.5 must be a whole number"),
        ({"model": len}, "model=.*len.* must be a torch module"),
    ],
)
def test_what_is_given_wrong_is_told_and_nothing_is_written(imu, tmp_path, given, said):
    """Each ended in an error of Python's, numpy's or ONNX Runtime's, or passed: labels that no answer meets."""
    model, options = given.pop("model", imu.model), {"example": imu.x, "seconds": 0} | given
    with pytest.raises((ConfigError, DataError, ModelError), match=said):
        make_bundle(tmp_path / "me.talaria", model, **options)
    assert not list(tmp_path.iterdir())


def test_an_example_may_be_part_of_a_training(imu, tmp_path):
    example = imu.x.clone().requires_grad_()
    assert make_bundle(tmp_path / "me.talaria", imu.model, example=example, variants=("fp32",), seconds=0).ok
