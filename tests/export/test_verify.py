import json

import numpy as np
import onnx
import pytest

from talaria.errors import ConfigError, DataError
from talaria_export import Predictor, verify_bundle
from talaria_export.bundle.archive import pack, unpack
from talaria_export.bundle.bundle import array_bytes, read_bundle, seal
from talaria_export.runtime.verify import class_numbers


def resealed(path, target, change):
    """A bundle with changed members whose hashes are right again: what a careful forger would write."""
    opened = read_bundle(path.read_bytes())
    members = {name: bytes(content) for name, content in opened.members.items()}
    manifest = json.loads(json.dumps(dict(opened.manifest)))
    change(manifest, members)
    target.write_bytes(seal({k: v for k, v in manifest.items() if k != "files"}, members))
    return target


def test_sound_bundle_passes_and_says_what_was_checked(bundle, imu):
    report = verify_bundle(bundle, samples=(imu.x.numpy(), imu.y.numpy()), seconds=0)
    assert report.ok
    assert {check.name for check in report.checks} == {"integrity", "parity fp16", "parity fp32", "agreement"}
    assert report.figures["accuracy"] == 1.0
    assert report.figures["max_abs_diff"]["fp32"] <= 1e-4


def test_samples_may_name_their_classes(bundle, imu):
    names = np.array(read_bundle(bundle.read_bytes()).labels)
    report = verify_bundle(bundle, samples=(imu.x.numpy(), names[imu.y.numpy()]), seconds=0)
    assert report.figures["accuracy"] == 1.0


def test_pixels_are_scaled_as_in_a_file_to_learn_from(bundle, imu):
    x = np.random.default_rng(0).integers(0, 256, (64, 6, 100), np.uint8)
    y = Predictor(bundle)(x.astype(np.float32) / np.float32(255)).logits.argmax(1)
    assert verify_bundle(bundle, samples=(x, y), seconds=0).figures["accuracy"] == 1.0


def test_a_class_is_told_by_its_name_or_by_its_number():
    labels = ("3", "7", "100")
    assert class_numbers(np.array([100, 3, 7, 3]), labels).tolist() == [2, 0, 1, 0]
    assert class_numbers(np.array([2, 0, 1]), labels).tolist() == [2, 0, 1]
    assert class_numbers(np.array([b"7", b"3"]), labels).tolist() == [1, 0]
    assert class_numbers(np.array([], np.int64), labels).tolist() == []
    for odd, said in ((np.array([0, 5]), "5"), (np.array(["run", "3"]), "run"), (np.array([0.5]), "0.5")):
        with pytest.raises(DataError, match=rf"label '{said}' is no class of the bundle; give its names \(3, 7, 100\)"):
            class_numbers(odd, labels)


def test_latency_is_compared_with_dense_in_the_same_run(bundle):
    report = verify_bundle(bundle, seconds=0.05)
    assert report.figures["latency_ms"] > 0
    assert report.figures["latency_ratio"] > 0


def test_damage_is_reported_not_raised(bundle, tmp_path):
    bad = tmp_path / "bad.talaria"
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    report = verify_bundle(bad)
    assert not report.ok
    assert report.failed[0].name == "integrity"
    assert "damaged" in report.failed[0].detail


def test_a_model_that_loads_and_cannot_run_is_reported_not_raised(bundle, tmp_path):
    """As one of several files that a command is to verify."""

    def change(manifest, members):
        name = next(one["file"] for one in manifest["variants"] if one["name"] == "fp32")
        model = onnx.load_from_string(members[name])
        output = model.graph.output[0].name
        for node in model.graph.node:
            node.output[:] = ["before" if one == output else one for one in node.output]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(99), "beyond"))
        model.graph.node.append(onnx.helper.make_node("Gather", ["before", "beyond"], [output], axis=0))
        members[name] = model.SerializeToString()

    report = verify_bundle(resealed(bundle, tmp_path / "odd.talaria", change), seconds=0)
    assert [check.name for check in report.failed] == ["runs"]
    assert "fp32 cannot be run on the bundle's own inputs (x: ONNX Runtime refused" in report.failed[0].detail


def test_missing_file_is_reported(tmp_path):
    report = verify_bundle(tmp_path / "none.talaria")
    assert not report.ok
    assert "cannot read" in report.failed[0].detail


def test_other_weights_under_right_hashes_fail_parity(bundle, tmp_path):
    def change(manifest, members):
        members["parity/outputs.npy"] = array_bytes(read_bundle(bundle.read_bytes()).array("parity/outputs.npy") + 0.01)

    report = verify_bundle(resealed(bundle, tmp_path / "forged.talaria", change), seconds=0)
    assert {check.name for check in report.failed} == {"parity fp16", "parity fp32"}


def test_outputs_of_the_wrong_shape_are_reported(bundle, tmp_path):
    def change(manifest, members):
        members["parity/outputs.npy"] = array_bytes(np.zeros((3, 7)))

    report = verify_bundle(resealed(bundle, tmp_path / "forged.talaria", change), seconds=0)
    assert [check.name for check in report.failed] == ["runs"]


@pytest.mark.parametrize(
    "samples", [(np.zeros((2, 5, 100)), [0, 1]), (np.zeros((2, 6, 100)), [0]), (np.zeros((2, 6, 100)), [0.5, 1])]
)
def test_samples_that_do_not_fit_are_the_callers_error(bundle, samples):
    with pytest.raises(DataError):
        verify_bundle(bundle, samples=samples, seconds=0)


def test_a_reference_that_is_no_model_is_the_callers_error(bundle):
    with pytest.raises(ConfigError, match="reference: ONNX Runtime cannot load it"):
        verify_bundle(bundle, reference=b"no model")


def test_swapped_members_are_found(bundle, tmp_path):
    members = {name: bytes(content) for name, content in unpack(bundle.read_bytes()).items()}
    names = ["models/fp32.onnx", "models/fp16.onnx"]
    members[names[0]], members[names[1]] = members[names[1]], members[names[0]]
    bad = tmp_path / "swapped.talaria"
    bad.write_bytes(pack(members))
    assert "not the one" in verify_bundle(bad).failed[0].detail
